"""The command that makes a tar archive of a CAF, and a CAF of a tar archive."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import typer

from caf_pipeline.caf.archive import CafReader, CafWriter, Member
from caf_pipeline.caf.index import ByteRange
from caf_pipeline.cli.archives import FILE_HELP, AsJson, Lenient, open_s3, opened_archive
from caf_pipeline.cli.cotar import IgnoreZeros, opened_cotar, tar_files, tell_left_out
from caf_pipeline.cli.terminal import counted, print_json, printable, progress, show_size
from caf_pipeline.errors import MemberRefused, UsageError
from caf_pipeline.formats.tar import FileRange, end_of, header, padding
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.ranges import PIECE_BYTES, FileRanges, open_ranges

_EPILOG: Final = """\b
Examples:
  caf convert photos.caf photos.tar
  caf convert https://example.org/photos.caf photos.tar.co
  caf convert tiles.tar.co tiles.caf

Exit statuses: 0 all went well; 2 wrong arguments; 4 the archive is missing or damaged, or has a file that the other
format cannot hold; 5 the server refuses or cannot be reached; 8 the file cannot be written."""


def convert(
    *,
    file: Annotated[str, typer.Argument(metavar="FILE", help=f"A CAF, a .tar or a .tar.co. {FILE_HELP}")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="What its name ends with says what is made: .caf, .tar or .tar.co.")],
    ignore_zeros: IgnoreZeros = False,
    lenient: Lenient = False,
    as_json: AsJson = False,
) -> None:
    """Make a tar archive of a CAF, or a CAF of a tar archive. A .tar.co is a tar with its cotar index.

    Each member keeps its name and its bytes. In a tar it has mode 644, owner 0 and time 0, which CAF does not have; a name
    that ustar cannot hold stands in a PAX header. Into a CAF go the files, hard links as copies; of files of one name the last;
    what is no file is left out and told. OUT appears whole, or not at all; an older file there is replaced.
    """
    from caf_pipeline.formats.cotar_builder import index_of  # noqa: PLC0415  most commands need no numpy

    made = _kind(str(out))
    given = _kind(file.partition("?")[0]) if "://" in file else _kind(file)
    if made == given:
        raise UsageError(f"{file!r} and {str(out)!r} are of one format.", hint="OUT ends with .caf, .tar or .tar.co.")
    if given == ".caf":
        with opened_archive(file, lenient=lenient) as reader:
            count = _to_tar(reader, list(reader.members), out, indexed=made == ".tar.co")
    else:
        with open_ranges(file, open_s3) as source:
            if given == ".tar.co":
                with opened_cotar(source) as opened:
                    tar_bytes = opened.tar_bytes
            else:
                _, tar_bytes = source.read_suffix(1)
            found = tar_files(source, tar_bytes, ignore_zeros=ignore_zeros)
            if made == ".caf":
                count = _to_caf(source, tar_bytes, found.files, out)
                tell_left_out(found)
            else:
                count = len(found.files)
                _copy(source, tar_bytes, out, index_of(found.files) if made == ".tar.co" else b"")
    size_bytes = out.stat().st_size
    if as_json:
        print_json({"path": str(out), "members": count, "size_bytes": size_bytes})
    else:
        print(f"{printable(str(out))}: {counted(count, 'member')}, {show_size(size_bytes)}")


def _kind(name: str) -> str:
    return next((ending for ending in (".tar.co", ".tar") if name.endswith(ending)), ".caf")


def _to_tar(reader: CafReader, members: list[Member], out: Path, *, indexed: bool) -> int:
    """Write the members of a CAF as a tar, in the order of their bytes."""
    from caf_pipeline.formats.cotar_builder import index_of, require_fits  # noqa: PLC0415  likewise

    if indexed:
        for member in members:
            require_fits(FileRange(member.key.encode(), 0, member.size_bytes))
    written: list[FileRange] = []
    position = 0
    with WholeFile(out) as whole, progress("converting", sum(member.size_bytes for member in members)) as advance:
        for member, body in reader.read_many(members):
            name = member.key.encode()
            head = header(name, member.size_bytes)
            whole.file.write(head)
            if indexed:
                written.append(FileRange(name, position + len(head), member.size_bytes))
            for piece in body:
                whole.file.write(piece)
            tail = padding(member.size_bytes)
            whole.file.write(tail)
            position += len(head) + member.size_bytes + len(tail)
            advance(member.size_bytes)
        whole.file.write(end_of(position))
        if indexed:
            whole.file.write(index_of(written))
    return len(members)


def _to_caf(source: FileRanges, tar_bytes: int, files: Iterable[FileRange], out: Path) -> int:
    """Write files of a tar as a CAF, in the order of their bytes."""
    ranges: dict[str, ByteRange] = {}
    for name, start_byte, size_bytes in files:
        try:
            ranges[name.decode()] = ByteRange(start_byte, start_byte + size_bytes)
        except UnicodeDecodeError as error:
            raise MemberRefused(f"{os.fsdecode(name)!r} is not UTF-8, as a key of a CAF must be.") from error
    # Its files are ranges of a tar as members are of a CAF: those that stand close are read at once.
    reader = CafReader(source, ranges, size_bytes=tar_bytes, data_size_bytes=tar_bytes, name=source.name)
    size_bytes = sum(found.end_byte - found.start_byte for found in ranges.values())
    with CafWriter(out) as writer, progress("converting", size_bytes) as advance:
        for member, body in reader.read_many(reader.members):
            writer.add(member.key, member.size_bytes, body)
            advance(member.size_bytes)
        writer.seal()
        writer.publish()
    return len(ranges)


def _copy(source: FileRanges, tar_bytes: int, out: Path, index: bytes) -> None:
    with WholeFile(out) as whole, progress("copying", tar_bytes) as advance:
        for piece in source.stream(0, tar_bytes, PIECE_BYTES):
            whole.file.write(piece)
            advance(len(piece))
        whole.file.write(index)


COMMANDS: Final = (("convert", convert, _EPILOG),)
"""With its name and what its help ends with."""
