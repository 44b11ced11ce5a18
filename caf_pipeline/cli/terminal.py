"""Options, parsing, formatting, notes, JSON lines and progress bars."""

import codecs
import inspect
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from caf_pipeline.cli.completing import complete_source
from caf_pipeline.errors import UsageError, exit_texts, one_line
from caf_pipeline.system.quantities import counted as counted  # noqa: PLC0414  re-exported for the commands
from caf_pipeline.system.quantities import show_coins as show_coins  # noqa: PLC0414
from caf_pipeline.system.quantities import show_size as show_size  # noqa: PLC0414
from caf_pipeline.system.quantities import show_time as show_time  # noqa: PLC0414
from caf_pipeline.waits import LINE_SECONDS

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
ListOption = Annotated[
    bool,
    typer.Option("--list", help="List the bucket even if the source has inventory reports."),
]
SourceArgument = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="A source of caf.toml.", autocompletion=complete_source),
]
SourcesArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[SOURCE]", help="One source; all by default.", autocompletion=complete_source
    ),
]

AsOfOption = Annotated[
    str | None,
    typer.Option(
        "--as-of",
        metavar="TIME",
        help="Archived content as of TIME: 2026-11-21T10:00 (UTC), 2026-11-21T10:00:00+02:00.",
    ),
]

PROGRESS_FROM_BYTES: Final = 64 << 20  # smaller work ends before a bar can be read

_DECIMAL_UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE: Final = re.compile(r"([0-9]+)\s*([A-Za-z]*)")


def parse_path(text: str | Path) -> Path:
    """Parse a path. Raises UsageError if it is empty, as from an unset variable."""
    if text == "":
        raise UsageError("A path is empty.", hint="'.' is the working folder.")
    return Path(text)


def output_option(help_text: str, metavar: str = "FILE") -> Any:  # noqa: ANN401 - as typer.Option
    """Declare `-o`, the file that a command writes."""
    return typer.Option("-o", "--output", parser=parse_path, metavar=metavar, help=help_text)


def parse_report(text: str) -> str:
    """Return a report's date. Raises UsageError if it is empty."""
    if not text:
        raise UsageError("--report is empty.", hint="Leave it out for the newest report.")
    return text


ReportOption = Annotated[
    str | None,
    typer.Option(
        "--report",
        parser=parse_report,
        metavar="DATE",
        help="Use the newest S3 Inventory report of this day, e.g. 2026-11-21.",
    ),
]


def parse_size(text: str, *, decimal: bool = False) -> int:
    """Return the bytes of `30GiB`, `64MiB` or `1000000`, or raise UsageError.

    With `decimal`, also of `1GB` (10⁹ bytes): storage is sold in such units.
    """
    units = _UNITS | _DECIMAL_UNITS if decimal else _UNITS
    match = _SIZE.fullmatch(text.strip())
    if not match or match[2] not in units:
        also = " (or KB, MB, GB, TB)" if decimal else ""
        raise UsageError(
            f"{text!r} is not a size.",
            hint=f"Give bytes, or a whole number of KiB, MiB, GiB or TiB{also}: 30GiB.",
        )
    return int(match[1]) * units[match[2]]


def parse_time(text: str) -> datetime:
    """Parse an ISO 8601 date or time, in UTC unless it names a zone."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{text!r} is not a time.",
            hint="Give a date, or a date and a time: 2026-11-21T10:00:00Z.",
        ) from error


def printable(text: str) -> str:
    r"""Escape with `\` what would move the cursor, change colours or break the line."""
    return one_line(text.replace("\\", "\\\\"))


def help_of(command: Callable[..., object]) -> str:
    r"""Return a docstring; `\b` keeps the next paragraph's line breaks.

    Numbers after "Exit status:" get the texts of their error classes.
    """
    text = (inspect.getdoc(command) or "").replace("\\b\n", "\b\n")
    return _STATUSES.sub(_explained, text)


_STATUSES: Final = re.compile(r"^Exit status: ([\d, ]+)$\n?((?:  \d+ .*\n?)*)", re.MULTILINE)


def _explained(match: re.Match[str]) -> str:
    texts = {0: "Success."} | exit_texts()
    statuses = {int(number): texts[int(number)] for number in match[1].split(", ")}
    for line in match[2].splitlines():
        number, text = line.split(maxsplit=1)
        statuses[int(number)] = text
    width = len(str(max(statuses)))
    lines = (f"  {number:<{width}}  {statuses[number]}" for number in sorted(statuses))
    return "\n".join(["Exit status:", *lines]) + "\n"


def print_json(**record: object) -> None:
    """Print a JSON object as one line of ASCII: times in ISO 8601, bytes in hex."""
    sys.stdout.write(_ENCODER.encode(record) + "\n")


def _as_json(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Path | Exception):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


_ENCODER: Final = json.JSONEncoder(default=_as_json)
"""`json.dumps` makes an encoder for each call, which costs more than a short record."""


def write_bytes(pieces: Iterable[bytes]) -> None:
    """Write pieces to stdout. Raises UsageError before a terminal receives what is not text."""
    to_terminal = sys.stdout.isatty()
    decode = codecs.getincrementaldecoder("utf-8")().decode
    for piece in pieces:
        if to_terminal:
            try:
                is_text = "\0" not in decode(piece)
            except UnicodeDecodeError:
                is_text = False
            if not is_text:
                raise UsageError(
                    "the output is not text, and standard output is a terminal.",
                    hint="Write it to a file, or to another program by '|'.",
                )
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def note(text: str) -> None:
    """Print a note to stderr."""
    print(f"caf: {one_line(text)}", file=sys.stderr)


def confirm(question: str, *, yes: bool, otherwise: str) -> None:
    """Ask on the terminal, unless `yes`; "no" exits with status 1.

    Raises:
        UsageError: There is no terminal.
    """
    require_confirmation(yes=yes)
    if not yes and not typer.confirm(question, err=True):
        note(otherwise)
        raise typer.Exit(1)


def exclusive(**options: object) -> None:
    """Raise UsageError if two of the options are given; `name` is --name."""
    names = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if len(names) > 1:
        raise UsageError(f"{names[0]} and {names[1]} exclude each other.", hint="Give one of them.")


def require_confirmation(*, yes: bool) -> None:
    """Raise UsageError if there is neither a terminal to ask on nor `yes`."""
    if not yes and not sys.stdin.isatty():
        raise UsageError(
            "the command needs a confirmation, and standard input is not a terminal.",
            hint="Give --yes.",
        )


def ask_passphrase(*, is_new: bool = False) -> str:
    """Ask on the terminal, twice if `is_new`. Raises UsageError if there is no terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            "the identity needs a passphrase, and standard input is not a terminal.",
            hint="Set CAF_PASSPHRASE.",
        )
    return str(typer.prompt("Passphrase", hide_input=True, confirmation_prompt=is_new, err=True))


@contextmanager
def object_progress(title: str, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, otherwise a line on stderr every minute.

    Both have the time left if `total_bytes` is known. Yields a function to call with each finished
    object's bytes.
    """
    if sys.stderr.isatty():
        with _bar(title, total_bytes) as advance_bar:
            yield advance_bar
        return
    objects = size_bytes = 0
    ended, start = threading.Event(), time.monotonic()

    def advance(more_bytes: int) -> None:
        nonlocal objects, size_bytes
        objects, size_bytes = objects + 1, size_bytes + more_bytes

    def print_lines() -> None:
        while not ended.wait(LINE_SECONDS):
            seconds = time.monotonic() - start
            done, time_left = show_size(size_bytes), ""
            if total_bytes is not None:
                done += f" of {show_size(total_bytes)}"
            if total_bytes is not None and size_bytes:
                seconds_left = seconds * max(total_bytes - size_bytes, 0) / size_bytes
                time_left = f", {timedelta(seconds=round(seconds_left))} left"
            rate = show_size(round(size_bytes / seconds))
            note(f"{title}: {counted(objects, 'object')}, {done}, {rate}/s{time_left}")

    threading.Thread(target=print_lines, name="progress", daemon=True).start()
    try:
        yield advance
    finally:
        ended.set()


@contextmanager
def progress(title: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar if stderr is a terminal and the work is large or of unknown size (None).

    Yields a function to call with the number of bytes done.
    """
    if (total_bytes is not None and total_bytes < PROGRESS_FROM_BYTES) or not sys.stderr.isatty():
        yield lambda size_bytes: None
        return
    with _bar(title, total_bytes) as advance:
        yield advance


@contextmanager
def _bar(title: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    from rich.console import Console  # noqa: PLC0415  only if a bar is shown
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(title, *columns, console=Console(stderr=True), transient=True) as bar:
        yield partial(bar.advance, bar.add_task(title, total=total_bytes))
