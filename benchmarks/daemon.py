"""Dagster's daemon and its runs: how fast a backfill is submitted and done, what a run leaves, how
soon an object is located.

`python -m benchmarks.daemon --chunks 200`. A real daemon with a code server, a process for each
run, an S3 server, a ledger on Postgres and a folder as store; Dagster keeps its state in SQLite,
then in Postgres. Chunks are tiny: what is measured is what each costs beside its bytes. `--puts`
objects are then put one after the other, each some time after the last was located. As many chunks
are then archived by `caf run`, with each number of `--workers`.
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
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.dagster_host.storage import URL_VARIABLE
from caf_pipeline.defs.naming import PARTITION_TAG
from caf_pipeline.ledger.database import embedded_url
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.run_wiring import open_ledger, open_run_context
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.steps import inventories, planning
from caf_pipeline_tests.support.dagster_daemon import daemon
from caf_pipeline_tests.support.postgres import database_at

SOURCE = "bench"
OBJECTS = 3  # of a chunk
OBJECT_BYTES = 5_500
TARGET_BYTES = 20_000  # room for three, and the chunk's manifest
LOOK_SECONDS = 5
"""Of the sensor that notices new objects.

The one that launches chunks looks every 30 s, as it always does.
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
watch_interval_seconds = {look}
"""


def measure(chunks: int, puts: int, storage: str) -> dict[str, Any]:
    """Return what was measured with Dagster's state in `sqlite` or `postgres`."""
    with _bucket(chunks, storage) as (home, databases, server, prefix):
        settings = _settings(home, server, prefix, look=0)
        with open_instance(settings) as instance:
            found = {
                "chunks": chunks,
                "storage": storage,
                **_backfill(settings, instance, databases.get(URL_VARIABLE), home),
            }
            settings = _settings(home, server, prefix, look=LOOK_SECONDS)
            if puts:
                found |= _latency(settings, server, prefix, puts, home)
    return found


def measure_command(chunks: int, workers: int) -> dict[str, Any]:
    """Return how fast `caf run` archives so many chunks at a time; its runs are in SQLite."""
    with _bucket(chunks, "sqlite") as (home, _, server, prefix):
        settings = _settings(home, server, prefix, look=0)
        with closing(open_ledger(settings)) as ledger:
            _plan(settings, ledger)
        began = time.time()
        subprocess.run(
            [CAF, "run", "--source", SOURCE, "--workers", str(workers)],
            check=True,
            capture_output=True,
        )
        took = time.time() - began
        with open_instance(settings) as instance:
            return {
                "chunks": chunks,
                "workers": workers,
                "seconds": took,
                **_rates(instance, began),
            }


@contextmanager
def _bucket(chunks: int, storage: str) -> Iterator[tuple[Path, Mapping[str, str], S3Server, str]]:
    """Give a new home, its databases, an S3 server, and the prefix of objects for so many
    chunks.
    """
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
    """Run a Postgres for the ledger and, where asked for, Dagster; give their addresses as our
    variables, which are set.
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


def _settings(home: Path, server: S3Server, prefix: str, *, look: int) -> Settings:
    about = {
        "bucket": BUCKET,
        "prefix": prefix,
        "endpoint": server.endpoint,
        "target": TARGET_BYTES,
    }
    (home / "caf.toml").write_text(SETTINGS.format(home=home, look=look, **about), encoding="utf-8")
    return load_settings()


def _backfill(
    settings: Settings, instance: DagsterInstance, url: str | None, home: Path
) -> dict[str, Any]:
    """Plan, and let the daemon do all chunks as one backfill."""
    with closing(open_ledger(settings)) as ledger:
        names = _plan(settings, ledger)
        before = _kept(home, url)
        began = time.time()
        backfill.submit(settings, instance, ledger, SOURCE, names, "a-backfill")
        asked = time.time() - began
        with daemon("caf_pipeline.definitions", home):
            while len(ledger.chunks.list(SOURCE, [ChunkState.LOCATED])) < len(names) or _unfinished(
                instance
            ):
                time.sleep(2)
    kept = {name: (size - before[name]) / len(names) for name, size in _kept(home, url).items()}
    return {
        "asked_seconds": asked,
        **_rates(instance, began),
        **{f"{name}_a_run": value for name, value in kept.items()},
    }


def _plan(settings: Settings, ledger: Ledger) -> list[str]:
    """Plan what is in the bucket; return the chunks' names."""
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


def _rates(instance: DagsterInstance, began: float) -> dict[str, Any]:
    """Return how fast the runs of chunks were made and done, from Dagster's own times of them."""
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
        "first_run_queued_seconds": created[0] - began,
        "queued_a_second": (len(created) - 1) / max(created[-1] - created[0], 1e-9),
        "runs_a_minute": 60 * len(done) / (last - first),
        "median_run_seconds": statistics.median(end - start for start, end in times),
        "median_events_a_run": statistics.median(events),
        "most_events_a_run": max(events),
    }


def _kept(home: Path, url: str | None) -> dict[str, int]:
    """Return what Dagster keeps: bytes of its storage, of the steps' output, and rows of
    Postgres.
    """
    for file in (home / "dagster").rglob("*.db"):
        with closing(sqlite3.connect(file)) as connection:
            connection.execute(
                "PRAGMA wal_checkpoint(TRUNCATE)"
            )  # a run that was the last to use a file would have done so
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
            found = connection.execute(f'SELECT count(*) FROM "{name}"').fetchone()  # type: ignore[call-overload]  # a name of its own
            rows[f"rows_of_{name}"] = int(found[0])
        sizes = connection.execute(
            "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c WHERE relkind = 'r'"
        ).fetchone()
    return {"storage_bytes": int(sizes[0]) if sizes else 0, "output_bytes": output_bytes, **rows}


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _latency(
    settings: Settings, server: S3Server, prefix: str, puts: int, home: Path
) -> dict[str, Any]:
    """Put objects one by one; return the seconds from each PUT until its location is written."""
    chance, client, took = random.Random(inputs.SEED), server.client(), []
    keys = [f"{prefix}/new-{number}" for number in range(puts + 1)]
    with closing(open_ledger(settings)) as ledger, daemon("caf_pipeline.definitions", home):
        known = ledger.chunks.account(SOURCE).located_objects
        for number, key in enumerate(keys):
            client.put_object(Bucket=BUCKET, Key=key, Body=chance.randbytes(OBJECT_BYTES))
            put = time.monotonic()
            while ledger.chunks.account(SOURCE).located_objects == known:
                time.sleep(0.1)
            known += 1
            if number:  # while the first waits, the daemon starts
                took.append(time.monotonic() - put)
            time.sleep(chance.uniform(0, 30))
    for key in keys:  # the server keeps its objects for the next measurement
        client.delete_object(Bucket=BUCKET, Key=key)
    return {
        "look_seconds": LOOK_SECONDS,
        "puts": puts,
        "median_latency_seconds": statistics.median(took),
        "least_latency_seconds": min(took),
        "most_latency_seconds": max(took),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; a line of JSON for each storage on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.daemon", description=__doc__)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument(
        "--puts", type=int, default=10, help="objects of which the latency is measured"
    )
    parser.add_argument(
        "--storage", choices=("sqlite", "postgres"), nargs="+", default=("sqlite", "postgres")
    )
    parser.add_argument("--workers", type=int, nargs="*", default=(1, 2, 4), help="of `caf run`")
    parser.add_argument(
        "--keep", action="store_true", help="add what was measured to benchmarks/history.jsonl"
    )
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # Dagster's, of its own names
    for storage in asked.storage:
        found = measure(asked.chunks, asked.puts, storage)
        report.tell(
            {"case": "daemon", "scale": "daemon", **found, **report.about()}, keep=asked.keep
        )
    for workers in asked.workers:
        found = measure_command(asked.chunks, workers)
        report.tell(
            {"case": "run-workers", "scale": "daemon", **found, **report.about()}, keep=asked.keep
        )


if __name__ == "__main__":
    main()
