"""What the commands share: options, sizes as they are read, text safe for a terminal, JSON lines,
progress.
"""

import inspect
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from caf_pipeline.errors import UsageError, one_line
from caf_pipeline.system.quantities import counted as counted  # noqa: PLC0414  what commands show comes from this module
from caf_pipeline.system.quantities import show_size as show_size  # noqa: PLC0414
from caf_pipeline.waits import LINE_SECONDS

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help="A source of caf.toml.")]
SourcesArgument = Annotated[
    str | None, typer.Argument(metavar="[SOURCE]", help="One source; all of caf.toml by default.")
]

AsOfOption = Annotated[
    str | None,
    typer.Option(
        "--as-of",
        metavar="TIME",
        help="What is archived as of TIME: 2026-11-21T10:00 (UTC), 2026-11-21T10:00:00+02:00.",
    ),
]

PROGRESS_FROM_BYTES: Final = 64 << 20  # less is over before a bar could be read

_DECIMAL_UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE: Final = re.compile(r"([0-9]+)\s*([A-Za-z]*)")


def a_path(text: str | Path) -> Path:
    """Read a path; raises UsageError for an empty one, as of a variable that is not set: it would
    be the working folder.
    """
    if text == "":
        raise UsageError("A path is empty.", hint="'.' is the working folder.")
    return Path(text)


def a_report(text: str) -> str:
    """Take which report is meant; raises UsageError for an empty text, as of a variable that is not
    set.
    """
    if not text:
        raise UsageError("--report is empty.", hint="Leave it out for the newest report.")
    return text


ReportOption = Annotated[
    str | None,
    typer.Option(
        "--report",
        parser=a_report,
        metavar="DATE",
        help="Take the newest S3 Inventory report of this day, e.g. 2026-11-21.",
    ),
]


def parse_size(text: str, *, decimal: bool = False) -> int:
    """Read `30GiB`, `64MiB` or `1000000` as bytes; raises UsageError for anything else.

    With `decimal`, `1GB` (10⁹ bytes) is a size, too: for what is sold by such units, and never for
    sizes of chunks.
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
    """Read a date, or a date and a time, in UTC where it names no zone."""
    try:
        moment = datetime.fromisoformat(text)
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{text!r} is not a time.",
            hint="Give a date, or a date and a time: 2026-11-21T10:00:00Z.",
        ) from error


def show_time(moment: datetime) -> str:
    """Return a time for people, in UTC, to the second."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def show_coins(amount: int) -> str:
    """Return an amount of ujkl for people: 1 JKL is 1,000,000 ujkl."""
    return (
        f"{amount:,} ujkl ({amount / 1_000_000:,.2f} JKL)"
        if amount >= 10_000
        else f"{amount:,} ujkl"
    )


def printable(text: str) -> str:
    r"""Return text that cannot move the cursor, change colours or break the line; what is escaped
    begins with `\`.
    """
    return one_line(text.replace("\\", "\\\\"))


def help_of(command: Callable[..., object]) -> str:
    r"""Return a command's help: its docstring, where a line of `\b` keeps the paragraph after it as
    it is.
    """
    return (inspect.getdoc(command) or "").replace("\\b\n", "\b\n")


def print_json(record: Mapping[str, object]) -> None:
    """Print one JSON object on a line of its own, ASCII only."""
    sys.stdout.write(json.dumps(record) + "\n")


def write_bytes(pieces: Iterable[bytes]) -> None:
    """Write pieces to stdout as they are."""
    for piece in pieces:
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def note(text: str) -> None:
    """Tell on stderr what is no error."""
    print(f"caf: {one_line(text)}", file=sys.stderr)


def confirm(question: str, *, yes: bool, otherwise: str) -> None:
    """Ask a question on the terminal, unless `yes`.

    If the answer is no, print `otherwise` and end with status 1.

    Raises:
        UsageError: there is no terminal to ask on.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            "the command needs a confirmation, and standard input is not a terminal.",
            hint="Give --yes.",
        )
    if not typer.confirm(question, err=True):
        note(otherwise)
        raise typer.Exit(1)


@contextmanager
def object_progress(title: str) -> Iterator[Callable[[int], None]]:
    """Show how far work on objects is, whose number is not known: a bar on a terminal, else a line
    a minute on stderr.

    Yields a function that is told the bytes of each object.
    """
    if sys.stderr.isatty():
        with progress(title, None) as advance:
            yield advance
        return
    objects = size_bytes = 0
    over, began = threading.Event(), time.monotonic()

    def done(more_bytes: int) -> None:
        nonlocal objects, size_bytes
        objects, size_bytes = objects + 1, size_bytes + more_bytes

    def say() -> None:
        while not over.wait(LINE_SECONDS):
            rate = show_size(round(size_bytes / (time.monotonic() - began)))
            note(f"{title}: {counted(objects, 'object')}, {show_size(size_bytes)}, {rate}/s")

    threading.Thread(target=say, name="progress", daemon=True).start()
    try:
        yield done
    finally:
        over.set()


@contextmanager
def progress(title: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr, where that is a terminal and the work is big.

    Yields a function that is told bytes done.

    Of work whose size is not known (None) it shows what is done.
    """
    if (total_bytes is not None and total_bytes < PROGRESS_FROM_BYTES) or not sys.stderr.isatty():
        yield lambda size_bytes: None
        return
    from rich.console import Console  # noqa: PLC0415  only where a bar is shown
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
        task = bar.add_task(title, total=total_bytes)

        def advance(size_bytes: int) -> None:
            bar.advance(task, size_bytes)

        yield advance
