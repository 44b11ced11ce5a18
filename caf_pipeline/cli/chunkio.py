"""`caf chunkio`: list, cat, verify and salvage ChunkIO logs."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Annotated, Final, Literal

import typer

from caf_pipeline.cli.clps import LogArgument
from caf_pipeline.cli.opening import opened_ranges, replacing
from caf_pipeline.cli.terminal import (
    JsonOption,
    counted,
    output_option,
    print_json,
    show_size,
    write_bytes,
)
from caf_pipeline.errors import (
    ArchiveError,
    CafError,
    IntegrityError,
    MalformedArchive,
    MemberNotFound,
)
from caf_pipeline.formats.chunkio import (
    FILE_HEADER,
    LogDamage,
    LogEntry,
    LogReader,
    LogWriter,
    inflated,
)
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.ranges import LocalFile

_ALL_BYTES: Final = 8 << 20  # of a remote file in one read, if the whole file is needed
_SOME_BYTES: Final = 1 << 20  # of a remote file in one read, if one entry is needed
_SPOOL_BYTES: Final = 8 << 20  # larger contents are kept in a file until their hash is compared
_PIECE_BYTES: Final = 1 << 20
_LAST: Final = 2**63 - 1


def list(
    file: LogArgument,
    start: Annotated[
        int,
        typer.Option("--from", metavar="POSITION", help="Entries that begin at POSITION or later."),
    ] = 0,
    end: Annotated[
        int,
        typer.Option(
            "--to",
            metavar="POSITION",
            help="Entries that begin before POSITION.",
            show_default=False,
        ),
    ] = _LAST,
    pick: Annotated[
        Literal["first", "last", "middle"] | None,
        typer.Option(
            help="Only one entry: the first, the last, or the nearest to the middle of the range."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    r"""List the entries of a ChunkIO log, which ChunkIO calls chunks.

    Prints each entry's position, content size in bytes, and user data in hex. Lists what ChunkIO's
    forward scan finds, even in a damaged or truncated log; contents are not verified. --json prints
    `begin`, `end`, `user_data` and `content_size_bytes`. Uses constant memory; a remote log is read
    twice.

    \b
    Example:
      caf chunkio list demo logs/events.log --from 65536 --pick first --json

    \b
    Exit status: 0, 4, 5

    For an archived object, also the statuses of `caf get`.
    """
    with _opened(file, _ALL_BYTES) as log:
        picks = {"first": log.reader.first, "last": log.reader.last, "middle": log.reader.middle}
        if pick:
            entries = filter(None, (picks[pick](start, end),))
        else:
            entries = filter(lambda entry: start <= entry.begin < end, log.reader.entries())
        for entry in entries:
            if json:
                print_json(**asdict(entry))
            else:
                print(_line(entry))


def cat(
    file: LogArgument,
    position: Annotated[
        int,
        typer.Argument(
            metavar="POSITION", help="The entry's position, as shown by `caf chunkio list`."
        ),
    ],
    inflate: Annotated[
        bool,
        typer.Option(
            "--inflate",
            help="Inflate raw DEFLATE data, as written by ChunkIO's buffered writer.",
        ),
    ] = False,
) -> None:
    r"""Write the content of one entry of a ChunkIO log to stdout.

    The content is first compared with its hash, which detects damage but not forgery.

    \b
    Example:
      caf chunkio cat --inflate demo logs/events.log 0

    \b
    Exit status: 0, 5
      4  The file is missing, POSITION has no entry, or the content is not DEFLATE data.
      9  The content is damaged.

    For an archived object, also the statuses of `caf get`.
    """
    with _opened(file, _SOME_BYTES) as log, tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as content:
        entry = log.reader.entry_at(position)
        if entry is None:
            raise MemberNotFound(
                f"{log.name}: no entry begins at {position}.",
                hint="`caf chunkio list` shows where entries begin.",
            )
        if not log.reader.copy_content(entry, content):
            raise IntegrityError(
                f"{log.name}: the content of the entry at {position} is damaged or incomplete."
            )
        try:
            for _ in inflated(_pieces(content)) if inflate else ():
                pass  # inflate everything once before anything is written
        except ArchiveError as error:
            raise MalformedArchive(f"{log.name}: the entry at {position}: {error}") from error
        write_bytes(inflated(_pieces(content)) if inflate else _pieces(content))


def verify(file: LogArgument, json: JsonOption = False) -> None:
    r"""Check every byte of a ChunkIO log.

    Compares headers and contents with their hashes. Checks meters, padding, and bytes of no entry.
    Missing entries at the end are not detected. Prints a line for each damaged place. --json prints
    `begin`, `end` and `damage`, then `entries`, `size_bytes` and `damaged_places`.

    \b
    Example:
      caf chunkio verify s3://bucket/events.log --json

    \b
    Exit status: 4, 5
      0  Nothing is damaged.
      1  Something is damaged.

    For an archived object, also the statuses of `caf get`.
    """
    entries = places = 0
    with _opened(file, _ALL_BYTES) as log:
        for place in log.reader.check():
            if not isinstance(place, LogDamage):
                entries += 1
                continue
            places += 1
            if json:
                print_json(begin=place.begin, end=place.end, damage=place.what)
            else:
                damaged = "" if place.what == "no entry" else " damaged"
                print(f"{place.begin} to {place.end}: {place.what}{damaged}")
    if json:
        print_json(entries=entries, size_bytes=log.size_bytes, damaged_places=places)
    else:
        print(
            f"{counted(entries, 'entry', 'entries')} in {log.size_bytes} bytes "
            f"({show_size(log.size_bytes)})"
        )
    if places:
        raise CafError(
            f"{log.name} is damaged in {counted(places, 'place')}.",
            hint="`caf chunkio salvage` finds the remaining entries.",
        )


def salvage(
    file: LogArgument,
    output: Annotated[
        Path | None,
        output_option(
            "Write a log of the undamaged entries; replaced if it exists.", metavar="OUT"
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    r"""Look for entries at every position of a damaged ChunkIO log.

    Prints entries as `caf chunkio list` does, with marks: `lost`, ChunkIO does not find it;
    `damaged`, its content is incomplete; `inside N`, it is part of the content of the entry at N.
    An entry found by chance or forgery has a right hash, too. --json adds `reachable`,
    `content_right` and `inside`.

    OUT gets all undamaged entries outside of others, in order, at new positions. It appears
    complete.

    \b
    Example:
      caf chunkio salvage events.log -o saved.log

    \b
    Exit status: 5, 8
      0  Undamaged entries are found.
      1  No undamaged entry is found.
      4  The file is missing.

    For an archived object, also the statuses of `caf get`.
    """
    whole, writer = 0, LogWriter()
    with _opened(file, _ALL_BYTES, damaged=True) as log, contextlib.ExitStack() as stack:
        out: IO[bytes] | None = None
        if output is not None:
            stack.enter_context(replacing(output, *(file if len(file) == 1 else ())))
            out = stack.enter_context(WholeFile(output)).file
        for salvaged in log.reader.salvage():
            entry = salvaged.entry
            if salvaged.content_right and salvaged.inside is None:
                whole += 1
                if out:
                    pieces = log.reader.pieces(entry)
                    size_bytes, digest = entry.content_size_bytes, salvaged.content_hash
                    for piece in writer.copy(entry.user_data, size_bytes, digest, pieces):
                        out.write(piece)
            if json:
                print_json(
                    **asdict(entry),
                    reachable=salvaged.reachable,
                    content_right=salvaged.content_right,
                    inside=salvaged.inside,
                )
            else:
                marks = "" if salvaged.reachable else " lost"
                marks += "" if salvaged.content_right else " damaged"
                marks += "" if salvaged.inside is None else f" inside {salvaged.inside}"
                print(f"{_line(entry)}{marks}")
        if not whole:
            raise CafError(f"{log.name} has no undamaged entry.")


@dataclass(frozen=True, slots=True)
class _Log:
    name: str
    size_bytes: int
    reader: LogReader


@contextmanager
def _opened(words: Sequence[str], piece_bytes: int, *, damaged: bool = False) -> Iterator[_Log]:
    """Open a log; a remote one is read in pieces of `piece_bytes`.

    Raises:
        MalformedArchive: It is no log, and `damaged` is False.
    """
    with opened_ranges(words) as ranges:
        header, size_bytes = ranges.read_prefix(len(FILE_HEADER))

        @lru_cache(maxsize=2)  # readers go forward
        def read_piece(number: int) -> bytes:
            start = number * piece_bytes
            return ranges.read(start, min(start + piece_bytes, size_bytes))

        def read(start: int, end: int) -> bytes:
            numbers = range(start // piece_bytes, -(-end // piece_bytes))
            first = numbers.start * piece_bytes
            return b"".join(map(read_piece, numbers))[start - first : end - first]

        local = isinstance(ranges, LocalFile)
        log = _Log(ranges.name, size_bytes, LogReader(ranges.read if local else read, size_bytes))
        if not damaged and not FILE_HEADER.startswith(header) and log.reader.first() is None:
            raise MalformedArchive(
                f"{log.name} is no ChunkIO log: it has neither a log's header nor an entry."
            )
        yield log


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(_PIECE_BYTES):
        yield piece


def _line(entry: LogEntry) -> str:
    return f"{entry.begin:>14} {entry.content_size_bytes:>14} {entry.user_data.hex()}"
