"""Messages about wrong settings: name, value, expected value, and the variable or file with it.

Pydantic describes the expected value; `_MUST` rephrases what only programmers understand. No
message shows a secret, nor an unknown setting's value, which may be a misplaced one.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from caf_pipeline.errors import SettingsError

DOCUMENTATION: Final = "docs/reference/settings.md lists every setting"

SHOWN_CHARACTERS: Final = 60  # of a value
SHOWN_PROBLEMS: Final = 10  # of one reading

LIKE: Final = 0.6
"""Similarity (0 to 1, as `get_close_matches` counts) of names that may be a typing error."""

LIKE_VARIABLE: Final = 0.9
"""The same for variables. Other programs have variables that begin like ours."""

_A_LIST: Final = 'a list such as ["one", "two"]'
_A_SIZE: Final = "a size such as 65536, 64MiB or 30GiB"

_MUST: Final = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "string": "text",
    "path": "a path",
    "tuple": _A_LIST,
    "byte": _A_SIZE,
}
"""What a value must be, by the first word of pydantic's error type."""

_PREFIX: Final = "CAF_"
_BETWEEN: Final = "__"
_CREDENTIALS_IN_URL: Final = re.compile(r"//[^/\s]*@")
_WORDS_OF_A_WALLET: Final = 12
_IDENTITY: Final = "AGE-SECRET-KEY"

Place = tuple[str, ...]
"""A setting's path: `("packing", "max_requests")`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The file's values and all environment variables, with upper-case names."""

    file: Path
    values: Mapping[str, Any]
    environment: Mapping[str, str]

    def variable_of(self, place: Place) -> str:
        """Return the variable that sets a setting or part of its table; "" if the file does."""
        for length in range(len(place), 0, -1):
            name = _variable(place[:length])
            if name in self.environment and _has(
                _from_json(self.environment[name]), place[length:]
            ):
                return name
        if _has(self.values, place):
            return ""
        below = _variable(place) + _BETWEEN
        return min((name for name in self.environment if name.startswith(below)), default="")


def nearest(name: str, candidates: Iterable[str], like: float = LIKE) -> str:
    """Return the candidate most similar to `name`, or "" if none is similar."""
    return next(iter(get_close_matches(name, list(candidates), 1, like)), "")


def wrong_settings(
    error: ValidationError, model: type[BaseModel], origin: Origin, secrets: Iterable[str]
) -> SettingsError:
    """Return an error that names all problems, grouped by variable or file."""
    by_origin: dict[str, list[str]] = {}
    details = error.errors(include_url=False)
    for detail in details[:SHOWN_PROBLEMS]:
        by_origin.setdefault(_origin_of(detail, model, origin), []).append(
            _problem(detail, model, frozenset(secrets))
        )
    sentences = [f"{place}: {'; '.join(problems)}" for place, problems in by_origin.items()]
    if len(details) > SHOWN_PROBLEMS:
        sentences.append(f"and {len(details) - SHOWN_PROBLEMS} more")
    return SettingsError("; ".join(sentences), hint=DOCUMENTATION)


def not_json(model: type[BaseModel], origin: Origin) -> SettingsError:
    """Return the error for a variable that must be JSON, since it sets a list or a table."""
    for name in sorted(name for name in origin.environment if name.startswith(_PREFIX)):
        place = tuple(name.removeprefix(_PREFIX).lower().split(_BETWEEN))
        kind = _kind(model, place)
        if _from_json(origin.environment[name]) is None and (
            _is_table(kind) or get_origin(kind) is tuple
        ):
            expected = "a table" if _is_table(kind) else _A_LIST
            return SettingsError(
                f"{name}: {'.'.join(place)} must be {expected}, as JSON", hint=DOCUMENTATION
            )
    return SettingsError(
        f"a variable that begins with {_PREFIX} is not valid JSON", hint=DOCUMENTATION
    )


def mistyped_variable(
    model: type[BaseModel], origin: Origin, others: Iterable[str]
) -> SettingsError | None:
    """Return the error for a variable that looks like a misspelt setting, or None.

    It would be ignored, even if it is a spend cap. `others` are further valid variables.
    """
    tops = {_variable((name,)) for name in model.model_fields}
    variables = [*others, *map(_variable, _settings(model))]
    for name in sorted(origin.environment):
        if (
            not name.startswith(_PREFIX)
            or name in variables
            or _PREFIX + name[len(_PREFIX) :].partition(_BETWEEN)[0] in tops
        ):
            continue  # The section's own validation refuses unknown settings.
        if near := nearest(name, [*variables, *_of_a_table(model, name)], LIKE_VARIABLE):
            return SettingsError(
                f"the environment has {name}, which is not a setting: did you mean {near}?",
                hint=f"rename it, or unset it; {DOCUMENTATION}",
            )
    return None


def check_option(option: str, kind: Any, value: str) -> None:  # noqa: ANN401 - a setting's type
    """Refuse an option whose value its setting refuses.

    Raises:
        SettingsError: It names the option and the rule.
    """
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        (detail, *_) = error.errors(include_url=False)
        raise SettingsError(_refused(option, _shown(value), detail)) from None


# --- one problem


def _problem(error: ErrorDetails, model: type[BaseModel], secrets: frozenset[str]) -> str:
    place = _place(error)
    name, type_of_error = ".".join(place), error["type"]
    if type_of_error == "missing":
        return f"{name} is missing"
    if type_of_error == "extra_forbidden":
        return f"{name} is not a setting{_did_you_mean(model, place)}"
    kind = _kind(model, place)
    if _is_table(kind):
        return (
            f"{name}: {error['ctx']['error']}"
            if type_of_error == "value_error"
            else _not_a_table(kind, place)
        )
    shown = "" if place[-1] in secrets else _shown(error["input"])
    if shown and isinstance(error["loc"][-1], int):  # of a list
        return f"{name} has {shown}, which {_must(error)}"
    return _refused(name, shown, error)


def _refused(name: str, shown: str, error: ErrorDetails) -> str:
    return f"{name} is {shown}, but {_must(error)}" if shown else f"{name} {_must(error)}"


def _must(error: ErrorDetails) -> str:
    if error["type"] == "value_error":  # raised by our validators
        return str(error["ctx"]["error"])
    must = _MUST.get(error["type"].partition("_")[0])
    return f"must be {must}" if must else error["msg"].replace("Input should", "must", 1)


def _origin_of(error: ErrorDetails, model: type[BaseModel], origin: Origin) -> str:
    place = _place(error)
    if error["type"] == "missing":
        place = place[:-1]
    kind = _kind(model, place)
    if error["type"] == "value_error" and isinstance(kind, type) and issubclass(kind, BaseModel):
        # Two settings exclude each other: prefer the one that a variable sets.
        named = (name for name in kind.model_fields if name in str(error["ctx"]["error"]))
        for name in named:
            if variable := origin.variable_of((*place, name)):
                return variable
    return origin.variable_of(place) or str(origin.file)


def _place(error: ErrorDetails) -> Place:
    return tuple(
        str(part) for part in error["loc"] if not isinstance(part, int) and part != "[key]"
    )


def _not_a_table(kind: Any, place: Place) -> str:  # noqa: ANN401 - an annotation may be anything
    name = ".".join(place)
    if len(place) > 1 and place[-1] in kind.model_fields:
        return f"{name} belongs below [{'.'.join(place[:-1])}.NAME]"
    return f"{name} must be a table of settings"


def _did_you_mean(model: type[BaseModel], place: Place) -> str:
    section = _kind(model, place[:-1])
    if near := nearest(place[-1], section.model_fields):
        return f": did you mean '{near}'?"
    for other in _settings(model):
        if other[-1] == place[-1]:
            return (
                ": did you mean "
                f"{'.'.join(other)}{', above the first [section]' if len(other) == 1 else ''}?"
            )
    return ""


def _shown(value: object) -> str:
    """Return "" if the value may hold a secret."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int | float):
        return f"{value}"[:SHOWN_CHARACTERS]
    if not isinstance(value, str):
        return (
            "a list"
            if isinstance(value, list | tuple)
            else "a table"
            if isinstance(value, Mapping)
            else "a date or a time"
        )
    if (
        _CREDENTIALS_IN_URL.search(value)
        or len(value.split()) >= _WORDS_OF_A_WALLET
        or _IDENTITY in value.upper()
    ):
        return ""
    return f"'{value}'" if len(value) <= SHOWN_CHARACTERS else f"'{value[:SHOWN_CHARACTERS]}…'"


# --- the model


def _kind(model: type[BaseModel], place: Place) -> Any:  # noqa: ANN401 - an annotation may be anything
    kind: Any = model
    for part in place:
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif isinstance(kind, type) and issubclass(kind, BaseModel) and part in kind.model_fields:
            kind = kind.model_fields[part].annotation
            if get_origin(kind) in (Union, UnionType):
                kind = next(argument for argument in get_args(kind) if argument is not type(None))
            kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        else:
            return None
    return kind


def _is_table(kind: Any) -> bool:  # noqa: ANN401 - an annotation may be anything
    return get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel))


def _settings(model: type[BaseModel]) -> Iterator[Place]:
    for name in model.model_fields:
        yield (name,)
        kind = _kind(model, (name,))
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from ((name, inner) for inner in kind.model_fields)


# --- variables


def _variable(place: Place) -> str:
    return _PREFIX + _BETWEEN.join(place).upper()


def _of_a_table(model: type[BaseModel], variable: str) -> Iterator[str]:
    for name in model.model_fields:
        kind = _kind(model, (name,))
        if get_origin(kind) is not dict:
            continue
        for field in get_args(kind)[1].model_fields:
            if match := re.fullmatch(
                f"{_variable((name,))[:-1]}S?_+(.+?)_+{field.upper()}", variable
            ):
                yield _variable((name, match[1], field))


def _from_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _has(values: object, place: Place) -> bool:
    for part in place:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True
