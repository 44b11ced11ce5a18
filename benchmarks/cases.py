"""All cases, by name."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final
from zipfile import ZIP_STORED, ZipFile

from benchmarks import inputs, inventories
from benchmarks.case import CAF, Bench, Case, best_transfers, ours, shell
from benchmarks.encryption import open_file, packing_encrypted, seal_file
from benchmarks.inputs import MIB
from benchmarks.jackal import upload
from benchmarks.ledgers import claim, list_pages, load, look_up
from benchmarks.pairs import Command, run
from benchmarks.pipeline import run_small, whole_pipeline
from benchmarks.reports import FILES, listing, listing_serially, report
from benchmarks.retrieval import get_one, read_encrypted, read_large, read_one, restore_small
from benchmarks.server import BUCKET, COPY
from caf_pipeline_tests.support.inventory_reports import FORMATS

KIB = 1 << 10
GIB = 1 << 30

Sides = Iterator[tuple[Command, Command]]

CAT_AND_SYNC = """cd "$1"; find . -type f -print0 | sort -z | xargs -0 cat > "$2"; sync "$2" """


# --- local files
# ------------------------------------------------------------------------------------------


def _writer(name: str, sizes: list[int], bench: Bench) -> Sides:
    folder = inputs.files(name, sizes).resolve()
    our_output, sums, their_output = (
        bench.folder / end for end in ("ours.caf", "ours.sums", "theirs")
    )
    create = [
        CAF,
        "create",
        "--sums",
        str(sums),
        "--proof-type",
        "3",
        "-C",
        str(folder),
        str(our_output),
        ".",
    ]
    yield (
        Command(create, removed=[our_output, sums, their_output]),
        shell(CAT_AND_SYNC, folder, their_output, removed=[our_output, sums, their_output]),
    )


def writer_small(bench: Bench) -> Sides:
    """Write 100,000 files of 4 KiB."""
    count = bench.pick(100_000, 10_000, 20)
    return _writer(f"files-{count}-4k", inputs.fixed(count, 4 * KIB), bench)


def writer_large(bench: Bench) -> Sides:
    """Write 2,048 files of 1 MiB."""
    count = bench.pick(2_048, 256, 2)
    return _writer(f"files-{count}-1m", inputs.fixed(count, MIB), bench)


def reader_open(bench: Bench) -> Sides:
    """Read one member of a CAF, and of a stored zip with the same small members."""
    count = bench.pick(1_000_000, 100_000, 20)
    caf, archive = (bench.folder / f"members.{end}" for end in ("caf", "zip"))
    _many_members(caf, archive, count)
    key = f"{count // 2:09}"
    script = (
        "import sys, zipfile; "
        "sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))"
    )
    yield (
        Command([CAF, "cat", str(caf), key]),
        Command([sys.executable, "-c", script, str(archive), key]),
    )


def _many_members(caf: Path, archive: Path, count: int) -> None:
    from caf_pipeline.caf.archive import CafWriter  # noqa: PLC0415 - only this case needs the writer

    with CafWriter(caf) as writer, ZipFile(archive, "w", ZIP_STORED) as zip_file:
        for number in range(count):
            body = b"%032d" % number
            writer.add(f"{number:09}", len(body), [body])
            zip_file.writestr(f"{number:09}", body)
        writer.seal()
        writer.publish()


def reader_extract(bench: Bench) -> Sides:
    """Extract a CAF, and a tar with the same files."""
    count = bench.pick(20_000, 2_000, 20)
    folder = inputs.files(f"files-{count}-16k", inputs.fixed(count, 16 * KIB)).resolve()
    caf, tar, our_output, their_output = (
        bench.folder / name for name in ("all.caf", "all.tar", "ours", "theirs")
    )
    run(Command([CAF, "create", "-C", str(folder), str(caf), "."], removed=[caf]))
    run(shell('tar -cf "$2" -C "$1" .', folder, tar, removed=[tar]))
    yield (
        Command(
            [CAF, "extract", str(caf), "-C", str(our_output)], removed=[our_output, their_output]
        ),
        shell(
            'mkdir "$2"; tar -xf "$1" -C "$2"',
            tar,
            their_output,
            removed=[our_output, their_output],
        ),
    )


def convert(bench: Bench) -> Sides:
    """Convert a CAF of 2,048 files of 1 MiB."""
    count = bench.pick(2_048, 256, 2)
    folder = inputs.files(f"files-{count}-1m", inputs.fixed(count, MIB)).resolve()
    caf, our_output, their_output = (
        bench.folder / name for name in ("whole.caf", "ours.tar.co", "theirs")
    )
    run(Command([CAF, "create", "-C", str(folder), str(caf), "."], removed=[caf]))
    yield (
        Command([CAF, "convert", str(caf), str(our_output)], removed=[our_output, their_output]),
        shell('cp "$1" "$2"; sync "$2"', caf, their_output, removed=[our_output, their_output]),
    )


def _merkle(proof_type: int, bench: Bench) -> Sides:
    size_bytes = bench.pick(4 * GIB, GIB, MIB)
    path = inputs.one_file(f"file-{size_bytes}", size_bytes)
    yield (
        Command([CAF, "merkle", "--proof-type", str(proof_type), str(path)]),
        Command(["openssl", "dgst", "-sha256", str(path)]),
    )


# --- from S3
# ------------------------------------------------------------------------------------------


def _pack(bench: Bench, prefix: str, sizes: list[int], script: str) -> Sides:
    server = bench.s3()
    server.fill(prefix, sizes)
    our_output, their_output = bench.folder / "packed", bench.folder / "copied"
    removed = [our_output, their_output]
    yield (
        ours("pack", server.endpoint, f"{prefix}/", our_output, removed=removed),
        shell(
            best_transfers(script, bench, prefix),
            f"bench:{BUCKET}/{prefix}",
            their_output,
            environment=server.rclone(),
            removed=removed,
        ),
    )


COPY_HASH_CAT = f"""{COPY}; cd "$2"; find . -type f | sort > ../names
xargs sha256sum < ../names > ../sums; xargs cat < ../names > ../whole
rm ../names ../sums ../whole"""


def packing_small(bench: Bench, count: int = 20_000) -> Sides:
    """Pack objects of 16 KiB."""
    count = bench.pick(count, 2_000, 20)
    return _pack(bench, f"small-{count}", inputs.fixed(count, 16 * KIB), COPY)


def packing_mix(bench: Bench) -> Sides:
    """Pack 4 GiB of objects with log-normal sizes."""
    total = bench.pick(4 * GIB, GIB // 4, MIB)
    return _pack(bench, f"mix-{total}", inputs.log_normal(total, 128 * KIB), COPY)


def packing_large(bench: Bench) -> Sides:
    """Pack 8 objects of 256 MiB."""
    size_bytes = bench.pick(256 * MIB, 32 * MIB, MIB)
    return _pack(bench, f"large-{size_bytes}", inputs.fixed(8, size_bytes), COPY_HASH_CAT)


def _journal(bench: Bench, prefix: str, sizes: list[int]) -> Sides:
    server = bench.s3()
    server.fill(prefix, sizes)
    our_output, their_output = bench.folder / "kept", bench.folder / "none"
    yield tuple(
        ours(
            "pack",
            server.endpoint,
            f"{prefix}/",
            folder,
            "left",
            checkpoints,
            removed=[our_output, their_output],
        )
        for folder, checkpoints in ((our_output, "kept"), (their_output, "none"))
    )


def journal_small(bench: Bench) -> Sides:
    """Pack 20,000 objects of 16 KiB with and without checkpoints."""
    count = bench.pick(20_000, 2_000, 20)
    return _journal(bench, f"small-{count}", inputs.fixed(count, 16 * KIB))


def journal_large(bench: Bench) -> Sides:
    """Pack 8 objects of 256 MiB with and without checkpoints."""
    size_bytes = bench.pick(256 * MIB, 32 * MIB, MIB)
    return _journal(bench, f"large-{size_bytes}", inputs.fixed(8, size_bytes))


# --- planning
# ------------------------------------------------------------------------------------------

SCAN_BOTH = """import sys, duckdb
scan = "SELECT bit_xor(hash(key, object_version, last_modified)) FROM read_parquet('{}')"
for path in sys.argv[1:]:
    print(duckdb.sql(scan.format(path)).fetchall())"""

SCAN_SORT_WRITE = """import sys, duckdb
copy = "COPY (FROM read_parquet('{}') ORDER BY key) TO '{}' (FORMAT parquet)"
duckdb.sql(copy.format(*sys.argv[1:]))"""


def planning(bench: Bench) -> Sides:
    """Plan 4,000,000 objects, with every second our_output located."""
    count = bench.pick(4_000_000, 400_000, 2_000)
    inventory = inputs.KEPT / f"inventory-{count}.parquet"
    if not inventory.exists():
        inventories.make(inventory, count)
    our_output, their_output = bench.folder / "planned", bench.folder / "sorted.parquet"
    yield (
        ours("plan", inventory, our_output, removed=[our_output, their_output]),
        Command(
            [sys.executable, "-c", SCAN_SORT_WRITE, str(inventory), str(their_output)],
            removed=[our_output, their_output],
        ),
    )


def planning_again(bench: Bench) -> Sides:
    """Plan 4,000,000 objects that are all located in their current version."""
    count = bench.pick(4_000_000, 400_000, 2_000)
    inventory = inputs.KEPT / f"all-located-{count}.parquet"
    if not inventory.exists():
        inventories.make_located(inventory, count)
    folder = bench.folder / "planned-again"
    files = [str(inventory), str(inventory.with_suffix(".known"))]
    yield (
        ours("plan-again", inventory, folder, removed=[folder]),
        Command([sys.executable, "-c", SCAN_BOTH, *files], removed=[folder]),
    )


ROUND_TRIPS: Final = (30, 100)
"""Milliseconds: to S3 in another region of a continent, and on another continent."""

PACKING_MIX: Final = Case(
    "packing-mix",
    "packs 4 GiB of objects with log-normal sizes in the same way",
    "rclone copies the same objects to files",
    0.7,
    packing_mix,
    cpu_goal=0.6,
)

PACKING_LARGE: Final = Case(
    "packing-large",
    "packs 8 objects of 256 MiB in the same way",
    "rclone copies the objects, sha256sum hashes each, cat writes one file",
    0.4,
    packing_large,
)

RUN_SMALL: Final = Case(
    "run-small",
    "archives 10,000 objects of 16 KiB by `caf run`, with a new ledger",
    "rclone copies the same objects to files",
    None,
    run_small,
)

WHOLE_PIPELINE: Final = Case(
    "whole-pipeline",
    "archives 100,000 objects (10 GiB, log-normal sizes) in ten chunks by `caf run`",
    "rclone copy, cat, sha256sum, curl to the provider and COPY of the rows, in turn",
    0.7,
    whole_pipeline,
)

UPLOAD_THREE: Final = Case(
    "upload-three",
    "uploads a chunk of 4 GiB to three providers, and waits until the chain lists the copies",
    "three curls send the same form, side by side",
    None,
    partial(upload, copies=3),
)

GET_ONE: Final = Case(
    "get-one",
    "gets an object of 64 KiB by `caf get`",
    "curl gets the same range, psql selects the row, then the 350 ms that caf may add",
    None,
    get_one,
)

READ_ONE: Final = Case(
    "read-one",
    "reads and compares an object of 64 KiB many times by `Archive.read`",
    "as many keep-alive ranged GETs, each followed by the 2 ms that caf may add",
    1.0,
    read_one,
    ratio_of="p50_ms",
)

RESTORE_SMALL: Final = Case(
    "restore-small",
    "restores 10,000 objects of 16 KiB from the loopback provider, and compares each",
    "rclone copies the same objects from the S3 server",
    0.8,
    restore_small,
)

OVER_NETWORK: Final = (
    (
        Case(
            "packing-small",
            "packs 10,000 objects of 16 KiB",
            "rclone copies the same objects to files",
            None,
            partial(packing_small, count=10_000),
        ),
        {30: 0.95},
    ),
    (PACKING_MIX, {30: 0.9}),
    (PACKING_LARGE, {30: 0.45}),
    (
        Case(
            "listing",
            "lists, plans and prices 100,000 objects by `caf plan --dry-run`",
            "rclone lsf -R lists them, with or without --fast-list, whichever is faster",
            None,
            partial(listing, count=100_000),
        ),
        {30: 0.5},
    ),
    (RUN_SMALL, {30: 1.6}),
    (WHOLE_PIPELINE, {30: 0.6}),
    (UPLOAD_THREE, {100: 1.1}),
    (GET_ONE, {30: 1.0}),
    (READ_ONE, {30: 1.0}),
    (RESTORE_SMALL, {30: 0.5}),
)
"""Cases behind a network, and their goals by its round trip in milliseconds."""

CASES = {
    case.name: case
    for case in (
        Case(
            "writer-small",
            "writes 100,000 files of 4 KiB to a CAF, with SHA-256, type 3 root and fsync",
            "cat writes the same files to one file, then sync",
            1.0,
            writer_small,
        ),
        Case(
            "writer-large",
            "writes 2,048 files of 1 MiB to a CAF, with SHA-256, type 3 root and fsync",
            "cat writes the same files to one file, then sync",
            1.8,
            writer_large,
        ),
        Case(
            "reader-open",
            "opens a CAF of 1,000,000 members, checks it strictly, and reads one member",
            "zipfile reads the same member of a stored zip",
            0.2,
            reader_open,
            peak_goal=0.6,
        ),
        Case(
            "reader-extract",
            "extracts 20,000 files of 16 KiB from a CAF",
            "tar -x extracts the same files",
            1.1,
            reader_extract,
        ),
        Case(
            "convert",
            "converts a CAF of 2,048 members of 1 MiB to a tar with a cotar index",
            "cp copies the CAF, then sync",
            1.2,
            convert,
        ),
        Case(
            "merkle-3",
            "computes the type 3 root of 4 GiB in the page cache",
            "openssl dgst -sha256 hashes the same file",
            0.5,
            partial(_merkle, 3),
        ),
        Case(
            "merkle-0",
            "computes the type 0 root of 4 GiB in the page cache",
            "openssl dgst -sha256 hashes the same file",
            1.0,
            partial(_merkle, 0),
        ),
        Case(
            "packing-small",
            "packs 20,000 objects of 16 KiB from S3: listing, plan, journal, checksums, root",
            "rclone copies the same objects to files",
            0.7,
            packing_small,
            cpu_goal=0.6,
        ),
        PACKING_MIX,
        PACKING_LARGE,
        RUN_SMALL,
        WHOLE_PIPELINE,
        UPLOAD_THREE,
        GET_ONE,
        READ_ONE,
        RESTORE_SMALL,
        *(
            case.over_network(round_trip_ms, goals.get(round_trip_ms))
            for case, goals in OVER_NETWORK
            for round_trip_ms in ROUND_TRIPS
        ),
        Case(
            "packing-encrypted",
            "packs 8 objects of 256 MiB, encrypted to a hybrid recipient",
            "the same command without encryption",
            1.25,
            packing_encrypted,
        ),
        Case(
            "seal-file",
            "encrypts a cached file of 1 GiB to /dev/null in two threads",
            "age 1.3.2 encrypts the same file",
            0.5,
            seal_file,
        ),
        Case(
            "open-file",
            "decrypts a cached file of 1 GiB to /dev/null in two threads",
            "age 1.3.2 decrypts the same file",
            0.5,
            open_file,
        ),
        Case(
            "upload",
            "uploads a chunk of 4 GiB to the loopback provider",
            "curl sends the same form",
            1.1,
            upload,
        ),
        Case(
            "read-encrypted",
            "reads and opens an encrypted object of 64 KiB 5,000 times by `Archive.read`",
            "the same reads of a plain object, each followed by the 1 ms that opening may add",
            1.0,
            read_encrypted,
        ),
        Case(
            "read-large",
            "gets an object of 4 GiB from the loopback provider, and compares it",
            "curl gets the same range",
            1.2,
            read_large,
        ),
        Case(
            "journal-small",
            "packs 20,000 objects of 16 KiB with all checkpoints of the journal",
            "the same command with only the last checkpoint",
            1.05,
            journal_small,
        ),
        Case(
            "journal-large",
            "packs 8 objects of 256 MiB with all checkpoints of the journal",
            "the same command with only the last checkpoint",
            1.05,
            journal_large,
        ),
        Case(
            "planning",
            "plans 4,000,000 objects when every second object is already located",
            "DuckDB reads, sorts and writes the same file",
            2.0,
            planning,
        ),
        Case(
            "planning-again",
            "plans 4,000,000 objects that are all located, and finds nothing new",
            "DuckDB hashes keys, versions and times of the inventory and the ledger's rows",
            1.0,
            planning_again,
        ),
        *(
            Case(
                f"report-{name.lower()}",
                f"reads an S3 Inventory report: 2,000,000 unsorted objects in {FILES} {name} files",
                "DuckDB reads, sorts and writes local copies of the same files",
                2.0,
                partial(report, name),
            )
            for name in FORMATS
        ),
        Case(
            "listing",
            "lists, plans and prices 30,000 objects by `caf plan --dry-run`",
            "rclone lsf -R lists the same objects with sizes and times",
            1.0,
            listing,
        ),
        Case(
            "listing-serially",
            "lists 30,000 objects by `caf plan --dry-run` in eight concurrent ranges",
            "the same command lists one page after the other",
            1.0,
            listing_serially,
        ),
        Case(
            "claims",
            "registers a plan of 1,000,000 objects in ten chunks, with its claims",
            "psql copies the same rows into the same table with the same indexes",
            1.25,
            claim,
        ),
        Case(
            "load-in-order",
            "seals and locates a chunk of 5,000,000 objects in key order, and ends its claims",
            "psql copies the same rows into the same table with the same indexes",
            1.1,
            partial(load, in_order=True),
        ),
        Case(
            "load-random",
            "seals and locates a chunk of 5,000,000 objects in random order",
            "psql copies the same rows into the same table with the same indexes",
            1.1,
            partial(load, in_order=False),
        ),
        *(
            Case(
                f"look-up-{at_once}-{cache}",
                f"looks up current versions of {keys} of 10,000,000 keys, {at_once}, {caches}",
                f"psycopg selects the same rows by primary key, {at_once}",
                1.1,
                partial(look_up, batched=batched, cold=cold),
            )
            for at_once, keys, batched in (
                ("singly", "10,000", False),
                ("batched", "100,000", True),
            )
            for cache, caches, cold in (
                ("warm", "with warm caches", False),
                ("cold", "with cold caches", True),
            )
        ),
        *(
            # A page takes milliseconds. Its keys alone take one or two.
            Case(
                name,
                f"lists {entries} with their current versions, in pages of 1,000",
                "psycopg selects the keys by primary key, 1,000 at a time",
                5.0,
                partial(list_pages, level=level),
            )
            for name, entries, level in (
                ("list-keys", "1,000,000 of 10,000,000 keys", False),
                ("list-folders", "10,000 folders of 100 keys", True),
            )
        ),
    )
}
