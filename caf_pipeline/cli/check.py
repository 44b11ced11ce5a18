"""The command that reads objects back and compares them: check."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final

import typer

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.cli.listing import CurrentOption, PrefixArgument, nothing_listed, wanted_status
from caf_pipeline.cli.opening import opened_lookup, opened_reader
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourceArgument,
    counted,
    note,
    object_progress,
    print_json,
    printable,
    show_size,
)
from caf_pipeline.errors import HeldByOther, IntegrityError, StoreUnreachable, UsageError
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.check import CheckedObject, check_objects, sampled
from caf_pipeline.retrieval.listing import list_objects
from caf_pipeline.retrieval.side_by_side import take_all
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.store.protocol import Sample

DEFAULT_SHARE: Final = "1%"

_SHARE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")


@dataclass
class _Sums:
    """What was listed, read, and found so far; `providers` has how many objects each gave wrong or
    not at all.
    """

    listed: int = 0
    objects: int = 0
    size_bytes: int = 0
    wrong: int = 0
    unread: int = 0
    hint: str = ""  # of the first object that could not be read now
    providers: dict[str, int] = field(default_factory=dict)
    suspects: dict[str, Sample] = field(default_factory=dict)
    """A wrong object of each chunk, by the chunk's name.

    The look at the chunk asks every copy for this object.
    """


def check(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    prefix: PrefixArgument = "",
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="SHARE",
            help=f"Read about so many objects: 0.1%, 5%.  [default: {DEFAULT_SHARE}]",
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Read every object.")] = False,
    current: CurrentOption = False,
    json: JsonOption = False,
) -> None:
    r"""Read archived objects back and compare their SHA-256.

    They are read from the store as by `caf get`, and nothing is kept. What `caf ls --recursive`
    lists is checked: by default one object of a hundred, chosen by chance each time, and at least
    one. Of those that were not chosen this says nothing. An object is right where any provider
    gives it right; what others gave wrong, or did not give, is counted for each. `caf check` then
    looks at the chunks of such objects as `caf prove` does, and marks damaged chunks; `caf repair`
    stores them again.

    A line is printed for each object that is not right, and at last the sums. With --json a line is
    {"key": …} or, the last one, {"objects_checked": …}.

    \b
    Examples:
      caf check demo
      caf check demo packages/ --full --json | jq 'select(.error)'

    Exit status: 0 all that was read is right; 2 SHARE is not a share; 3 a setting is wrong or there
    is no such source; 6 the database failed; 9 no provider gives some object right, or none has it;
    7 else, where some object could not be read; 11 no archived key begins with PREFIX.
    """
    if full and sample is not None:
        raise UsageError("--sample and --full exclude each other.", hint="Give one of them.")
    share = 1.0 if full else _parse_share(DEFAULT_SHARE if sample is None else sample)
    settings, sums = load_settings(), _Sums()

    with (
        opened_lookup(settings) as lookup,
        opened_reader(settings, lookup, source) as store,
        object_progress(f"checking {source}") as advance,
    ):
        located = list_objects(lookup, source, prefix, include=wanted_status(current))
        listed = _counted(located, sums)

        def take(one: CheckedObject) -> None:
            _take(sums, one, json)
            advance(one.location.size_bytes)

        ended = take_all(check_objects(sampled(listed, share), store), take)
        if not sums.listed:
            raise nothing_listed(lookup, source, prefix, current)
        _print_sums(source, sums, json)
    damaged = bool(sums.wrong or sums.suspects) and _recorded(settings, source, sums)
    if sums.wrong:
        if ended:
            note(str(ended))
        raise IntegrityError(
            f"no provider gives {counted(sums.wrong, 'object')} of '{source}' as archived",
            hint=f"'caf repair {source}' stores damaged chunks again"
            if damaged
            else "no chunk was found damaged: 'caf prove' and 'caf doctor' look again",
        )
    if ended:
        raise ended
    if sums.unread:
        raise StoreUnreachable(
            f"{counted(sums.unread, 'object')} of '{source}' could not be read now",
            hint=sums.hint or "try again later",
        )


def _recorded(settings: Settings, source: str, sums: _Sums) -> bool:
    """Look at the chunks of wrong objects as the proof watch does; return whether the source has a
    damaged chunk.
    """
    # Loaded only if a copy of an object is wrong.
    from caf_pipeline.cli.opened_ledger import opened_ledger  # noqa: PLC0415
    from caf_pipeline.cli.run_opening import opened_run_context  # noqa: PLC0415
    from caf_pipeline.maintenance.scrub import prove_chunk  # noqa: PLC0415

    with opened_ledger(settings) as ledger:
        if sums.suspects and source in settings.sources:
            with opened_run_context(settings, ledger, source) as context:
                for name, an_object in sums.suspects.items():
                    if ledger.chunks.get(name).state is not ChunkState.LOCATED:
                        continue
                    try:
                        report = prove_chunk(context, name, an_object=an_object)
                    except (HeldByOther, StoreUnreachable) as error:
                        note(f"{name} could not be looked at: {error}")
                        continue
                    if not report.proven:
                        note(
                            f"{name} is {report.verdict}: "
                            f"{report.explanation or report.unanswered or report.unverified}"
                        )
        return bool(ledger.chunks.list(source, [ChunkState.DAMAGED]))


def _parse_share(text: str) -> float:
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / 100 if match else 0.0
    if not 0 < share <= 1:
        raise UsageError(
            f"{text!r} is not a share of the objects.",
            hint="Give a percentage above 0: 0.1%, 5%, 100%.",
        )
    return share


def _counted(locations: Iterator[Location], sums: _Sums) -> Iterator[Location]:
    for one in locations:
        sums.listed += 1
        yield one


def _take(sums: _Sums, one: CheckedObject, json: bool) -> None:
    """Add what was found to the sums; print an object that is not right."""
    sums.objects += 1
    for provider in one.failed:
        sums.providers[provider] = sums.providers.get(provider, 0) + 1
    if (one.error is not None and one.error.permanent) or any(
        error.permanent for error in one.failed.values()
    ):
        for part in one.location.ranges:
            length = part.end_byte - part.start_byte
            if length:
                sums.suspects.setdefault(part.chunk, Sample(part.start_byte, length, part.sha256))
    if one.error is None:
        sums.size_bytes += one.location.size_bytes
        return
    what = "wrong" if one.error.permanent else "unread"
    sums.wrong += one.error.permanent
    sums.unread += not one.error.permanent
    if not one.error.permanent:
        sums.hint = sums.hint or one.error.hint
    if json:
        print_json({"key": one.location.row.key, "result": what, "error": str(one.error)})
    else:
        typer.echo(f"{what:6}  {printable(one.location.row.key)}: {printable(str(one.error))}")


def _print_sums(source: str, sums: _Sums, json: bool) -> None:
    if json:
        counts = {
            "objects_checked": sums.objects,
            "objects_listed": sums.listed,
            "bytes_right": sums.size_bytes,
        }
        print_json(
            counts
            | {"wrong": sums.wrong, "unread": sums.unread, "providers_passed_over": sums.providers}
        )
        return
    typer.echo(
        f"{source}: {counted(sums.objects, 'object')} of {sums.listed:,} read, {sums.wrong:,} "
        "wrong,"
        f" {sums.unread:,} could not be read ({show_size(sums.size_bytes)} right)"
    )
    for provider, objects in sorted(sums.providers.items()):
        typer.echo(
            f"another provider had to stand in for {printable(provider)} with "
            f"{counted(objects, 'object')}"
        )
