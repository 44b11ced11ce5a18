"""The commands on cotar files: a tar archive with an index by which a file of it is read by its
name.
"""

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

from caf_pipeline.cli.archives import FILE_HELP, AsJson
from caf_pipeline.cli.files import open_s3, replacing
from caf_pipeline.cli.terminal import (
    a_path,
    counted,
    note,
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
    TarFiles,
    TarMember,
    files_of,
    pax_size_in,
    size_in,
    walk,
)
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.ranges import (
    PIECE_BYTES,
    FileRanges,
    LocalFile,
    LocalRange,
    RemoteFile,
    open_ranges,
    write_piece,
)

_COPIED_BYTES: Final = 16 << 20  # at once, so that the progress moves

Tar = Annotated[str, typer.Argument(metavar="TAR", help=FILE_HELP)]
Cotar = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help=f"A .tar.co, or a tar whose index --index names. {FILE_HELP}"
    ),
]
Index = Annotated[
    str | None,
    typer.Option(
        "--index", metavar="INDEX", help="The tar's index, where it is a file of its own."
    ),
]
IgnoreZeros = Annotated[
    bool,
    typer.Option(
        "--ignore-zeros",
        help="Go on behind blocks of zeros, as where tar archives were concatenated.",
    ),
]

_READ_STATUSES: Final = """Exit statuses: 0 all went well; 2 wrong arguments; 4 the file is missing
or damaged, has no index,
or has no such file in it; 5 the server refuses or cannot be reached."""


# --- reading
# ------------------------------------------------------------------------------------------


def tar_files(source: FileRanges, size_bytes: int, *, ignore_zeros: bool = False) -> TarFiles:
    """Return the files of the tar in the first `size_bytes` of a file; a remote one is read by one
    request.
    """
    read = source.read if isinstance(source, LocalFile) else _Forward(source, size_bytes).read
    with progress("reading headers", size_bytes) as advance:
        done = 0

        def reading() -> Iterator[TarMember]:
            nonlocal done
            for member in walk(read, size_bytes, ignore_zeros=ignore_zeros):
                advance(member.start_byte + member.size_bytes - done)
                done = member.start_byte + member.size_bytes
                yield member

        return files_of(reading())


class _Forward:
    """A remote file that is read once, from its beginning on, by one request."""

    def __init__(self, source: FileRanges, size_bytes: int) -> None:
        self._pieces = source.stream(0, size_bytes, PIECE_BYTES)
        self._held, self._start = memoryview(b""), 0

    def read(self, start: int, end: int) -> bytes:
        """Return `[start, end)`, which is behind all that was read before."""
        taken = []
        while start < end:
            if start >= self._start + len(self._held):
                self._start += len(self._held)
                self._held = memoryview(next(self._pieces))
                continue
            piece = self._held[start - self._start : end - self._start]
            taken.append(piece)
            start += len(piece)
        return b"".join(taken)


class _Suffix:
    """A file whose end is in memory."""

    def __init__(self, source: FileRanges) -> None:
        self.name = source.name
        self._source = source
        self.tail, self.size_bytes = source.read_suffix(SUFFIX_BYTES)

    def stream(self, start_byte: int, end_byte: int, piece_bytes: int) -> Iterator[bytes]:
        """See `FileRanges`."""
        first_byte = self.size_bytes - len(self.tail)
        if start_byte < first_byte:
            return self._source.stream(start_byte, end_byte, piece_bytes)
        return iter([self.tail[start_byte - first_byte : end_byte - first_byte]])

    def read(self, start_byte: int, end_byte: int) -> bytes:
        """See `FileRanges`."""
        first_byte = self.size_bytes - len(self.tail)
        if start_byte < first_byte:
            return self._source.read(start_byte, end_byte)
        return self.tail[start_byte - first_byte : end_byte - first_byte]


@dataclass(frozen=True)
class OpenedCotar:
    """A tar and its index."""

    source: FileRanges | _Suffix
    index: CotarIndex

    def tar_bytes(self) -> int:
        """Return the size of the tar; a request where it is elsewhere and its index a file of its
        own.
        """
        if isinstance(self.source, _Suffix):
            return self.source.size_bytes - self.index.size_bytes
        return self.source.read_suffix(1)[1]

    def pieces(self, name: bytes) -> Iterator[bytes]:
        """Yield a file's bytes, by one request.

        Raises:
            MemberNotFound: the index has no such name. ArchiveError: it leads to something else.
        """
        slot = self.index.find(name)
        if slot is None:
            raise MemberNotFound(
                f"The index of {self.source.name} has no {os.fsdecode(name)!r}.",
                hint="`caf cotar list` shows the names.",
            )
        end_byte = slot.start_byte + slot.size_bytes
        # A server says with the bytes how many there are.
        if slot.start_byte >= BLOCK_BYTES and (
            isinstance(self.source, RemoteFile) or end_byte <= self.tar_bytes()
        ):
            pieces = self.source.stream(slot.start_byte - BLOCK_BYTES, end_byte, PIECE_BYTES)
            first = b""
            while len(first) < BLOCK_BYTES:
                first += next(pieces)
            with suppress(MalformedArchive):
                if size_in(
                    first[:BLOCK_BYTES], slot.start_byte - BLOCK_BYTES
                ) == slot.size_bytes or self._pax_says(slot):
                    return chain([first[BLOCK_BYTES:]], pieces)
        raise MalformedArchive(
            f"The index of {self.source.name} leads to bytes {slot.start_byte} to {end_byte} for "
            f"{os.fsdecode(name)!r}, "
            f"and the tar has no file of {slot.size_bytes} bytes there.",
            hint="One of them is damaged, or they do not belong together: `caf cotar verify` lists "
            "all such files.",
        )

    def _pax_says(self, slot: Slot) -> bool:
        """Say whether a PAX header gives a file the size that its own header does not have."""
        before = self.source.read(max(0, slot.start_byte - SUFFIX_BYTES), slot.start_byte)
        return pax_size_in(before) == slot.size_bytes


@contextmanager
def opened_cotar(source: FileRanges, index: str | None = None) -> Iterator[OpenedCotar]:
    """Open the index of a tar: by one read, or two where it is a file of its own.

    Raises:
        MalformedArchive: there is no index, or it is damaged.
    """
    if index is None:
        whole = _Suffix(source)
        found = CotarIndex.open_embedded(whole.read, whole.tail, whole.size_bytes, name=source.name)
        yield OpenedCotar(whole, found)
        return
    with open_ranges(index, open_s3) as separate:
        whole = _Suffix(separate)
        found = CotarIndex.open_separate(whole.read, whole.tail, whole.size_bytes, name=whole.name)
        yield OpenedCotar(source, found)


# --- index
# ------------------------------------------------------------------------------------------

_INDEX_EPILOG: Final = """\b
Examples:
  caf cotar index tiles.tar
  caf cotar index tiles.tar --embed -o tiles.tar.co

Exit statuses: 0 all went well; 2 wrong arguments; 4 the tar is missing or damaged, or has a file
that the format cannot
hold; 5 the server refuses or cannot be reached; 8 the index cannot be written."""


def index(
    *,
    tar: Tar,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            parser=a_path,
            metavar="FILE",
            help="TAR.index, or with --embed TAR.co, by default; an older one is replaced.",
        ),
    ] = None,
    embed: Annotated[
        bool, typer.Option("--embed", help="Write the tar and the index behind it into one file.")
    ] = False,
    ignore_zeros: IgnoreZeros = False,
    as_json: AsJson = False,
) -> None:
    """Make the cotar index of a tar archive.

    Each regular file and hard link is found by its name, as the tar has it; of files of one name
    the last. PAX, GNU and ustar archives are read, uncompressed. What is not a file (folders, links
    of the symbolic kind, devices) is left out and listed. A file of 4 GiB and more is an error.
    Nothing is written of a tar that is cut off or damaged.
    """
    if out is None and "://" in tar:
        raise UsageError("The index of a tar behind a URL needs a name.", hint="Give it with -o.")
    path = out or Path(f"{tar}.co" if embed else f"{tar}.index")
    with replacing(path, *([] if embed else [tar])), open_ranges(tar, open_s3) as source:
        _, size_bytes = source.read_suffix(1)
        found = tar_files(source, size_bytes, ignore_zeros=ignore_zeros)
        table = index_of(found.files)
        if embed:
            copy_tar(source, size_bytes, path, table)
        else:
            with WholeFile(path) as whole:
                whole.file.write(table)
    tell_left_out(found)
    if as_json:
        print_json(
            {
                "path": str(path),
                "files": len(found.files),
                "index_bytes": len(table),
                "left_out": found.left_out,
            }
        )
    else:
        print(
            f"{printable(str(path))}: {counted(len(found.files), 'file')}, an index of "
            f"{show_size(len(table))}"
        )


def pieces_of(source: FileRanges, start_byte: int, end_byte: int) -> Iterator[Buffer | LocalRange]:
    """Yield `[start_byte, end_byte)` in pieces; of a local file as ranges to be copied."""
    if not isinstance(source, LocalFile):
        yield from source.stream(start_byte, end_byte, PIECE_BYTES)
        return
    for at in range(start_byte, end_byte, _COPIED_BYTES):
        yield LocalRange(source, at, min(at + _COPIED_BYTES, end_byte))


def copy_tar(source: FileRanges, tar_bytes: int, out: Path, index: bytes) -> None:
    """Write a tar with an index, or nothing, behind it."""
    with WholeFile(out) as whole, progress("copying", tar_bytes) as advance:
        for piece in pieces_of(source, 0, tar_bytes):
            advance(write_piece(whole.file, piece))
        whole.file.write(index)


def tell_left_out(found: TarFiles) -> None:
    """Tell on stderr what of a tar is not a file."""
    if found.left_out:
        note(
            "left out, since they are not files: "
            f"{', '.join(counted(count, kind) for kind, count in found.left_out.items())}"
        )


# --- list, cat, verify
# ------------------------------------------------------------------------------------------

_LIST_EPILOG: Final = f"""\b
Examples:
  caf cotar list tiles.tar.co
  caf cotar list tiles.tar --index tiles.tar.index --json

{_READ_STATUSES}"""


def list_files(
    *, file: Cotar, index: Index = None, ignore_zeros: IgnoreZeros = False, as_json: AsJson = False
) -> None:
    """List the files that an index finds in its tar.

    A line is a file's size in bytes and its name. With --json a line has `key`, `start_byte` and
    `end_byte` (exclusive). The index has no names, so the tar is read from its beginning to its
    end: its headers, or all of it where it is not on this machine. Files that the index does not
    have are counted on stderr.
    """
    with open_ranges(file, open_s3) as source, opened_cotar(source, index) as opened:
        found = tar_files(source, opened.tar_bytes(), ignore_zeros=ignore_zeros)
        opened.index.hold()
        missing = 0
        for each in dict.fromkeys(found.files):
            if opened.index.find(each.name) is None:
                missing += 1
                continue
            if as_json:
                end_byte = each.start_byte + each.size_bytes
                print_json(
                    {
                        "key": os.fsdecode(each.name),
                        "start_byte": each.start_byte,
                        "end_byte": end_byte,
                    }
                )
            else:
                print(f"{each.size_bytes:>14} {printable(os.fsdecode(each.name))}")
    if missing:
        note(
            f"the index does not have {counted(missing, 'file')} of the tar; `caf cotar verify` "
            "names them"
        )


_CAT_EPILOG: Final = f"""\b
Examples:
  caf cotar cat tiles.tar.co 12/4038/2564.pbf > tile.pbf
  caf cotar cat https://example.org/tiles.tar --index https://example.org/tiles.tar.index 0/0/0.pbf > tile.pbf

{_READ_STATUSES}"""  # noqa: E501


def cat(
    *,
    file: Cotar,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The file's name.")],
    index: Index = None,
) -> None:
    """Write one file's bytes to stdout.

    By one to three reads: the end of the index, the place of the name in it where the index is
    long, and the file with the tar's own header before it, which is compared.
    """
    with open_ranges(file, open_s3) as source, opened_cotar(source, index) as opened:
        write_bytes(opened.pieces(os.fsencode(name)))


_VERIFY_EPILOG: Final = """\b
Examples:
  caf cotar verify tiles.tar.co
  caf cotar verify tiles.tar --index tiles.tar.index

Exit statuses: 0 the index has all files of the tar, each at its place, and nothing else; 1 it has
not, or the tar or the index
is damaged; 2 wrong arguments; 4 there is no such file; 5 the server refuses or cannot be
reached."""

_NAMED: Final = 20  # of the files that an index does not have right


def verify(
    *, file: Cotar, index: Index = None, ignore_zeros: IgnoreZeros = False, as_json: AsJson = False
) -> None:
    """Compare an index with its tar.

    Each file of the tar must be in the index with its place and size, and nothing else may be. The
    tar is read from its beginning to its end, as `caf cotar list` reads it. It has no checksums of
    its files' bytes: these are not verified.
    """
    with open_ranges(file, open_s3) as source:
        try:
            report = _verified(source, index, ignore_zeros=ignore_zeros)
        except MalformedArchive as error:
            raise CafError(str(error), hint=error.hint) from error
    if as_json:
        print_json(report)
    if report["problems"]:
        raise CafError(
            f"The index does not match the tar: {counted(report['problems'], 'problem')}.",
            hint="Make it again with `caf cotar index`.",
        )
    if not as_json:
        print(f"{counted(report['files'], 'file')}, each where the index has it")


def _verified(source: FileRanges, index: str | None, *, ignore_zeros: bool) -> dict[str, int]:
    with opened_cotar(source, index) as opened:
        opened.index.hold()
        found = tar_files(source, opened.tar_bytes(), ignore_zeros=ignore_zeros)
        slots = problems = 0

        def tell(problem: str) -> None:
            nonlocal problems
            problems += 1
            if problems <= _NAMED:
                note(problem)

        for each in dict.fromkeys(found.files):
            shown = repr(os.fsdecode(each.name))
            slot = opened.index.find(each.name)
            if slot is None:
                tell(f"{shown} is missing")
            elif slot != Slot(each.start_byte, each.size_bytes):
                tell(
                    f"{shown} has {each.size_bytes} bytes from byte {each.start_byte} on; "
                    f"the index says {slot.size_bytes} from {slot.start_byte} on"
                )
        left = Counter(Slot(each.start_byte, each.size_bytes) for each in found.files)
        for slot in (
            opened.index.slots()
        ):  # of which a forged index may have many more than there are files
            slots += 1
            if left[slot]:
                left[slot] -= 1
            else:
                tell(
                    f"the slot of bytes {slot.start_byte} to {slot.start_byte + slot.size_bytes} "
                    "is of no file"
                )
        if not opened.index.has_both_headers():
            tell("the index does not have its header before its slots and behind them")
        if problems > _NAMED:
            note(f"and {problems - _NAMED} more")
        return {"files": len(set(found.files)), "slots": slots, "problems": problems}


COMMANDS: Final = (
    ("index", index, _INDEX_EPILOG),
    ("list", list_files, _LIST_EPILOG),
    ("cat", cat, _CAT_EPILOG),
    ("verify", verify, _VERIFY_EPILOG),
)
"""Each with its name and what its help ends with."""
