"""`caf chunkio`: list, cat, verify and salvage ChunkIO logs."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Annotated, Final, Literal

import typer

from caf_pipeline.cli.clps import LogArgument
from caf_pipeline.cli.files import opened_ranges, replacing
from caf_pipeline.cli.terminal import (
    JsonOption,
    a_path,
    counted,
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
from caf_pipeline.system.ranges import FileRanges, LocalFile

_ALL_BYTES: Final = 8 << 20  # read at once from a file elsewhere, of which all is read
_SOME_BYTES: Final = 1 << 20  # the same, of which one entry is
_SPOOL_BYTES: Final = 8 << 20  # a content is kept in memory up to this size until it is compared
_PIECE_BYTES: Final = 1 << 20
_LAST: Final = 2**63 - 1


def list(
    file: LogArgument,
    start: Annotated[
        int, typer.Option("--from", metavar="POSITION", help="Entries that begin there or later.")
    ] = 0,
    end: Annotated[
        int,
        typer.Option(
            "--to", metavar="POSITION", help="Entries that begin before.", show_default=False
        ),
    ] = _LAST,
    pick: Annotated[
        Literal["first", "last", "middle"] | None,
        typer.Option(
            help="One of them: the first, the last, or that which begins nearest the middle of the "
            "range."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    r"""List the entries of a ChunkIO log, which ChunkIO calls chunks.

    A line is an entry's begin, its content's size in bytes, and its user data in hex. Listed are
    the entries that ChunkIO's forward scan finds, also in a log that is damaged or cut off;
    contents are not compared. With --json a line has `begin`, `end`, `user_data` and
    `content_size_bytes`. Memory is constant; a log elsewhere is read as a whole, twice, in pieces.

    \b
    Examples:
      caf chunkio list events.log
      caf chunkio list demo logs/events.log --from 65536 --pick first --json

    Exit statuses: 0; 2 wrong arguments; 4 the file is missing or is no ChunkIO log; 5 the server
    refuses or cannot be reached. Of an archived object also: 3 a setting is wrong or there is no
    such source; 6 the database or 7 the store failed; 9 what is to be had has other bytes, or no
    provider has it; 11 the object is not archived.
    """
    with _opened(file, _ALL_BYTES) as log:
        picks = {"first": log.reader.first, "last": log.reader.last, "middle": log.reader.middle}
        if pick:
            entries = filter(None, (picks[pick](start, end),))
        else:
            entries = filter(lambda entry: start <= entry.begin < end, log.reader.entries())
        for entry in entries:
            if json:
                print_json(_as_json(entry))
            else:
                print(_line(entry))


def cat(
    file: LogArgument,
    position: Annotated[
        int,
        typer.Argument(
            metavar="POSITION", help="The entry's begin, as `caf chunkio list` shows it."
        ),
    ],
    inflate: Annotated[
        bool,
        typer.Option(
            "--inflate",
            help="The content is raw DEFLATE, as ChunkIO's buffered writer leaves it: inflate it.",
        ),
    ] = False,
) -> None:
    r"""Write the content of one entry of a ChunkIO log to stdout.

    Nothing is written before all of the content was read and agreed with its hash, which finds
    damage and no forgery. Of a log elsewhere only ranges with the entry are read.

    \b
    Examples:
      caf chunkio cat events.log 65536 > event
      caf chunkio cat --inflate demo logs/events.log 0

    Exit statuses: 0; 2 wrong arguments; 4 the file is missing, no entry begins at POSITION, or its
    content is no DEFLATE data; 5 the server refuses or cannot be reached; 9 the content is damaged.
    Of an archived object also: 3 a setting is wrong or there is no such source; 6 the database or 7
    the store failed; 9 what is to be had has other bytes, or no provider has it; 11 the object is
    not archived.
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
                f"{log.name}: the content of the entry at {position} is damaged, or not all there."
            )
        try:
            for _ in (
                inflated(_pieces(content)) if inflate else ()
            ):  # all of it, before any is given out
                pass
        except ArchiveError as error:
            raise MalformedArchive(f"{log.name}: the entry at {position}: {error}") from error
        write_bytes(inflated(_pieces(content)) if inflate else _pieces(content))


def verify(file: LogArgument, json: JsonOption = False) -> None:
    r"""Check every byte of a ChunkIO log.

    Headers and contents by their hashes, meters, padding, and bytes of no entry.

    A line is one place that is not as a writer leaves it. Entries that were cut off the end are not
    missed. With --json such a line has `begin`, `end` and `damage`; the last line has `entries`,
    `size_bytes` and `damaged_places`.

    \b
    Examples:
      caf chunkio verify events.log
      caf chunkio verify s3://bucket/events.log --json

    Exit statuses: 0 nothing is damaged; 1 something is; 2 wrong arguments; 4 the file is missing or
    is no ChunkIO log; 5 the server refuses or cannot be reached. Of an archived object also: 3 a
    setting is wrong or there is no such source; 6 the database or 7 the store failed; 9 what is to
    be had has other bytes, or no provider has it; 11 the object is not archived.
    """
    entries = places = 0
    with _opened(file, _ALL_BYTES) as log:
        for one in log.reader.check():
            if not isinstance(one, LogDamage):
                entries += 1
                continue
            places += 1
            if json:
                print_json({"begin": one.begin, "end": one.end, "damage": one.what})
            else:
                print(
                    f"{one.begin} to {one.end}: "
                    f"{one.what}{'' if one.what == 'no entry' else ' damaged'}"
                )
    if json:
        print_json({"entries": entries, "size_bytes": log.size_bytes, "damaged_places": places})
    else:
        print(
            f"{counted(entries, 'entry', 'entries')} in {log.size_bytes} bytes "
            f"({show_size(log.size_bytes)})"
        )
    if places:
        raise CafError(
            f"{log.name} is damaged in {counted(places, 'place')}.",
            hint="`caf chunkio salvage` finds what is left of it.",
        )


def salvage(
    file: LogArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            parser=a_path,
            metavar="OUT",
            help="Write a log of what is whole; an older file is replaced.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    r"""Look for entries at every position of a damaged ChunkIO log.

    It also finds those to which no way leads.

    A line is an entry as `caf chunkio list` shows it, and what is to be known of it: `lost`, no
    reader of ChunkIO finds it; `damaged`, its content is not whole; `inside N`, it is part of the
    content of the entry at N, as those of a log that is stored in a log are, and of no worth by
    itself. What is found by chance or forgery has a right hash, too. With --json: `reachable`,
    `content_right`, `inside`.

    OUT gets each entry that is whole and inside no other, in order; positions are new. It appears
    when it is complete.

    \b
    Examples:
      caf chunkio salvage events.log
      caf chunkio salvage events.log -o saved.log

    Exit statuses: 0; 1 nothing whole was found; 2 wrong arguments; 4 the file is missing; 5 the
    server refuses or cannot be reached; 8 OUT cannot be written. Of an archived object also: 3 a
    setting is wrong or there is no such source; 6 the database or 7 the store failed; 9 what is to
    be had has other bytes, or no provider has it; 11 the object is not archived.
    """
    whole, writer = 0, LogWriter()
    with _opened(file, _ALL_BYTES, damaged=True) as log, _output(output, file) as out:
        for one in log.reader.salvage():
            if one.content_right and one.inside is None:
                whole += 1
                if out:
                    for piece in writer.copy(
                        one.entry.user_data,
                        one.entry.content_size_bytes,
                        one.content_hash,
                        log.reader.pieces(one.entry),
                    ):
                        out.write(piece)
            if json:
                marks = {
                    "reachable": one.reachable,
                    "content_right": one.content_right,
                    "inside": one.inside,
                }
                print_json(_as_json(one.entry) | marks)
            else:
                inside = "" if one.inside is None else f" inside {one.inside}"
                print(
                    f"{_line(one.entry)}{'' if one.reachable else ' lost'}{'' if one.content_right else ' damaged'}{inside}"  # noqa: E501
                )
        if not whole:
            raise CafError(f"{log.name} has no entry that is whole.")


@dataclass(frozen=True, slots=True)
class _Log:
    name: str
    size_bytes: int
    reader: LogReader


@contextmanager
def _opened(words: Sequence[str], piece_bytes: int, *, damaged: bool = False) -> Iterator[_Log]:
    """Open a log, of which `piece_bytes` are read at once where it is not on this machine.

    Raises: MalformedArchive: it has neither a log's header nor an entry, and is not said to be
        `damaged`. Else as `opened_ranges`.
    """
    with opened_ranges(words) as ranges:
        header, size_bytes = ranges.read_prefix(len(FILE_HEADER))
        read = (
            ranges.read
            if isinstance(ranges, LocalFile)
            else _Pieces(ranges, size_bytes, piece_bytes).read
        )
        log = _Log(ranges.name, size_bytes, LogReader(read, size_bytes))
        if not damaged and not FILE_HEADER.startswith(header) and log.reader.first() is None:
            raise MalformedArchive(
                f"{log.name} is no ChunkIO log: it has neither the header of one nor an entry."
            )
        yield log


class _Pieces:
    """A file elsewhere, of which whole pieces are read; the last two are kept, since readers go
    forward.
    """

    def __init__(self, ranges: FileRanges, size_bytes: int, piece_bytes: int) -> None:
        self._ranges = ranges
        self._size_bytes = size_bytes
        self._piece_bytes = piece_bytes
        self._piece = lru_cache(maxsize=2)(self._read_piece)

    def read(self, start: int, end: int) -> bytes:
        numbers = range(start // self._piece_bytes, -(-end // self._piece_bytes))
        first = numbers.start * self._piece_bytes
        return b"".join(map(self._piece, numbers))[start - first : end - first]

    def _read_piece(self, number: int) -> bytes:
        start = number * self._piece_bytes
        return self._ranges.read(start, min(start + self._piece_bytes, self._size_bytes))


@contextmanager
def _output(path: Path | None, words: Sequence[str]) -> Iterator[IO[bytes] | None]:
    """Open a file that appears when the context ends without an error; it may not be the one that
    `words` name.
    """
    if path is None:
        yield None
        return
    with replacing(path, *(words if len(words) == 1 else ())), WholeFile(path) as whole:
        yield whole.file


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(_PIECE_BYTES):
        yield piece


def _as_json(entry: LogEntry) -> dict[str, object]:
    return {
        "begin": entry.begin,
        "end": entry.end,
        "user_data": entry.user_data.hex(),
        "content_size_bytes": entry.content_size_bytes,
    }


def _line(entry: LogEntry) -> str:
    return f"{entry.begin:>14} {entry.content_size_bytes:>14} {entry.user_data.hex()}"
