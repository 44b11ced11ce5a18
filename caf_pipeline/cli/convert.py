"""`caf convert`."""

import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Final

import typer
from typing_extensions import Buffer

from caf_pipeline.caf.archive import DEFAULT_LIMITS, CafReader, CafWriter, Member
from caf_pipeline.caf.index import ByteRange
from caf_pipeline.cli.archives import FILE_HELP, Lenient, read_caf
from caf_pipeline.cli.cotar import (
    IgnoreZeros,
    copy_tar,
    opened_cotar,
    pieces_of,
    print_left_out,
    tar_files,
)
from caf_pipeline.cli.opening import replacing
from caf_pipeline.cli.terminal import (
    JsonOption,
    counted,
    parse_path,
    print_json,
    printable,
    progress,
    show_size,
)
from caf_pipeline.errors import ArchiveLimitReached, MemberRefused, UsageError
from caf_pipeline.formats.cotar_builder import index_of, require_fits
from caf_pipeline.formats.tar import FileRange, end_of, header, padding
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.ranges import FileRanges, LocalFile, LocalRange, write_piece
from caf_pipeline.wiring import open_file

_COPIED_FROM_BYTES: Final = 128 * 1024
"""Smaller members are read many at a time; the kernel copies larger ones."""


def convert(
    *,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help=f"A CAF, a .tar or a .tar.co. {FILE_HELP}")
    ],
    out: Annotated[
        Path,
        typer.Argument(
            parser=parse_path,
            metavar="OUT",
            help="The file to write; the ending selects the format: .caf, .tar or .tar.co.",
        ),
    ],
    ignore_zeros: IgnoreZeros = False,
    lenient: Lenient = False,
    json: JsonOption = False,
) -> None:
    r"""Convert between CAF and tar archives.

    A .tar.co is a tar with its cotar index. Members keep their names and bytes. CAF stores no
    metadata, so a tar gets mode 644, owner 0 and time 0; a name that ustar cannot hold is in a PAX
    header. A CAF gets the tar's files, and hard links as copies. The last one of equal names
    counts; other entries are left out and listed. OUT is replaced if it exists; it appears
    complete, or not at all.

    \b
    Example:
      caf convert https://example.org/photos.caf photos.tar.co

    \b
    Exit status: 0, 5, 8
      4  The archive is missing or damaged, or the other format cannot hold a file of it.
    """
    if not out.name.endswith((".caf", ".tar", ".tar.co")):
        raise UsageError(
            f"The name {str(out)!r} does not select a format.",
            hint="OUT ends with .caf, .tar or .tar.co.",
        )
    to, origin = _kind(str(out)), _kind(file.partition("?")[0] if "://" in file else file)
    if to == origin:
        raise UsageError(
            f"{file!r} and {str(out)!r} have the same format.",
            hint="OUT ends with .caf, .tar or .tar.co.",
        )
    with replacing(out, file), open_file(file) as source:
        if origin == ".caf":
            reader = read_caf(source, lenient=lenient)
            count = _to_tar(source, reader, out, indexed=to == ".tar.co")
        else:
            if origin == ".tar.co":
                with opened_cotar(source) as opened:
                    tar_bytes = opened.tar_bytes()
            else:
                _, tar_bytes = source.read_suffix(1)
            tar_contents = tar_files(source, tar_bytes, ignore_zeros=ignore_zeros)
            if to == ".caf":
                count = _to_caf(source, tar_bytes, tar_contents.files, out)
                print_left_out(tar_contents)
            else:
                count = len(tar_contents.files)
                index = index_of(tar_contents.files) if to == ".tar.co" else b""
                copy_tar(source, tar_bytes, out, index)
    size_bytes = out.stat().st_size
    if json:
        print_json(path=out, members=count, size_bytes=size_bytes)
    else:
        print(f"{printable(str(out))}: {counted(count, 'member')}, {show_size(size_bytes)}")


def _kind(name: str) -> str:
    return next((ending for ending in (".tar.co", ".tar") if name.endswith(ending)), ".caf")


def _to_tar(source: FileRanges, reader: CafReader, out: Path, *, indexed: bool) -> int:
    size_bytes = sum(member.size_bytes for member in reader.members)
    # Members may share bytes, so that a small CAF could become a tar of any size.
    if size_bytes > max(reader.data_size_bytes, DEFAULT_LIMITS.max_bytes):
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
    ranges: dict[str, ByteRange] = {}
    for name, start_byte, size_bytes in files:
        try:
            ranges[name.decode()] = ByteRange(start_byte, start_byte + size_bytes)
        except UnicodeDecodeError as error:
            raise MemberRefused(
                f"{os.fsdecode(name)!r} is not UTF-8, as a key of a CAF must be."
            ) from error
    # Checked first: hard links become copies, which may sum up to any size.
    size_bytes = sum(part.end_byte - part.start_byte for part in ranges.values())
    if reason := DEFAULT_LIMITS.reason_against(len(ranges), 0, size_bytes):
        raise ArchiveLimitReached(f"{source.name} does not fit into one CAF: {reason}.")
    # Files of a tar are ranges like members of a CAF; near ones are read together.
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
