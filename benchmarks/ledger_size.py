"""Measures the ledger with many rows: `make bench CASE=ledger-size`.

Two databases have the same number of chunks, and the second has ten times the rows. Each operation
runs in a process of its own. Its costs are the pages that Postgres touched, whether cached or read
from the disk, and the CPU seconds of the process and the server.

The table is analysed and not vacuumed, as the embedded server leaves it. Autovacuum is off, so that
it does not run during a measurement.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import psycopg

from benchmarks import inventories
from benchmarks.case import CAF, ours, shell
from benchmarks.inputs import MIB, SEED
from benchmarks.inventories import MOMENT, key
from benchmarks.ledgers import OBJECT_BYTES, administer, claims_of, psql, write_manifest
from benchmarks.pairs import Command, run
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.inventory.plan import ChunkPlan
from caf_pipeline.inventory.snapshot import SnapshotWriter
from caf_pipeline.ledger.database import Database, embedded_url
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.sql_files import make_tables
from caf_pipeline.settings import Settings
from caf_pipeline_tests.support.chunk_rows import set_state
from caf_pipeline_tests.support.ledger_rows import SOURCE, bring_to, plan_record, register_plan
from caf_pipeline_tests.support.postgres import connected, database_at

NAME: Final = "ledger-size"

ROWS: Final = {
    "full": (2_000_000, 20_000_000),
    "quick": (200_000, 2_000_000),
    "tiny": (1_000, 10_000),
}
CHUNKS: Final = 100
LOADED: Final = {"full": 1_000_000, "quick": 100_000, "tiny": 100}
"""Rows of a chunk that is loaded in random key order."""

WINDOW_OBJECTS: Final = 10
LOOK_UPS: Final = 1_000
PAGES_LISTED: Final = 10
RUNS: Final = 3  # of an operation whose costs do not grow with the rows; the median counts

FLAT, LOAD, LINEAR = 1.3, 1.5, 11.0
"""Upper limits of the costs with ten times the rows, as a multiple."""

GOALS: Final[Mapping[str, float | None]] = {
    "1,000 look-ups": FLAT,
    "10 pages of `caf ls`": FLAT,
    "`caf status`": FLAT,
    "`caf metrics`": FLAT,
    "first plan of an inventory": LINEAR,
    "next plan of the inventory": LINEAR,
    "anti-join by DuckDB": None,
    "plan of a window of 10 objects": FLAT,
    "rows compared by `caf doctor`": LINEAR,
    "export for `caf safe-to-delete`": LINEAR,
    "`caf backup`": LINEAR,
    "load in random key order": LOAD,
}
"""The operations in the order of the table, with their limit. None: only measured."""

_CONFIG: Final = """home = "{home}"
[store]
kind = "directory"
folder = "{home}/store"
[sources.src]
bucket = "bench"
"""

# The same keys, ETags and sizes as `inventories.objects` returns.
_ROWS: Final = """COPY (
    SELECT 1, 1 + number * {chunks} / {rows}, start, start + size, size, '2026-01-01 00:00:00+00',
        file_path, '', lpad(to_hex(number), 32, '0'), sha256(file_path::bytea), int8send(number),
        'crc64nvme:' || lpad(to_hex(number), 16, '0'), decode(repeat('01', 16), 'hex')
    FROM (SELECT number, number * 10000000 AS start, number * 7919 % 10000000 AS size,
        'data/year=2025/part-' || lpad(number::text, 12, '0') || '-'
            || lpad(to_hex(number * 2654435761), 16, '0') || '.parquet' AS file_path
        FROM generate_series(0::bigint, {rows} - 1) AS number) AS objects
) TO STDOUT"""
_COLUMNS: Final = (
    "source_id, caf_file_id, start_byte, end_byte, size_bytes, last_modified, file_path, "
    "version_id, etag, sha256, crc64nvme, s3_checksum, header_set"
)

_PAGES: Final = "SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = %s"
_BACKENDS: Final = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"

_ANTI_JOIN: Final = """import sys, duckdb
print(duckdb.sql(f'''SELECT count(*) FROM read_parquet('{sys.argv[1]}') AS listed
    ANTI JOIN read_parquet('{sys.argv[2]}/*.parquet') AS kept USING (key, object_version)''')
    .fetchall())"""


@dataclass(frozen=True)
class Costs:
    """The costs of one operation.

    Attributes:
        pages: Pages of 8 KiB that the server touched.
        cpu_seconds: CPU time of the process and the server.
        peak_bytes: Peak memory of the process.
    """

    pages: int
    cpu_seconds: float
    peak_bytes: int


def measure(folder: Path, scale: str) -> dict[str, Any]:
    """Fill both databases in a new server, and return the costs of each operation in both."""
    home = folder / NAME
    url = embedded_url(Settings(home=home))
    try:
        administer(url, "ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()")
        measured = [_Filled(home, url, rows, LOADED[scale]).measure() for rows in ROWS[scale]]
    finally:
        embedded_server(home / "postgres").close()
    return {
        "rows": ROWS[scale],
        "chunks": CHUNKS,
        "row_bytes": [size_bytes for size_bytes, _ in measured],
        "operations": {
            name: {
                field: [getattr(costs[name], field) for _, costs in measured]
                for field in ("pages", "cpu_seconds", "peak_bytes")
            }
            for name in GOALS
        },
    }


class _Filled:
    """A database with `rows` located objects in `CHUNKS` chunks."""

    def __init__(self, home: Path, server_url: str, rows: int, loaded: int) -> None:
        self._folder = home / f"{rows}"
        self._name = f"rows_{rows}"
        self._server_url = server_url
        self._url = database_at(server_url, self._name)
        self._rows = rows
        self._loaded = loaded
        self._server = psutil.Process(
            int((home / "postgres" / "data" / "postmaster.pid").read_text().split()[0])
        )
        self._environment = {
            "CAF_CONFIG": str(self._folder / "caf.toml"),
            "CAF_DATABASE_URL": self._url,
        }

    def measure(self) -> tuple[float, dict[str, Costs]]:
        """Return the bytes of a row with its indexes, and each operation's costs."""
        self._folder.mkdir()
        (self._folder / "caf.toml").write_text(_CONFIG.format(home=self._folder))
        administer(self._server_url, f"CREATE DATABASE {self._name}")
        try:
            self._fill()
            with psycopg.connect(self._url) as connection:
                size = connection.execute("SELECT pg_total_relation_size('file_locations')")
                [size_bytes] = size.fetchone() or [0]
            return size_bytes / self._rows, {
                name: self._costs(prepare(), RUNS if GOALS[name] == FLAT else 1)
                for name, prepare in self._operations()
            }
        finally:
            administer(self._server_url, f"DROP DATABASE {self._name} WITH (FORCE)")

    def _operations(self) -> Iterator[tuple[str, Callable[[], Command]]]:
        """The load comes last, since it adds rows."""
        folder, environment = self._folder, self._environment
        keys = folder / "keys"
        numbers = random.Random(SEED).sample(range(self._rows), min(LOOK_UPS, self._rows))
        keys.write_text("".join(f"{key(number)}\n" for number in numbers))
        whole, window = folder / "whole.parquet", folder / "window.parquet"
        first = self._rows // 2
        self._write_inventory(whole, 0, self._rows)
        self._write_inventory(window, first, first + WINDOW_OBJECTS, after=key(first - 1))
        commands: Mapping[str, Callable[[], Command]] = {
            "1,000 look-ups": lambda: ours("look-up", self._url, keys, 1),
            "10 pages of `caf ls`": lambda: ours("list-pages", self._url, "", 0, PAGES_LISTED),
            "`caf status`": lambda: Command([CAF, "status", "--json"], environment),
            "`caf metrics`": lambda: Command([CAF, "metrics"], environment),
            "first plan of an inventory": lambda: ours(
                "plan-located", whole, environment=environment
            ),
            "next plan of the inventory": lambda: ours(
                "plan-located", whole, environment=environment
            ),
            "anti-join by DuckDB": lambda: Command(
                [sys.executable, "-c", _ANTI_JOIN, str(whole), str(folder / "located" / SOURCE)]
            ),
            "plan of a window of 10 objects": lambda: ours(
                "plan-located", window, environment=environment
            ),
            "rows compared by `caf doctor`": lambda: ours(
                "compare-rows", folder / "compared", environment=environment
            ),
            "export for `caf safe-to-delete`": lambda: ours(
                "export-located",
                folder / "located.parquet",
                environment=environment,
                removed=[folder / "located.parquet"],
            ),
            "`caf backup`": lambda: Command(
                [CAF, "backup", str(folder / "dump")], environment, removed=[folder / "dump"]
            ),
            "load in random key order": self._packed,
        }
        for name in GOALS:
            yield name, commands[name]

    def _fill(self) -> None:
        database = Database(self._url)
        with database.connect() as connection:
            make_tables(connection)
        ledger = Ledger(database)
        ledger.sources.register(SOURCE, "aws/bench/")
        self._register(ledger, [self._rows // CHUNKS] * CHUNKS)
        ledger.close()
        with connected(database) as connection:
            set_state(connection, "located")
            connection.execute(
                "UPDATE caf_files SET member_count = object_count, located_count = object_count"
            )
            connection.execute(
                "INSERT INTO header_sets "
                "VALUES (decode(repeat('01', 16), 'hex'), 'text/plain', '', '', '', '', '', '{}')"
            )
        copied = f"COPY file_locations ({_COLUMNS}) FROM STDIN"
        generated = _ROWS.format(chunks=CHUNKS, rows=self._rows)
        run(
            shell(
                '"$1" -qd "$2" -c "$3" | "$1" -qd "$2" -c "$4"',
                psql(),
                self._url,
                generated,
                copied,
            )
        )
        # The count sets the rows' hint bits, so that the first operation does not.
        administer(self._url, "ANALYZE", "SELECT count(*) FROM file_locations", "CHECKPOINT")

    def _register(self, ledger: Ledger, counts: Sequence[int], manifest: Path | None = None) -> str:
        """Register a plan with a chunk for each count; return the name of the first."""
        plan = plan_record()
        chunks = [
            ChunkPlan(
                number,
                count,
                count * OBJECT_BYTES,
                count * OBJECT_BYTES,
                ".caf/chunk",
                ".caf/manifest.parquet",
            )
            for number, count in enumerate(counts, 1)
        ]
        register_plan(ledger, plan, chunks, claims_of(manifest) if manifest else ())
        return f"{SOURCE}-{plan.name}-00001"

    def _write_inventory(self, path: Path, first: int, end: int, after: str = "") -> None:
        until = key(end - 1).encode() if after else None
        with SnapshotWriter(
            path, source=SOURCE, listed_at=MOMENT, after=after.encode(), until=until
        ) as writer:
            for batch in inventories.objects(first, end):
                writer.add_batch(batch)
            writer.finish()

    def _packed(self) -> Command:
        """Pack a chunk of other versions of random keys. The command seals and locates it."""
        manifest = self._folder / "manifest.parquet"
        write_manifest(manifest, random.Random(SEED).sample(range(self._rows), self._loaded))
        ledger = Ledger(Database(self._url))
        chunk = self._register(ledger, [self._loaded], manifest)
        bring_to(ledger, chunk, ChunkState.PACKING)
        ledger.close()
        return ours("load", self._url, manifest, chunk)

    def _costs(self, command: Command, runs: int) -> Costs:
        all_costs = [self._run(command) for _ in range(runs)]
        return Costs(
            statistics.median_low([costs.pages for costs in all_costs]),
            statistics.median([costs.cpu_seconds for costs in all_costs]),
            max(costs.peak_bytes for costs in all_costs),
        )

    def _run(self, command: Command) -> Costs:
        with self._idle() as (pages, cpu_seconds):
            usage = run(command)
        with self._idle() as (later_pages, later_seconds):
            return Costs(
                later_pages - pages,
                usage.cpu_seconds + later_seconds - cpu_seconds,
                usage.peak_bytes,
            )

    @contextmanager
    def _idle(self) -> Iterator[tuple[int, float]]:
        """Wait until no backend uses the database, and yield its pages and the server's CPU time.

        A backend reports its pages when it ends.
        """
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            while connection.execute(_BACKENDS, [self._name]).fetchone() != (0,):
                time.sleep(0.01)
            [pages] = connection.execute(_PAGES, [self._name]).fetchone() or [0]
        yield int(pages), self._server_seconds()

    def _server_seconds(self) -> float:
        """Return the CPU seconds of the server's live and ended processes."""
        while True:
            with suppress(psutil.NoSuchProcess):
                backends = self._server.children()
                server = self._server.cpu_times()
                times = [backend.cpu_times() for backend in backends]
                if self._server.children() == backends:
                    ended = server.children_user + server.children_system
                    return float(ended + sum(part.user + part.system for part in [server, *times]))


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the newest full measurement beside the first; "" without one."""
    full = [line for line in lines if line["case"] == NAME and line["scale"] == "full"]
    if not full:
        return ""
    first, newest = full[0], full[-1]
    small, large = (f"{rows:,}" for rows in newest["rows"])
    rows = [
        f"| {small} and {large} rows in {newest['chunks']} chunks | pages | × | CPU seconds | × | "
        "memory, MiB | at most | × before, pages and CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, costs in newest["operations"].items():
        goal = GOALS.get(name)
        limit = "–"
        if goal is not None:
            grown = max(_growth(costs, "pages"), _growth(costs, "cpu_seconds"))
            limit = f"{goal:g}: {'reached' if grown <= goal else 'not reached'}"
        before = first["operations"].get(name) if first is not newest else None
        rows.append(
            f"| {name} | {', '.join(f'{pages:,}' for pages in costs['pages'])} | "
            f"**{_growth(costs, 'pages'):.2f}** | "
            f"{', '.join(f'{seconds:.2f}' for seconds in costs['cpu_seconds'])} | "
            f"**{_growth(costs, 'cpu_seconds'):.2f}** | "
            f"{', '.join(f'{peak / MIB:,.0f}' for peak in costs['peak_bytes'])} | {limit} | "
            + (
                f"{_growth(before, 'pages'):.2f}, {_growth(before, 'cpu_seconds'):.2f} |"
                if before
                else "– |"
            )
        )
    sizes = ", ".join(f"{size_bytes:.0f}" for size_bytes in newest["row_bytes"])
    return "\n".join([*rows, "", f"Bytes of a row with its indexes: {sizes}."])


def _growth(costs: Mapping[str, Sequence[float]], name: str) -> float:
    small, large = costs[name]
    return large / small if small else 1.0
