"""All cases, by name."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile

from benchmarks import inputs, inventories
from benchmarks.case import CAF, Bench, Case, ours, shell
from benchmarks.inputs import MIB
from benchmarks.jackal import upload
from benchmarks.ledgers import claim, list_pages, load, look_up
from benchmarks.pairs import Command, run
from benchmarks.pipeline import whole_pipeline
from benchmarks.reports import FILES, listing, listing_serially, report
from benchmarks.retrieval import read_large, read_one, restore_small
from benchmarks.server import COPY
from caf_pipeline_tests.support.inventory_reports import FORMATS

KIB = 1 << 10
GIB = 1 << 30

Sides = Iterator[tuple[Command, Command]]

CAT_AND_SYNC = """cd "$1"; find . -type f -print0 | sort -z | xargs -0 cat > "$2"; sync "$2" """


# --- local files
# ------------------------------------------------------------------------------------------


def _writer(name: str, sizes: list[int], bench: Bench) -> Sides:
    folder = inputs.files(name, sizes).resolve()
    one, sums, other = (bench.folder / end for end in ("ours.caf", "ours.sums", "theirs"))
    create = [
        CAF,
        "create",
        "--sums",
        str(sums),
        "--proof-type",
        "3",
        "-C",
        str(folder),
        str(one),
        ".",
    ]
    yield (
        Command(create, removed=[one, sums, other]),
        shell(CAT_AND_SYNC, folder, other, removed=[one, sums, other]),
    )


def writer_small(bench: Bench) -> Sides:
    """100,000 files of 4 KiB."""
    count = bench.pick(100_000, 10_000, 20)
    return _writer(f"files-{count}-4k", inputs.fixed(count, 4 * KIB), bench)


def writer_large(bench: Bench) -> Sides:
    """2,048 files of 1 MiB."""
    count = bench.pick(2_048, 256, 2)
    return _writer(f"files-{count}-1m", inputs.fixed(count, MIB), bench)


def reader_open(bench: Bench) -> Sides:
    """A CAF and a stored zip of the same small members."""
    count = bench.pick(1_000_000, 100_000, 20)
    caf, archive = (bench.folder / f"members.{end}" for end in ("caf", "zip"))
    _many_members(caf, archive, count)
    key = f"{count // 2:09}"
    look = (
        "import sys, zipfile; "
        "sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))"
    )
    yield (
        Command([CAF, "cat", str(caf), key]),
        Command([sys.executable, "-c", look, str(archive), key]),
    )


def _many_members(caf: Path, archive: Path, count: int) -> None:
    from caf_pipeline.caf.archive import CafWriter  # noqa: PLC0415 - what is only read needs no writer

    with CafWriter(caf) as writer, ZipFile(archive, "w", ZIP_STORED) as other:
        for number in range(count):
            body = b"%032d" % number
            writer.add(f"{number:09}", len(body), [body])
            other.writestr(f"{number:09}", body)
        writer.seal()
        writer.publish()


def reader_extract(bench: Bench) -> Sides:
    """A CAF and a tar of the same files."""
    count = bench.pick(20_000, 2_000, 20)
    folder = inputs.files(f"files-{count}-16k", inputs.fixed(count, 16 * KIB)).resolve()
    caf, tar, one, other = (
        bench.folder / name for name in ("all.caf", "all.tar", "ours", "theirs")
    )
    run(Command([CAF, "create", "-C", str(folder), str(caf), "."], removed=[caf]))
    run(shell('tar -cf "$2" -C "$1" .', folder, tar, removed=[tar]))
    yield (
        Command([CAF, "extract", str(caf), "-C", str(one)], removed=[one, other]),
        shell('mkdir "$2"; tar -xf "$1" -C "$2"', tar, other, removed=[one, other]),
    )


def convert(bench: Bench) -> Sides:
    """A CAF of 2,048 files of 1 MiB."""
    count = bench.pick(2_048, 256, 2)
    folder = inputs.files(f"files-{count}-1m", inputs.fixed(count, MIB)).resolve()
    caf, one, other = (bench.folder / name for name in ("whole.caf", "ours.tar.co", "theirs"))
    run(Command([CAF, "create", "-C", str(folder), str(caf), "."], removed=[caf]))
    yield (
        Command([CAF, "convert", str(caf), str(one)], removed=[one, other]),
        shell('cp "$1" "$2"; sync "$2"', caf, other, removed=[one, other]),
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
    one, other = bench.folder / "packed", bench.folder / "copied"
    yield (
        ours("pack", server.endpoint, f"{prefix}/", one, removed=[one, other]),
        shell(
            script,
            f"bench:bench/{prefix}",
            other,
            environment=server.rclone(),
            removed=[one, other],
        ),
    )


COPY_HASH_CAT = f"""{COPY}; cd "$2"; find . -type f | sort > ../names
xargs sha256sum < ../names > ../sums; xargs cat < ../names > ../whole; rm ../names ../sums ../whole"""  # noqa: E501


def packing_small(bench: Bench) -> Sides:
    """20,000 objects of 16 KiB."""
    count = bench.pick(20_000, 2_000, 20)
    return _pack(bench, f"small-{count}", inputs.fixed(count, 16 * KIB), COPY)


def packing_mix(bench: Bench) -> Sides:
    """4 GiB in objects of log-normal sizes."""
    total = bench.pick(4 * GIB, GIB // 4, MIB)
    return _pack(bench, f"mix-{total}", inputs.log_normal(total, 128 * KIB), COPY)


def packing_large(bench: Bench) -> Sides:
    """8 objects of 256 MiB."""
    size_bytes = bench.pick(256 * MIB, 32 * MIB, MIB)
    return _pack(bench, f"large-{size_bytes}", inputs.fixed(8, size_bytes), COPY_HASH_CAT)


def _journal(bench: Bench, prefix: str, sizes: list[int]) -> Sides:
    server = bench.s3()
    server.fill(prefix, sizes)
    one, other = bench.folder / "kept", bench.folder / "none"
    yield tuple(
        ours(
            "pack", server.endpoint, f"{prefix}/", folder, "left", checkpoints, removed=[one, other]
        )
        for folder, checkpoints in ((one, "kept"), (other, "none"))
    )


def journal_small(bench: Bench) -> Sides:
    """20,000 objects of 16 KiB."""
    count = bench.pick(20_000, 2_000, 20)
    return _journal(bench, f"small-{count}", inputs.fixed(count, 16 * KIB))


def journal_large(bench: Bench) -> Sides:
    """8 objects of 256 MiB."""
    size_bytes = bench.pick(256 * MIB, 32 * MIB, MIB)
    return _journal(bench, f"large-{size_bytes}", inputs.fixed(8, size_bytes))


# --- planning
# ------------------------------------------------------------------------------------------

SCAN_BOTH = """import sys, duckdb
for path in sys.argv[1:]:
    print(duckdb.sql(f"SELECT bit_xor(hash(key, object_version, last_modified)) FROM read_parquet('{path}')").fetchall())"""  # noqa: E501

SCAN_SORT_WRITE = """import sys, duckdb
duckdb.sql(f"COPY (FROM read_parquet('{sys.argv[1]}') ORDER BY key) TO '{sys.argv[2]}' (FORMAT parquet)")"""  # noqa: E501


def planning(bench: Bench) -> Sides:
    """4,000,000 objects, every second one located."""
    count = bench.pick(4_000_000, 400_000, 2_000)
    inventory = inputs.KEPT / f"inventory-{count}.parquet"
    if not inventory.exists():
        inventories.make(inventory, count)
    one, other = bench.folder / "planned", bench.folder / "sorted.parquet"
    yield (
        ours("plan", inventory, one, removed=[one, other]),
        Command(
            [sys.executable, "-c", SCAN_SORT_WRITE, str(inventory), str(other)],
            removed=[one, other],
        ),
    )


def planning_again(bench: Bench) -> Sides:
    """4,000,000 objects, all located as they are listed."""
    count = bench.pick(4_000_000, 400_000, 2_000)
    inventory = inputs.KEPT / f"all-located-{count}.parquet"
    if not inventory.exists():
        inventories.make_located(inventory, count)
    place = bench.folder / "planned-again"
    both = [str(inventory), str(inventory.with_suffix(".known"))]
    yield (
        ours("plan-again", inventory, place, removed=[place]),
        Command([sys.executable, "-c", SCAN_BOTH, *both], removed=[place]),
    )


CASES = {
    case.name: case
    for case in (
        Case(
            "writer-small",
            "100,000 files of 4 KiB into a CAF, with SHA-256 of each, type 3 root and fsync",
            "cat of the same files into one, and sync",
            1.0,
            writer_small,
        ),
        Case(
            "writer-large",
            "2,048 files of 1 MiB into a CAF, with SHA-256 of each, type 3 root and fsync",
            "cat of the same files into one, and sync",
            1.8,
            writer_large,
        ),
        Case(
            "reader-open",
            "a CAF of a million members opened, strictly checked, and one member read",
            "zipfile on a stored zip of the same",
            0.2,
            reader_open,
            peak_goal=0.6,
        ),
        Case(
            "reader-extract",
            "20,000 files of 16 KiB extracted from a CAF",
            "tar -x of the same",
            1.1,
            reader_extract,
        ),
        Case(
            "convert",
            "a CAF of 2,048 members of 1 MiB made a tar with its cotar index",
            "cp of the CAF, and sync",
            1.2,
            convert,
        ),
        Case(
            "merkle-3",
            "type 3 root of 4 GiB, cached",
            "openssl dgst -sha256",
            0.5,
            partial(_merkle, 3),
        ),
        Case(
            "merkle-0",
            "type 0 root of 4 GiB, cached",
            "openssl dgst -sha256",
            1.0,
            partial(_merkle, 0),
        ),
        Case(
            "packing-small",
            "20,000 objects of 16 KiB from S3 into a chunk: listing, plan, journal, S3's checksums "
            "compared, SHA-256, root",
            "rclone copying the same objects to files",
            0.7,
            packing_small,
            cpu_goal=0.6,
        ),
        Case(
            "packing-mix",
            "4 GiB in objects of log-normal sizes, likewise",
            "rclone copying the same objects to files",
            0.7,
            packing_mix,
            cpu_goal=0.6,
        ),
        Case(
            "packing-large",
            "8 objects of 256 MiB, likewise",
            "rclone copying the same objects, sha256sum of each, cat into one",
            0.4,
            packing_large,
        ),
        Case(
            "whole-pipeline",
            "100,000 objects of log-normal sizes, 10 GiB, from S3 to located by `caf run`, in ten "
            "chunks",
            "rclone copy, cat into one, sha256sum, curl to the provider, and COPY of the rows, one "
            "after the other",
            0.7,
            whole_pipeline,
        ),
        Case(
            "upload",
            "a chunk of 4 GiB to the loopback provider",
            "curl of the same form",
            1.1,
            upload,
        ),
        Case(
            "read-one",
            "an object of 64 KiB looked up, read from the loopback provider and compared, 5,000 "
            "times in one process",
            "as many keep-alive ranged GETs of the same bytes, and 2 ms of waiting after each, "
            "which is what the rest may take",
            1.0,
            read_one,
        ),
        Case(
            "restore-small",
            "10,000 objects of 16 KiB restored to a folder from the loopback provider, each "
            "compared",
            "rclone copying the same objects from the S3 server",
            0.8,
            restore_small,
        ),
        Case(
            "read-large",
            "an object of 4 GiB written to a file by `caf get` from the loopback provider, and "
            "compared",
            "curl of the same range",
            1.2,
            read_large,
        ),
        Case(
            "journal-small",
            "20,000 objects of 16 KiB packed with the journal's checkpoints",
            "the same with none but the last",
            1.05,
            journal_small,
        ),
        Case(
            "journal-large",
            "8 objects of 256 MiB packed with the journal's checkpoints",
            "the same with none but the last",
            1.05,
            journal_large,
        ),
        Case(
            "planning",
            "an inventory of 4,000,000 objects, every second one located, cut into chunks",
            "DuckDB reading, sorting and writing the same file",
            2.0,
            planning,
        ),
        Case(
            "planning-again",
            "an inventory of 4,000,000 objects, all located as they are listed, found to have "
            "nothing new",
            "DuckDB reading and hashing keys, identities and times of the inventory and of what is "
            "known",
            1.0,
            planning_again,
        ),
        *(
            Case(
                f"report-{name.lower()}",
                f"an S3 Inventory report of 2,000,000 objects in {FILES} files of {name}, in no "
                "order, made a snapshot",
                "DuckDB reading, sorting and writing the same files, which it has",
                2.0,
                partial(report, name),
            )
            for name in FORMATS
        ),
        Case(
            "listing",
            "30,000 objects listed by `caf plan --dry-run`, cut into chunks and priced",
            "rclone lsf -R of the same, with their sizes and times as listed",
            1.0,
            listing,
        ),
        Case(
            "listing-serially",
            "30,000 objects listed by `caf plan --dry-run` in eight ranges side by side",
            "the same command, page after page",
            1.0,
            listing_serially,
        ),
        Case(
            "claims",
            "a plan of 1,000,000 objects in ten chunks written to the ledger with its claims",
            "psql's COPY of the same rows into the same table with the same indexes",
            1.25,
            claim,
        ),
        Case(
            "load-in-order",
            (
                "5,000,000 locations of a chunk written by its seal from its manifest, then "
                "located, its claims ended and its"
                " state moved"
            ),
            "bare COPY of the same rows into the same table with the same indexes",
            1.1,
            partial(load, in_order=True),
        ),
        Case(
            "load-random",
            "the same in no order",
            "likewise",
            1.1,
            partial(load, in_order=False),
        ),
        *(
            Case(
                f"look-up-{at_once}-{cache}",
                f"{keys} of 10,000,000 located keys looked up {at_once}, with what is current of "
                f"each, {meaning}",
                f"SELECT by primary key through psycopg, {at_once}",
                1.1,
                partial(look_up, batched=batched, cold=cold),
            )
            for at_once, keys, batched in (
                ("singly", "10,000", False),
                ("batched", "100,000", True),
            )
            for cache, meaning, cold in (
                ("warm", "all in memory", False),
                ("cold", "caches of system and server empty", True),
            )
        ),
        *(
            # A page is milliseconds where its keys alone are one or two.
            Case(
                name,
                f"{what}, with what is current of each, in pages of 1,000",
                "SELECT of their keys by primary key through psycopg, 1,000 at a time",
                5.0,
                partial(list_pages, level=level),
            )
            for name, what, level in (
                ("list-keys", "1,000,000 of 10,000,000 located keys listed", False),
                ("list-folders", "a level of 10,000 folders of 100 located keys listed", True),
            )
        ),
    )
}
