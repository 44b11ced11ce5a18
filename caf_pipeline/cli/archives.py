"""`caf create`, `list`, `extract`, `cat`, `verify` and `merkle`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from caf_pipeline.caf.archive import DEFAULT_LIMITS, CafReader
from caf_pipeline.caf.merkle import MerkleTree, roots_of
from caf_pipeline.cli import creating
from caf_pipeline.cli.terminal import (
    JsonOption,
    counted,
    note,
    parse_path,
    parse_size,
    print_json,
    printable,
    progress,
    show_size,
    write_bytes,
)
from caf_pipeline.errors import ArchiveError, CafError, MemberNotFound, UsageError
from caf_pipeline.formats import age
from caf_pipeline.system.files_below import FilesBelow
from caf_pipeline.system.ranges import FileRanges, LocalFile
from caf_pipeline.wiring import open_file

_READ_BYTES: Final = 5 << 18  # two batches of the Merkle tree

_AGE_BYTES: Final = 64  # enough for the first line of an age file

FILE_HELP: Final = "A path, an http(s):// URL or s3://bucket/key."

Archive = Annotated[str, typer.Argument(metavar="FILE", help=FILE_HELP)]
Lenient = Annotated[
    bool,
    typer.Option(
        "--lenient",
        help="Accept an index of another version, equal keys (the last counts) and text that is "
        "not UTF-8 (read as U+FFFD), with warnings.",
    ),
]


@contextmanager
def _opened(address: str, *, lenient: bool) -> Iterator[CafReader]:
    with open_file(address) as source:
        yield read_caf(source, lenient=lenient)


def read_caf(source: FileRanges, *, lenient: bool) -> CafReader:
    """Read the index of a CAF; print its warnings."""
    try:
        reader = CafReader.open(source, name=source.name, lenient=lenient)
    except ArchiveError:
        if age.is_age_file(source.read_prefix(_AGE_BYTES)[0]):
            raise ArchiveError(
                f"{source.name} is encrypted.",
                hint="`age -d -i IDENTITY FILE > chunk.caf` decrypts it.",
            ) from None
        raise
    for warning in reader.warnings:
        note(f"warning: {warning}")
    return reader


def create(
    *,
    out: Annotated[
        Path,
        typer.Argument(
            parser=parse_path, metavar="OUT", help="The archive to write; replaced if it exists."
        ),
    ],
    paths: Annotated[
        list[Path],
        typer.Argument(
            parser=parse_path, metavar="PATH", help="Files, and folders with all files below."
        ),
    ],
    folder: Annotated[
        Path,
        typer.Option("-C", parser=parse_path, metavar="DIR", help="Base folder of PATHs and keys."),
    ] = Path(),
    target_size: Annotated[
        str,
        typer.Option(
            "--target-size",
            metavar="SIZE",
            help="Largest size of an archive: 64MiB, 30GiB, 1000000.",
        ),
    ] = "30GiB",
    sums: Annotated[
        Path | None,
        typer.Option(
            parser=parse_path,
            metavar="FILE",
            help="Write the SHA-256 of each member to FILE, for `sha256sum --check`.",
        ),
    ] = None,
    proof_type: Annotated[
        Literal["0", "3"] | None,
        typer.Option("--proof-type", help="Print the Jackal Merkle root, like `caf merkle`."),
    ] = None,
    json: JsonOption = False,
) -> None:
    r"""Pack files into a CAF file.

    Keys are the paths of the files below DIR. Links are followed. Devices, pipes and files that
    change while they are read are errors. Empty folders, owners and times are not kept.

    If one archive is not enough, OUT-00001.caf, OUT-00002.caf and so on are written instead of OUT;
    a file larger than SIZE has an archive of its own. Archives appear complete and together, or not
    at all; then the sums appear.

    \b
    Examples:
      caf create site.caf -C /srv/www . --target-size 1GiB
      caf create --sums photos.sha256 photos.caf photos/

    \b
    Exit status: 0, 8
      1  A file cannot be read, or changed meanwhile.
      2  Wrong arguments, or a path is outside of DIR.
      4  A name cannot be a key, or a file is too large for an archive.
    """
    target_bytes = parse_size(target_size)
    if not 0 < target_bytes <= DEFAULT_LIMITS.max_bytes:
        raise UsageError(
            f"An archive has between 1 byte and {show_size(DEFAULT_LIMITS.max_bytes)}.",
            hint="Change --target-size.",
        )
    if not folder.is_dir():
        raise UsageError(f"{str(folder)!r} is not a folder.")
    out, sums = Path(os.path.realpath(out)), sums and Path(os.path.realpath(sums))
    for file in filter(None, (out, sums)):
        if file.exists() and not file.is_file():
            raise UsageError(f"{str(file)!r} is not a file that can be replaced.")
    files = creating.find_files(paths, folder, out, sums)
    volumes = creating.cut_into_archives(files, target_bytes)
    archives = creating.archive_paths(out, len(volumes))
    if sums in archives:
        raise UsageError(
            f"{str(sums)!r} would be both an archive and the file of the sums.",
            hint="Name another file.",
        )
    with progress("packing", sum(file.size_bytes for file in files)) as advance:
        written = creating.write_archives(
            volumes, archives, advance, sums, int(proof_type) if proof_type else None
        )
    for archive, merkle_root in written:
        root = {"merkle_root": merkle_root, "proof_type": int(proof_type or 0)}
        if json:
            print_json(
                path=archive.path,
                members=archive.member_count,
                size_bytes=archive.size_bytes,
                **(root if proof_type else {}),
            )
        else:
            size = f"{counted(archive.member_count, 'member')}, {show_size(archive.size_bytes)}"
            shown_root = f", root {merkle_root.hex()}" if merkle_root else ""
            print(f"{printable(str(archive.path))}: {size}{shown_root}")


def list_members(*, file: Archive, json: JsonOption = False, lenient: Lenient = False) -> None:
    r"""List the members of a CAF file.

    Prints each member's size in bytes and key, in the order of the index. Control characters are
    escaped, as \n or \x1b. --json prints `key`, `start_byte` and `end_byte` (exclusive). Reads only
    the end of the archive.

    \b
    Examples:
      caf list --json s3://bucket/photos.caf

    \b
    Exit status: 0, 4, 5
    """
    with _opened(file, lenient=lenient) as reader:
        if json:
            for member in reader.members:
                print_json(key=member.key, start_byte=member.start_byte, end_byte=member.end_byte)
        else:
            sys.stdout.writelines(
                f"{member.end_byte - member.start_byte:>14} {printable(member.key)}\n"
                for member in reader.members
            )


def extract(
    *,
    file: Archive,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="Members to extract; all by default.")
    ] = None,
    folder: Annotated[
        Path,
        typer.Option(
            "-C", parser=parse_path, metavar="DIR", help="The folder to write to; made if missing."
        ),
    ] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    json: JsonOption = False,
    lenient: Lenient = False,
) -> None:
    r"""Write a CAF file's members below a folder.

    The key is the path below DIR. Nothing is ever written outside of DIR, and no symbolic link in
    it is followed. Members whose key cannot be a path, or whose file exists, are reported on stderr
    and left out. Each file appears when it is complete.

    \b
    Examples:
      caf extract photos.caf -C restored
      caf extract https://example.org/photos.caf 2024/a.jpg 2024/b.jpg

    \b
    Exit status: 0, 4, 5, 8
      1  Some members are left out.
    """
    with _opened(file, lenient=lenient) as reader:
        errors: list[CafError] = []
        members = [] if keys else list(reader.members)
        for key in dict.fromkeys(keys or ()):
            try:
                members.append(reader[key])
            except MemberNotFound as error:
                errors.append(error)
                note(str(error))
        count = len(members) + len(errors)
        size_bytes = sum(member.size_bytes for member in members)
        with (
            FilesBelow(folder, force=force) as target,
            progress("extracting", size_bytes) as advance,
        ):
            bodies = ((member.key, body) for member, body in reader.read_many(members))
            for key, refusal in target.write(bodies, advance):
                if refusal:
                    errors.append(refusal)
                    note(str(refusal))
                elif json:
                    print_json(key=key, size_bytes=reader[key].size_bytes)
    if errors:
        raise CafError(
            f"{len(errors)} of {counted(count, 'member')} could not be extracted.",
            hint=next((error.hint for error in errors if error.hint), ""),
        )
    if not json:
        print(f"{counted(count, 'member')}, {show_size(size_bytes)}")


def cat(
    *,
    file: Archive,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The member's key.")],
    lenient: Lenient = False,
) -> None:
    r"""Write one member of a CAF file to stdout.

    Uses constant memory and at most three reads of the file.

    \b
    Examples:
      caf cat photos.caf 2024/a.jpg > a.jpg

    \b
    Exit status: 0, 5
      4  FILE is missing or not a CAF file, or has no such member.
    """
    with _opened(file, lenient=lenient) as reader:
        write_bytes(reader.stream(key))


def verify(*, file: Archive, json: JsonOption = False, lenient: Lenient = False) -> None:
    r"""Check a CAF file's structure and read every byte of it.

    Checks the footer, the index and the range of every member. Bytes of no member (dead bytes) and
    shared bytes are legal, and reported. CAF has no checksums, so wrong bytes cannot be detected.

    \b
    Examples:
      caf verify --json s3://bucket/photos.caf

    \b
    Exit status: 4, 5
      0  The structure is valid.
    """
    with _opened(file, lenient=lenient) as reader:
        with progress("reading", reader.data_size_bytes) as advance:
            for piece in reader.stream_range(0, reader.data_size_bytes):
                advance(len(piece))
        gaps, overlaps = list(reader.gaps()), reader.overlap_count()
        dead_bytes = sum(end_byte - start_byte for start_byte, end_byte in gaps)
        if json:
            print_json(
                members=len(reader),
                size_bytes=reader.size_bytes,
                data_bytes=reader.data_size_bytes,
                dead_bytes=dead_bytes,
                gaps=len(gaps),
                overlaps=overlaps,
                warnings=reader.warnings,
            )
            return
        print(
            f"{counted(len(reader), 'member')}, all {reader.size_bytes} bytes "
            f"({show_size(reader.size_bytes)}) read"
        )
        if gaps:
            print(
                f"dead bytes: {dead_bytes} in {counted(len(gaps), 'gap')}, the first at "
                f"{gaps[0][0]} to {gaps[0][1]}"
            )
        if overlaps:
            print(f"overlaps: {counted(overlaps, 'member')} with bytes of another member")


def merkle(
    *,
    file: Archive,
    proof_type: Annotated[
        Literal["0", "3"],
        typer.Option(
            "--proof-type", help="0: SHA-256 and SHA3-512, 64 bytes; 3: BLAKE3, 32 bytes."
        ),
    ] = "3",
    json: JsonOption = False,
) -> None:
    r"""Print the Jackal Merkle root of any file, in hex.

    Uses constant memory. An empty file has no root.

    \b
    Examples:
      caf merkle --proof-type 0 photos.caf

    \b
    Exit status: 0, 5
      4  The file is missing or empty.
    """
    with open_file(file) as source:
        _, size_bytes = source.read_suffix(1)
        with progress("hashing", size_bytes) as advance:
            if isinstance(source, LocalFile):
                (root,) = roots_of(source.stream, size_bytes, int(proof_type), done=advance)
            else:
                tree = MerkleTree(int(proof_type))
                for piece in source.stream(0, size_bytes, _READ_BYTES):
                    tree.update(piece)
                    advance(len(piece))
                root = tree.root()
    if json:
        print_json(merkle_root=root, proof_type=int(proof_type), size_bytes=size_bytes)
    else:
        print(root.hex())
