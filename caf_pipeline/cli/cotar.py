"""`caf cotar`: tar archives with an index by name."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Final

import typer
from typing_extensions import Buffer

from caf_pipeline.cli.archives import FILE_HELP
from caf_pipeline.cli.opening import replacing
from caf_pipeline.cli.terminal import (
    JsonOption,
    counted,
    note,
    output_option,
    print_json,
    printable,
    progress,
    show_size,
    write_bytes,
)
from caf_pipeline.errors import CafError, MalformedArchive, MemberNotFound, UsageError
from caf_pipeline.formats.cotar import SUFFIX_BYTES, CotarIndex, Slot
from caf_pipeline.formats.cotar_builder import index_of
from caf_pipeline.formats.tar import (
    BLOCK_BYTES,
    FileRange,
    TarFiles,
    TarMember,
    files_of,
    member_behind,
    walk,
)
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.ranges import (
    PIECE_BYTES,
    FileRanges,
    LocalFile,
    LocalRange,
    RemoteFile,
    write_piece,
)
from caf_pipeline.wiring import open_file

_LEAD_BYTES: Final = 8 * 1024
"""Bytes read before a file: its header, and nearly always the records with a longer name."""

_COPIED_BYTES: Final = 16 << 20  # in one step of the progress bar

Tar = Annotated[str, typer.Argument(metavar="TAR", help=FILE_HELP)]
Cotar = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help=f"A .tar.co, or a tar whose index --index names. {FILE_HELP}"
    ),
]
Index = Annotated[
    str | None,
    typer.Option("--index", metavar="INDEX", help="The tar's index, if it is a separate file."),
]
IgnoreZeros = Annotated[
    bool,
    typer.Option(
        "--ignore-zeros",
        help="Continue after blocks of zeros, as in concatenated tar archives.",
    ),
]


def tar_files(source: FileRanges, size_bytes: int, *, ignore_zeros: bool = False) -> TarFiles:
    """Return the files of the tar in the first `size_bytes`; a remote file is one request."""
    return files_of(_members(source, size_bytes, ignore_zeros=ignore_zeros))


def _members(source: FileRanges, size_bytes: int, *, ignore_zeros: bool) -> Iterator[TarMember]:
    read = source.read if isinstance(source, LocalFile) else _ForwardReader(source, size_bytes).read
    with progress("reading headers", size_bytes) as advance:
        done = 0
        for member in walk(read, size_bytes, ignore_zeros=ignore_zeros):
            end_byte = member.start_byte + member.size_bytes
            advance(end_byte - done)
            done = end_byte
            yield member


class _ForwardReader:
    def __init__(self, source: FileRanges, size_bytes: int) -> None:
        self._pieces = source.stream(0, size_bytes, PIECE_BYTES)
        self._buffer, self._start = memoryview(b""), 0

    def read(self, start: int, end: int) -> bytes:
        """Return `[start, end)`, which must not begin before the end of the last range."""
        result = []
        while start < end:
            if start >= self._start + len(self._buffer):
                self._start += len(self._buffer)
                self._buffer = memoryview(next(self._pieces))
                continue
            piece = self._buffer[start - self._start : end - self._start]
            result.append(piece)
            start += len(piece)
        return b"".join(result)


class _SuffixInMemory:
    def __init__(self, source: FileRanges) -> None:
        self.name = source.name
        self.source = source
        self.tail, self.size_bytes = source.read_suffix(SUFFIX_BYTES)

    def stream(self, start_byte: int, end_byte: int, piece_bytes: int) -> Iterator[bytes]:
        first_byte = self.size_bytes - len(self.tail)
        if start_byte < first_byte:
            return self.source.stream(start_byte, end_byte, piece_bytes)
        return iter([self.tail[start_byte - first_byte : end_byte - first_byte]])

    def read(self, start_byte: int, end_byte: int) -> bytes:
        first_byte = self.size_bytes - len(self.tail)
        if start_byte < first_byte:
            return self.source.read(start_byte, end_byte)
        return self.tail[start_byte - first_byte : end_byte - first_byte]


@dataclass(frozen=True)
class OpenedCotar:
    """A tar and its index."""

    source: FileRanges | _SuffixInMemory
    index: CotarIndex

    def tar_bytes(self) -> int:
        """Asks the server if the index is a separate file."""
        if isinstance(self.source, _SuffixInMemory):
            return self.source.size_bytes - self.index.size_bytes
        return self.source.read_suffix(1)[1]

    def pieces(self, name: bytes) -> Iterator[bytes]:
        """Yield a file's bytes, by one request.

        A hard link's slot leads to another file, so that only the whole tar shows that it is right.

        Raises:
            MemberNotFound: The index has no such name.
            MalformedArchive: The tar and the index differ, or the file is a hard link of a remote
                tar.
        """
        slot = self.index.find(name)
        if slot is None:
            raise MemberNotFound(
                f"The index of {self.source.name} has no {os.fsdecode(name)!r}.",
                hint="`caf cotar list` shows the names.",
            )
        start_byte, end_byte = slot.start_byte, slot.start_byte + slot.size_bytes
        member = None
        # A server returns the size of a file with its bytes.
        if start_byte >= BLOCK_BYTES and (
            isinstance(self.source, RemoteFile) or end_byte <= self.tar_bytes()
        ):
            lead_bytes = min(start_byte, _LEAD_BYTES)
            pieces = self.source.stream(start_byte - lead_bytes, end_byte, PIECE_BYTES)
            lead = b""
            while len(lead) < lead_bytes:
                lead += next(pieces)
            member = member_behind(lead[:lead_bytes])
            if not self._is_file(member, name, slot):
                before = self.source.read(max(0, start_byte - SUFFIX_BYTES), start_byte)
                member = member_behind(before)
            if self._is_file(member, name, slot) or self._has_link(name, slot):
                return chain([lead[lead_bytes:]], pieces)
        there = (
            f"no file of {slot.size_bytes} bytes"
            if member is None
            else f"{os.fsdecode(member.name)!r} of {member.size_bytes} bytes"
        )
        raise MalformedArchive(
            f"The index of {self.source.name} leads to bytes {start_byte} to {end_byte} for "
            f"{os.fsdecode(name)!r}, and the tar has {there} there.",
            hint="One of them is damaged, or they do not belong together: `caf cotar verify` lists "
            "all such files. A hard link is only read from a local tar.",
        )

    def _is_file(self, member: TarMember | None, name: bytes, slot: Slot) -> bool:
        return (
            member is not None
            and (member.kind, member.size_bytes) == ("0", slot.size_bytes)
            and self.index.has_name_of(member, name)
        )

    def _has_link(self, name: bytes, slot: Slot) -> bool:
        """Return whether a local tar has a hard link of this name to the file in a slot."""
        file = self.source.source if isinstance(self.source, _SuffixInMemory) else self.source
        if not isinstance(file, LocalFile):
            return False
        members = _members(file, self.tar_bytes(), ignore_zeros=True)

        def named() -> Iterator[TarMember]:
            with suppress(MalformedArchive):  # an older index may follow the tar
                for member in members:
                    is_named = self.index.has_name_of(member, name)
                    yield member._replace(name=name) if is_named else member

        return FileRange(name, *slot) in files_of(named()).files


@contextmanager
def opened_cotar(source: FileRanges, index: str | None = None) -> Iterator[OpenedCotar]:
    """Open the index of a tar, by one or two reads.

    Raises:
        MalformedArchive: The index is missing or damaged.
    """
    if index is None:
        file = _SuffixInMemory(source)
        embedded = CotarIndex.open_embedded(file.read, file.tail, file.size_bytes, name=file.name)
        yield OpenedCotar(file, embedded)
        return
    with open_file(index) as index_source:
        file = _SuffixInMemory(index_source)
        separate = CotarIndex.open_separate(file.read, file.tail, file.size_bytes, name=file.name)
        yield OpenedCotar(source, separate)


def index(
    *,
    tar: Tar,
    out: Annotated[
        Path | None,
        output_option("TAR.index by default, or TAR.co with --embed; replaced if it exists."),
    ] = None,
    embed: Annotated[
        bool, typer.Option("--embed", help="Write the tar, followed by the index, to one file.")
    ] = False,
    ignore_zeros: IgnoreZeros = False,
    json: JsonOption = False,
) -> None:
    r"""Make the cotar index of a tar archive.

    The index finds each regular file and hard link by its name; the last one of equal names counts.
    Reads uncompressed PAX, GNU and ustar archives. Other entries are left out and listed. A file of
    4 GiB or more is an error. Nothing is written for a damaged tar.

    \b
    Example:
      caf cotar index tiles.tar --embed -o tiles.tar.co

    \b
    Exit status: 0, 5, 8
      4  The tar is missing or damaged, or the format cannot hold a file of it.
    """
    if out is None and "://" in tar:
        raise UsageError("The index of a tar behind a URL needs a name.", hint="Give it with -o.")
    path = out or Path(f"{tar}.co" if embed else f"{tar}.index")
    with replacing(path, *([] if embed else [tar])), open_file(tar) as source:
        _, size_bytes = source.read_suffix(1)
        tar_contents = tar_files(source, size_bytes, ignore_zeros=ignore_zeros)
        table = index_of(tar_contents.files)
        if embed:
            copy_tar(source, size_bytes, path, table)
        else:
            with WholeFile(path) as whole:
                whole.file.write(table)
    print_left_out(tar_contents)
    count = len(tar_contents.files)
    if json:
        print_json(path=path, files=count, index_bytes=len(table), left_out=tar_contents.left_out)
    else:
        size = show_size(len(table))
        print(f"{printable(str(path))}: {counted(count, 'file')}, an index of {size}")


def pieces_of(source: FileRanges, start_byte: int, end_byte: int) -> Iterator[Buffer | LocalRange]:
    """Yield `[start_byte, end_byte)` in pieces; of a local file, as ranges to copy."""
    if not isinstance(source, LocalFile):
        yield from source.stream(start_byte, end_byte, PIECE_BYTES)
        return
    for at in range(start_byte, end_byte, _COPIED_BYTES):
        yield LocalRange(source, at, min(at + _COPIED_BYTES, end_byte))


def copy_tar(source: FileRanges, tar_bytes: int, out: Path, index: bytes) -> None:
    """Write a tar, followed by an index or nothing."""
    with WholeFile(out) as whole, progress("copying", tar_bytes) as advance:
        for piece in pieces_of(source, 0, tar_bytes):
            advance(write_piece(whole.file, piece))
        whole.file.write(index)


def print_left_out(tar_contents: TarFiles) -> None:
    """Count a tar's entries that are not files on stderr."""
    if tar_contents.left_out:
        counts = [counted(count, kind) for kind, count in tar_contents.left_out.items()]
        note(f"left out, because they are not files: {', '.join(counts)}")


def list_files(
    *, file: Cotar, index: Index = None, ignore_zeros: IgnoreZeros = False, json: JsonOption = False
) -> None:
    r"""List the files that an index finds in its tar.

    Prints each file's size in bytes and name; --json prints `key`, `start_byte` and `end_byte`
    (exclusive). Names are in the tar's headers, so a remote tar is read completely. A note counts
    the files that the index lacks.

    \b
    Example:
      caf cotar list tiles.tar --index tiles.tar.index --json

    \b
    Exit status: 0, 5
      4  The file is missing or damaged, or has no index.
    """
    with open_file(file) as source, opened_cotar(source, index) as opened:
        tar_contents = tar_files(source, opened.tar_bytes(), ignore_zeros=ignore_zeros)
        opened.index.hold()
        missing = 0
        for file_range in dict.fromkeys(tar_contents.files):
            if opened.index.find(file_range.name) is None:
                missing += 1
                continue
            name, start_byte = os.fsdecode(file_range.name), file_range.start_byte
            end_byte = start_byte + file_range.size_bytes
            if json:
                print_json(key=name, start_byte=start_byte, end_byte=end_byte)
            else:
                print(f"{file_range.size_bytes:>14} {printable(name)}")
    if missing:
        note(
            f"the index does not have {counted(missing, 'file')} of the tar; `caf cotar verify` "
            "names them"
        )


def cat(
    *,
    file: Cotar,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The file's name.")],
    index: Index = None,
) -> None:
    r"""Write one file's bytes to stdout.

    Takes one to four reads. The name and size in the file's tar header are compared with the index.
    A hard link is found by walking a local tar; of a remote tar it is refused.

    \b
    Example:
      caf cotar cat tiles.tar.co 12/4038/2564.pbf > tile.pbf

    \b
    Exit status: 0, 5
      4  The archive is missing or damaged, or has no index or no such file.
    """
    with open_file(file) as source, opened_cotar(source, index) as opened:
        write_bytes(opened.pieces(os.fsencode(name)))


_SHOWN_PROBLEMS: Final = 20


def verify(
    *, file: Cotar, index: Index = None, ignore_zeros: IgnoreZeros = False, json: JsonOption = False
) -> None:
    r"""Compare an index with its tar.

    The index must have exactly the files of the tar, with their places and sizes. A remote tar is
    read completely. Tars have no checksums of file contents, so these are not verified.

    \b
    Example:
      caf cotar verify tiles.tar --index tiles.tar.index

    \b
    Exit status: 5
      0  The index matches the tar.
      1  They differ, or one is damaged.
      4  No such file.
    """
    with open_file(file) as source:
        try:
            report = _verified(source, index, ignore_zeros=ignore_zeros)
        except MalformedArchive as error:
            raise CafError(str(error), hint=error.hint) from error
    if json:
        print_json(**report)
    if report["problems"]:
        raise CafError(
            f"The index does not match the tar: {counted(report['problems'], 'problem')}.",
            hint="Make it again with `caf cotar index`.",
        )
    if not json:
        print(f"{counted(report['files'], 'file')}, each where the index has it")


def _verified(source: FileRanges, index: str | None, *, ignore_zeros: bool) -> dict[str, int]:
    with opened_cotar(source, index) as opened:
        opened.index.hold()
        tar_contents = tar_files(source, opened.tar_bytes(), ignore_zeros=ignore_zeros)
        files = set(tar_contents.files)
        slots = problems = 0

        def report(problem: str) -> None:
            nonlocal problems
            problems += 1
            if problems <= _SHOWN_PROBLEMS:
                note(problem)

        for file_range in dict.fromkeys(tar_contents.files):
            name = repr(os.fsdecode(file_range.name))
            slot = opened.index.find(file_range.name)
            if slot is None:
                report(f"{name} is missing")
            elif slot != Slot(file_range.start_byte, file_range.size_bytes):
                report(
                    f"{name} has {file_range.size_bytes} bytes from byte {file_range.start_byte} "
                    f"on; the index says {slot.size_bytes} from {slot.start_byte} on"
                )
        unmatched = Counter(Slot(part.start_byte, part.size_bytes) for part in tar_contents.files)
        for slot in opened.index.slots():  # a forged index may have many more slots than files
            slots += 1
            if unmatched[slot]:
                unmatched[slot] -= 1
            else:
                end_byte = slot.start_byte + slot.size_bytes
                report(f"the slot of bytes {slot.start_byte} to {end_byte} belongs to no file")
        if not opened.index.has_both_headers():
            report("the index lacks its header before or after its slots")
        if problems > _SHOWN_PROBLEMS:
            note(f"and {problems - _SHOWN_PROBLEMS} more")
        return {"files": len(files), "slots": slots, "problems": problems}
