"""The command that makes a tar archive of a CAF, and a CAF of a tar archive."""

import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Final

import typer
from typing_extensions import Buffer

from caf_pipeline.caf.archive import DEFAULT_LIMITS, CafReader, CafWriter, Member
from caf_pipeline.caf.index import ByteRange
from caf_pipeline.cli.archives import FILE_HELP, AsJson, Lenient, read_caf
from caf_pipeline.cli.cotar import (
    IgnoreZeros,
    copy_tar,
    opened_cotar,
    pieces_of,
    tar_files,
    tell_left_out,
)
from caf_pipeline.cli.files import open_s3, replacing
from caf_pipeline.cli.terminal import a_path, counted, print_json, printable, progress, show_size
from caf_pipeline.errors import ArchiveLimitReached, MemberRefused, UsageError
from caf_pipeline.formats.cotar_builder import index_of, require_fits
from caf_pipeline.formats.tar import FileRange, end_of, header, padding
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.ranges import FileRanges, LocalFile, LocalRange, open_ranges, write_piece

_COPIED_FROM_BYTES: Final = 128 * 1024
"""Smaller members are read and written many at once, larger ones are copied by the kernel."""

_EPILOG: Final = """\b
Examples:
  caf convert photos.caf photos.tar
  caf convert https://example.org/photos.caf photos.tar.co
  caf convert tiles.tar.co tiles.caf

Exit statuses: 0 all went well; 2 wrong arguments; 4 the archive is missing or damaged, or has a
file that the other
format cannot hold; 5 the server refuses or cannot be reached; 8 the file cannot be written."""


def convert(
    *,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help=f"A CAF, a .tar or a .tar.co. {FILE_HELP}")
    ],
    out: Annotated[
        Path,
        typer.Argument(
            parser=a_path,
            metavar="OUT",
            help="What its name ends with says what is made: .caf, .tar or .tar.co.",
        ),
    ],
    ignore_zeros: IgnoreZeros = False,
    lenient: Lenient = False,
    as_json: AsJson = False,
) -> None:
    """Make a tar archive of a CAF, or a CAF of a tar archive.

    A .tar.co is a tar with its cotar index.

    Each member keeps its name and its bytes. In a tar it has mode 644, owner 0 and time 0, which
    CAF does not have; a name that ustar cannot hold is in a PAX header. Into a CAF go the files,
    hard links as copies; of files of one name the last; what is not a file is left out and listed.
    OUT appears whole, or not at all; an older file there is replaced.
    """
    if not out.name.endswith((".caf", ".tar", ".tar.co")):
        raise UsageError(
            f"The name {str(out)!r} does not say what to make.",
            hint="OUT ends with .caf, .tar or .tar.co.",
        )
    made = _kind(str(out))
    given = _kind(file.partition("?")[0]) if "://" in file else _kind(file)
    if made == given:
        raise UsageError(
            f"{file!r} and {str(out)!r} are of one format.",
            hint="OUT ends with .caf, .tar or .tar.co.",
        )
    with replacing(out, file), open_ranges(file, open_s3) as source:
        if given == ".caf":
            reader = read_caf(source, lenient=lenient)
            count = _to_tar(source, reader, out, indexed=made == ".tar.co")
        else:
            if given == ".tar.co":
                with opened_cotar(source) as opened:
                    tar_bytes = opened.tar_bytes()
            else:
                _, tar_bytes = source.read_suffix(1)
            found = tar_files(source, tar_bytes, ignore_zeros=ignore_zeros)
            if made == ".caf":
                count = _to_caf(source, tar_bytes, found.files, out)
                tell_left_out(found)
            else:
                count = len(found.files)
                copy_tar(
                    source, tar_bytes, out, index_of(found.files) if made == ".tar.co" else b""
                )
    size_bytes = out.stat().st_size
    if as_json:
        print_json({"path": str(out), "members": count, "size_bytes": size_bytes})
    else:
        print(f"{printable(str(out))}: {counted(count, 'member')}, {show_size(size_bytes)}")


def _kind(name: str) -> str:
    return next((ending for ending in (".tar.co", ".tar") if name.endswith(ending)), ".caf")


def _to_tar(source: FileRanges, reader: CafReader, out: Path, *, indexed: bool) -> int:
    """Write the members of a CAF as a tar, in the order of their bytes."""
    size_bytes = sum(member.size_bytes for member in reader.members)
    if size_bytes > max(
        reader.data_size_bytes, DEFAULT_LIMITS.max_bytes
    ):  # a small file may ask for any number of copies
        raise ArchiveLimitReached(
            f"{source.name} has members that share bytes; a tar of it would have {size_bytes} "
            "bytes."
        )
    if indexed:
        for member in reader.members:
            require_fits(FileRange(member.key.encode(), 0, member.size_bytes))
    written: list[FileRange] = []
    position = 0
    with WholeFile(out) as whole, progress("converting", reader.data_size_bytes) as advance:
        for member, body in _bodies(source, reader):
            name = member.key.encode()
            head = header(name, member.size_bytes)
            whole.file.write(head)
            if indexed:
                written.append(FileRange(name, position + len(head), member.size_bytes))
            for piece in body:
                advance(write_piece(whole.file, piece))
            tail = padding(member.size_bytes)
            whole.file.write(tail)
            position += len(head) + member.size_bytes + len(tail)
        whole.file.write(end_of(position))
        if indexed:
            whole.file.write(index_of(written))
    return len(reader)


def _to_caf(source: FileRanges, tar_bytes: int, files: Iterable[FileRange], out: Path) -> int:
    """Write files of a tar as a CAF, in the order of their bytes."""
    ranges: dict[str, ByteRange] = {}
    for name, start_byte, size_bytes in files:
        try:
            ranges[name.decode()] = ByteRange(start_byte, start_byte + size_bytes)
        except UnicodeDecodeError as error:
            raise MemberRefused(
                f"{os.fsdecode(name)!r} is not UTF-8, as a key of a CAF must be."
            ) from error
    # Said before anything is copied; hard links, which become copies, may sum up to any size.
    size_bytes = sum(one.end_byte - one.start_byte for one in ranges.values())
    if reason := DEFAULT_LIMITS.reason_against(len(ranges), 0, size_bytes):
        raise ArchiveLimitReached(f"{source.name} does not fit into one CAF: {reason}.")
    # Its files are ranges of a tar as members are of a CAF: those that stand close are read at
    # once.
    reader = CafReader(
        source, ranges, size_bytes=tar_bytes, data_size_bytes=tar_bytes, name=source.name
    )
    with CafWriter(out) as writer, progress("converting", tar_bytes) as advance:
        for member, body in _bodies(source, reader):
            writer.add(member.key, member.size_bytes, body)
            advance(member.size_bytes)
        writer.seal()
        writer.publish()
    return len(reader)


def _bodies(
    source: FileRanges, reader: CafReader
) -> Iterator[tuple[Member, Iterable[Buffer | LocalRange]]]:
    """Yield all members with their bodies, in the order of their bytes; large ones of a local file
    as ranges to be copied.
    """
    if not isinstance(source, LocalFile):
        yield from reader.read_many(reader.members)
        return
    ordered = sorted(reader.members, key=lambda member: (member.start_byte, member.end_byte))
    for large, members in groupby(ordered, lambda member: member.size_bytes >= _COPIED_FROM_BYTES):
        if large:
            yield from (
                (member, pieces_of(source, member.start_byte, member.end_byte))
                for member in members
            )
        else:
            yield from reader.read_many(members)


COMMANDS: Final = (("convert", convert, _EPILOG),)
"""With its name and what its help ends with."""
