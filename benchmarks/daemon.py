"""Measure Dagster's daemon and its runs.

`python -m benchmarks.daemon --chunks 200` measures how fast a backfill is submitted and finished,
what each run leaves in Dagster's storage, and how soon a new object is located. It uses a real
daemon with a code server, one process for each run, an S3 server, a ledger on Postgres and a folder
store. Dagster keeps its state first in SQLite, then in Postgres.

The chunks are tiny, so that only the fixed costs count. The daemon then archives `--puts` new
objects. Each object is put some time after the previous one was located. At the end, `caf run`
archives the same number of chunks with each number of `--workers`.
"""

import argparse
import os
import random
import sqlite3
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

from benchmarks import inputs, report
from benchmarks.case import CAF
from benchmarks.inputs import KEPT
from benchmarks.server import BUCKET, SOURCE_KEYS, S3Server
from benchmarks.server import running as running_s3
from caf_pipeline.automation.launching import UNFINISHED
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host import backfill
from caf_pipeline.dagster_host.code_location import code_location
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.dagster_host.storage import URL_VARIABLE
from caf_pipeline.ledger.database import embedded_url
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.naming import PARTITION_TAG
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.steps import inventories, planning
from caf_pipeline.wiring import open_ledger, open_run_context
from caf_pipeline_tests.support.dagster_daemon import daemon
from caf_pipeline_tests.support.postgres import database_at

SOURCE = "bench"
OBJECTS = 3  # in a chunk
OBJECT_BYTES = 5_500
TARGET_BYTES = 20_000  # room for three, and the chunk's manifest
WATCH_SECONDS = 5
"""Interval of the sensor that notices new objects.

The launch sensor keeps its own interval of 30 s.
"""

SETTINGS = """home = "{home}"
[store]
kind = "directory"
folder = "{home}/store"
[sources.bench]
bucket = "{bucket}"
prefix = "{prefix}/"
endpoint_url = "{endpoint}"
target_size = {target}
public = true
automatic = true
watch_interval_seconds = {watch_seconds}
"""


def measure(chunks: int, puts: int, storage: str) -> dict[str, Any]:
    """Measure with Dagster's state in `storage`, which is `sqlite` or `postgres`."""
    with _bucket(chunks, storage) as (home, databases, server, prefix):
        settings = _settings(home, server, prefix, watch_seconds=0)
        with open_instance(settings) as instance:
            results = {
                "chunks": chunks,
                "storage": storage,
                **_backfill(settings, instance, databases.get(URL_VARIABLE), home),
            }
            settings = _settings(home, server, prefix, watch_seconds=WATCH_SECONDS)
            if puts:
                results |= _latency(settings, server, prefix, puts, home)
    return results


def measure_command(chunks: int, workers: int) -> dict[str, Any]:
    """Measure how fast `caf run` archives the chunks. Its runs are stored in SQLite."""
    with _bucket(chunks, "sqlite") as (home, _, server, prefix):
        settings = _settings(home, server, prefix, watch_seconds=0)
        with closing(open_ledger(settings)) as ledger:
            _plan(settings, ledger)
        started = time.time()
        subprocess.run(
            [CAF, "run", "--source", SOURCE, "--workers", str(workers)],
            check=True,
            capture_output=True,
        )
        seconds = time.time() - started
        with open_instance(settings) as instance:
            return {
                "chunks": chunks,
                "workers": workers,
                "seconds": seconds,
                **_rates(instance, started),
            }


@contextmanager
def _bucket(chunks: int, storage: str) -> Iterator[tuple[Path, Mapping[str, str], S3Server, str]]:
    """Yield a new home, its database addresses, an S3 server, and the objects' prefix."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=KEPT) as folder,
        _servers(home := Path(folder).resolve(), storage) as databases,
        running_s3() as server,
    ):
        prefix = f"daemon-{chunks}"
        server.fill(prefix, inputs.fixed(chunks * OBJECTS, OBJECT_BYTES))
        yield home, databases, server, prefix


@contextmanager
def _servers(home: Path, storage: str) -> Iterator[Mapping[str, str]]:
    """Run a Postgres for the ledger and, if `storage` is `postgres`, for Dagster.

    Yields the environment variables with the addresses. They are set while the context lasts.
    """
    url = embedded_url(Settings(home=home))
    databases = {"CAF_CONFIG": str(home / "caf.toml"), **SOURCE_KEYS}
    with psycopg.connect(url, autocommit=True) as connection:
        for name, variable in {
            "caf": "CAF_DATABASE_URL",
            **({"dagster": URL_VARIABLE} if storage == "postgres" else {}),
        }.items():
            connection.execute(f"CREATE DATABASE {name}")
            databases[variable] = database_at(url, name)
    before = dict(os.environ)
    os.environ |= databases
    try:
        yield databases
    finally:
        os.environ.clear()
        os.environ |= before
        embedded_server(home / "postgres").close()


def _settings(home: Path, server: S3Server, prefix: str, *, watch_seconds: int) -> Settings:
    values = {
        "bucket": BUCKET,
        "prefix": prefix,
        "endpoint": server.endpoint,
        "target": TARGET_BYTES,
    }
    (home / "caf.toml").write_text(
        SETTINGS.format(home=home, watch_seconds=watch_seconds, **values), encoding="utf-8"
    )
    return load_settings()


def _backfill(
    settings: Settings, instance: DagsterInstance, url: str | None, home: Path
) -> dict[str, Any]:
    """Plan the chunks, and let the daemon run all of them as one backfill."""
    with closing(open_ledger(settings)) as ledger:
        names = _plan(settings, ledger)
        stored_before = _stored_sizes(home, url)
        started = time.time()
        location = code_location(settings, [SOURCE])
        backfill.submit(settings, instance, ledger, SOURCE, names, "a-backfill", location)
        submit_seconds = time.time() - started
        with daemon("caf_pipeline.definitions", home):
            while len(ledger.chunks.list(SOURCE, [ChunkState.LOCATED])) < len(names) or _unfinished(
                instance
            ):
                time.sleep(2)
    stored = {
        name: (size - stored_before[name]) / len(names)
        for name, size in _stored_sizes(home, url).items()
    }
    return {
        "asked_seconds": submit_seconds,
        **_rates(instance, started),
        **{f"{name}_a_run": value for name, value in stored.items()},
    }


def _plan(settings: Settings, ledger: Ledger) -> list[str]:
    """Plan the bucket's objects and return the names of the chunks."""
    context = open_run_context(settings, SOURCE, run="benchmark", ledger=ledger)
    try:
        return [
            chunk.name
            for chunk in planning.cut_plan(context, inventories.take_inventory(context)).chunks
        ]
    finally:
        context.close()


def _unfinished(instance: DagsterInstance) -> int:
    return instance.get_runs_count(RunsFilter(statuses=UNFINISHED))


def _rates(instance: DagsterInstance, started: float) -> dict[str, Any]:
    """Return how fast the chunks' runs were queued and finished, by Dagster's own times."""
    records = [
        record for record in instance.get_run_records() if PARTITION_TAG in record.dagster_run.tags
    ]
    created = sorted(record.create_timestamp.timestamp() for record in records)
    done = [record for record in records if record.dagster_run.status is DagsterRunStatus.SUCCESS]
    times = [(record.start_time or 0.0, record.end_time or 0.0) for record in done]
    first, last = min(start for start, _ in times), max(end for _, end in times)
    events = [len(instance.all_logs(record.dagster_run.run_id)) for record in done]
    return {
        "runs": len(records),
        "failed_runs": len(records) - len(done),
        "first_run_queued_seconds": created[0] - started,
        "queued_a_second": (len(created) - 1) / max(created[-1] - created[0], 1e-9),
        "runs_a_minute": 60 * len(done) / (last - first),
        "median_run_seconds": statistics.median(end - start for start, end in times),
        "median_events_a_run": statistics.median(events),
        "most_events_a_run": max(events),
    }


def _stored_sizes(home: Path, url: str | None) -> dict[str, int]:
    """Return what Dagster stores: bytes of its storage and of step output, and Postgres rows."""
    for file in (home / "dagster").rglob("*.db"):
        with closing(sqlite3.connect(file)) as connection:
            # The last process to close a file does the same.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    output = home / "dagster" / "storage"
    output_bytes = _bytes_below(output)
    if url is None:
        return {
            "storage_bytes": _bytes_below(home / "dagster") - output_bytes,
            "output_bytes": output_bytes,
        }
    with psycopg.connect(url, autocommit=True) as connection:
        tables = [
            name
            for (name,) in connection.execute(
                "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
            ).fetchall()
        ]
        rows = {}
        for name in tables:
            row = connection.execute(f'SELECT count(*) FROM "{name}"').fetchone()  # type: ignore[call-overload]  # the name comes from Postgres
            rows[f"rows_of_{name}"] = int(row[0])
        sizes = connection.execute(
            "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c WHERE relkind = 'r'"
        ).fetchone()
    return {"storage_bytes": int(sizes[0]) if sizes else 0, "output_bytes": output_bytes, **rows}


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _latency(
    settings: Settings, server: S3Server, prefix: str, puts: int, home: Path
) -> dict[str, Any]:
    """Put objects one by one and measure the seconds from each PUT to its location."""
    generator, client, latencies = random.Random(inputs.SEED), server.client(), []
    keys = [f"{prefix}/new-{number}" for number in range(puts + 1)]
    with closing(open_ledger(settings)) as ledger, daemon("caf_pipeline.definitions", home):
        located = ledger.chunks.account(SOURCE).located_objects
        for number, key in enumerate(keys):
            client.put_object(Bucket=BUCKET, Key=key, Body=generator.randbytes(OBJECT_BYTES))
            put_at = time.monotonic()
            while ledger.chunks.account(SOURCE).located_objects == located:
                time.sleep(0.1)
            located += 1
            if number:  # the daemon is still starting when the first object is put
                latencies.append(time.monotonic() - put_at)
            time.sleep(generator.uniform(0, 30))
    for key in keys:  # the server keeps its objects between measurements
        client.delete_object(Bucket=BUCKET, Key=key)
    return {
        "look_seconds": WATCH_SECONDS,
        "puts": puts,
        "median_latency_seconds": statistics.median(latencies),
        "least_latency_seconds": min(latencies),
        "most_latency_seconds": max(latencies),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line of JSON for each storage and each number of workers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.daemon", description=__doc__)
    parser.add_argument("--chunks", type=int, default=200, help="chunks of a backfill")
    parser.add_argument(
        "--puts", type=int, default=10, help="new objects to measure the latency with"
    )
    parser.add_argument(
        "--storage",
        choices=("sqlite", "postgres"),
        nargs="+",
        default=("sqlite", "postgres"),
        help="storages of Dagster's state",
    )
    parser.add_argument(
        "--workers", type=int, nargs="*", default=(1, 2, 4), help="numbers of workers of `caf run`"
    )
    parser.add_argument(
        "--keep", action="store_true", help="append the results to benchmarks/history.jsonl"
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # Dagster warns about its own names
    for storage in options.storage:
        results = measure(options.chunks, options.puts, storage)
        report.publish(
            {"case": "daemon", "scale": "daemon", **results, **report.about()}, keep=options.keep
        )
    for workers in options.workers:
        results = measure_command(options.chunks, workers)
        report.publish(
            {"case": "run-workers", "scale": "daemon", **results, **report.about()},
            keep=options.keep,
        )


if __name__ == "__main__":
    main()
