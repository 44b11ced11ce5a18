"""The commands on CAF files: create, list, extract, cat, verify, merkle."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from caf_pipeline.caf.archive import DEFAULT_LIMITS, CafReader
from caf_pipeline.caf.merkle import MerkleTree, roots_of
from caf_pipeline.cli import creating
from caf_pipeline.cli.files import open_s3
from caf_pipeline.cli.terminal import (
    a_path,
    counted,
    note,
    parse_size,
    print_json,
    printable,
    progress,
    show_size,
    write_bytes,
)
from caf_pipeline.errors import CafError, MemberNotFound, UsageError
from caf_pipeline.system.files_below import FilesBelow
from caf_pipeline.system.ranges import FileRanges, LocalFile, open_ranges

_READ_BYTES: Final = 5 << 18  # two batches of the Merkle tree

FILE_HELP: Final = "A path, an http(s):// URL or s3://bucket/key."

Archive = Annotated[str, typer.Argument(metavar="FILE", help=FILE_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line on stdout.")]
Lenient = Annotated[
    bool,
    typer.Option(
        "--lenient",
        help="Also read an index with equal keys (the last is taken), with text that is not UTF-8 "
        "(read as U+FFFD), "
        "or of another version; a warning on stderr names each.",
    ),
]

_READ_STATUSES: Final = """Exit statuses: 0 all went well; 2 wrong arguments; 4 the file is missing,
is not a CAF file, or
has no such member; 5 the server refuses or cannot be reached."""


@contextmanager
def _opened(address: str, *, lenient: bool) -> Iterator[CafReader]:
    with open_ranges(address, open_s3) as source:
        yield read_caf(source, lenient=lenient)


def read_caf(source: FileRanges, *, lenient: bool) -> CafReader:
    """Read the index of a CAF; what lenience lets pass is told."""
    reader = CafReader.open(source, name=source.name, lenient=lenient)
    for warning in reader.warnings:
        note(f"warning: {warning}")
    return reader


# --- create
# ------------------------------------------------------------------------------------------

_CREATE_EPILOG: Final = """\b
Examples:
  caf create photos.caf photos/
  caf create site.caf -C /srv/www . --target-size 1GiB
  caf create --sums photos.sha256 photos.caf photos/

Exit statuses: 0 all went well; 1 a file cannot be read, or changed meanwhile; 2 wrong arguments, or
a path outside DIR;
4 a name that cannot be a key, or a file too large for an archive; 8 the archive cannot be
written."""


def create(
    *,
    out: Annotated[
        Path,
        typer.Argument(
            parser=a_path, metavar="OUT", help="The archive to write; an older one is replaced."
        ),
    ],
    paths: Annotated[
        list[Path],
        typer.Argument(
            parser=a_path, metavar="PATH", help="Files, and folders with all below them."
        ),
    ],
    folder: Annotated[
        Path,
        typer.Option(
            "-C",
            parser=a_path,
            metavar="DIR",
            help="Look PATHs up in DIR, and make keys relative to it.",
        ),
    ] = Path(),
    target_size: Annotated[
        str,
        typer.Option(
            "--target-size",
            metavar="SIZE",
            help="At most this much an archive: 64MiB, 30GiB, 1000000.",
        ),
    ] = "30GiB",
    sums: Annotated[
        Path | None,
        typer.Option(
            parser=a_path,
            metavar="FILE",
            help="Write SHA-256 of each member there, as `sha256sum --check` reads it.",
        ),
    ] = None,
    proof_type: Annotated[
        Literal["0", "3"] | None,
        typer.Option(
            "--proof-type", help="Print the Jackal Merkle root, too, as `caf merkle` does."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Pack files into a CAF file.

    Keys are the files' paths below DIR. Links are followed; anything that is neither file nor
    folder is an error, and so is a file that changes while it is read. Empty folders, owners and
    times are not kept.

    Where one archive is not enough, OUT-00001.caf, OUT-00002.caf and so on are written instead of
    OUT; a file larger than SIZE has an archive of its own. Archives appear whole and all together,
    or not at all, and the sums after them.
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
        root = merkle_root.hex()
        if as_json:
            told = {"merkle_root": root, "proof_type": int(proof_type)} if proof_type else {}
            print_json(
                {
                    "path": str(archive.path),
                    "members": archive.member_count,
                    "size_bytes": archive.size_bytes,
                }
                | told
            )
        else:
            told_root = f", root {root}" if root else ""
            size = f"{counted(archive.member_count, 'member')}, {show_size(archive.size_bytes)}"
            print(f"{printable(str(archive.path))}: {size}{told_root}")


# --- list
# ------------------------------------------------------------------------------------------

_LIST_EPILOG: Final = f"""\b
Examples:
  caf list photos.caf
  caf list --json s3://bucket/photos.caf

{_READ_STATUSES}"""


def list_members(*, file: Archive, as_json: AsJson = False, lenient: Lenient = False) -> None:
    r"""List the members of a CAF file.

    A line is a member's size in bytes and its key, in the order of the index. Characters that a
    terminal would act on are shown escaped, as \n or \x1b. With --json a line has exactly `key`,
    `start_byte` and `end_byte` (exclusive). Reads only the archive's end.
    """
    with _opened(file, lenient=lenient) as reader:
        for member in reader.members:
            if as_json:
                print_json(
                    {
                        "key": member.key,
                        "start_byte": member.start_byte,
                        "end_byte": member.end_byte,
                    }
                )
            else:
                print(f"{member.size_bytes:>14} {printable(member.key)}")


# --- extract
# ------------------------------------------------------------------------------------------

_EXTRACT_EPILOG: Final = """\b
Examples:
  caf extract photos.caf -C restored
  caf extract https://example.org/photos.caf 2024/a.jpg 2024/b.jpg

Exit statuses: 0 everything was extracted; 1 something was not, as stderr says; 2 wrong arguments; 4
the file is
missing or is not a CAF file; 5 the server refuses or cannot be reached; 8 the folder cannot be
written."""


def extract(
    *,
    file: Archive,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="Members to extract; all by default.")
    ] = None,
    folder: Annotated[
        Path,
        typer.Option(
            "-C", parser=a_path, metavar="DIR", help="The folder to write to; made if missing."
        ),
    ] = Path(),
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that are there already.")
    ] = False,
    as_json: AsJson = False,
    lenient: Lenient = False,
) -> None:
    """Write a CAF file's members below a folder.

    Each has its key as its path below DIR. Nothing is ever written outside DIR, and no symbolic
    link in it is followed. A key that cannot be a path there, and a file that is there already, is
    named on stderr, and the rest goes on. Each file appears only when it is whole.
    """
    with _opened(file, lenient=lenient) as reader:
        problems: list[CafError] = []

        def tell(error: CafError) -> None:
            note(str(error))
            problems.append(error)

        members = [] if keys else list(reader.members)
        for key in dict.fromkeys(keys or ()):
            try:
                members.append(reader[key])
            except MemberNotFound as error:
                tell(error)
        asked = len(members) + len(problems)
        size_bytes = sum(member.size_bytes for member in members)
        with (
            FilesBelow(folder, force=force) as target,
            progress("extracting", size_bytes) as advance,
        ):
            bodies = ((member.key, body) for member, body in reader.read_many(members))
            for key, refused in target.write(bodies, advance):
                if refused:
                    tell(refused)
                elif as_json:
                    print_json({"key": key, "size_bytes": reader[key].size_bytes})
        if problems:
            hint = next((error.hint for error in problems if error.hint), "")
            raise CafError(
                f"{len(problems)} of {counted(asked, 'member')} could not be extracted.", hint=hint
            )
        if not as_json:
            print(f"{counted(asked, 'member')}, {show_size(size_bytes)}")


# --- cat
# ------------------------------------------------------------------------------------------

_CAT_EPILOG: Final = f"""\b
Examples:
  caf cat photos.caf 2024/a.jpg > a.jpg
  caf cat https://example.org/site.caf index.html

{_READ_STATUSES}"""


def cat(
    *,
    file: Archive,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The member's key.")],
    lenient: Lenient = False,
) -> None:
    """Write one member of a CAF file to stdout.

    In constant memory, and by at most three reads of the file.
    """
    with _opened(file, lenient=lenient) as reader:
        write_bytes(reader.stream(key))


# --- verify
# ------------------------------------------------------------------------------------------

_VERIFY_EPILOG: Final = f"""\b
Examples:
  caf verify photos.caf
  caf verify --json s3://bucket/photos.caf

{_READ_STATUSES}"""


def verify(*, file: Archive, as_json: AsJson = False, lenient: Lenient = False) -> None:
    """Check a CAF file's structure and read every byte of it.

    Footer, index and every member's range are checked; bytes that belong to no member (dead bytes)
    and members that share bytes are legal and reported. CAF holds no checksums: that the bytes are
    the right ones cannot be seen from the archive.
    """
    with _opened(file, lenient=lenient) as reader:
        with progress("reading", reader.data_size_bytes) as advance:
            for piece in reader.stream_range(0, reader.data_size_bytes):
                advance(len(piece))
        gaps = list(reader.gaps())
        dead_bytes = sum(end_byte - start_byte for start_byte, end_byte in gaps)
        overlaps = reader.overlap_count()
        report: dict[str, object] = {
            "members": len(reader),
            "size_bytes": reader.size_bytes,
            "data_bytes": reader.data_size_bytes,
            "dead_bytes": dead_bytes,
            "gaps": len(gaps),
            "overlaps": overlaps,
        }
        if as_json:
            print_json(report | {"warnings": list(reader.warnings)})
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
            print(f"overlaps: {counted(overlaps, 'member')} with bytes that another has, too")


# --- merkle
# ------------------------------------------------------------------------------------------

_MERKLE_EPILOG: Final = """\b
Examples:
  caf merkle photos.caf
  caf merkle --proof-type 0 photos.caf

Exit statuses: 0 all went well; 2 wrong arguments; 4 the file is missing or empty; 5 the server
refuses or cannot be
reached."""


def merkle(
    *,
    file: Archive,
    proof_type: Annotated[
        Literal["0", "3"],
        typer.Option(
            "--proof-type", help="0: SHA-256 and SHA3-512, 64 bytes; 3: BLAKE3, 32 bytes."
        ),
    ] = "3",
    as_json: AsJson = False,
) -> None:
    """Print the Jackal Merkle root of any file, in hex. Constant memory; an empty file has no
    root.
    """
    root, size_bytes = _root_of(file, proof_type)
    if as_json:
        print_json({"merkle_root": root, "proof_type": int(proof_type), "size_bytes": size_bytes})
    else:
        print(root)


def _root_of(file: str, proof_type: str) -> tuple[str, int]:
    """Return the root of a file, in hex, and the file's size."""
    with open_ranges(file, open_s3) as source:
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
    return root.hex(), size_bytes


COMMANDS: Final[Sequence[tuple[str, Callable[..., None], str]]] = (
    ("create", create, _CREATE_EPILOG),
    ("list", list_members, _LIST_EPILOG),
    ("extract", extract, _EXTRACT_EPILOG),
    ("cat", cat, _CAT_EPILOG),
    ("verify", verify, _VERIFY_EPILOG),
    ("merkle", merkle, _MERKLE_EPILOG),
)
"""Each with its name and what its help ends with."""
