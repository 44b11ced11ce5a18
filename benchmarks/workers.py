"""Simulates many workers that share one ledger.

`python -m benchmarks.workers` measures how many chunks a second a real Postgres takes through all
their states. No bytes are stored. A worker takes a chunk's lease, makes the seven moves from
planned to located with all their rows, and releases the lease. Workers are threads in a few
processes, and each has its own connections, as in a run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import report
from benchmarks.inputs import KEPT
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.ledger.database import Database, embedded_url
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.sql_files import make_tables
from caf_pipeline.settings import Settings
from caf_pipeline_tests.support.ledger_rows import bring_to, register

WORKERS = (1, 2, 4, 8, 16, 32, 64, 100)
PROCESSES = 4
MOVES = 7
CONNECTIONS = 3 * max(WORKERS)  # two for each worker, and some to spare


def measure(workers: Sequence[int], *, chunks: int, objects: int) -> Iterator[dict[str, Any]]:
    """Yield the result for each number of workers, with `chunks` chunks of `objects` objects."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=KEPT) as folder, _server(Path(folder).resolve()) as url:
        ledger = Ledger(Database(url))
        with ledger.database.connect() as connection:
            make_tables(connection)
        for count in workers:
            names = register(
                ledger, *(_keys(count, number, objects) for number in range(1, chunks + 1))
            )
            yield {
                "workers": count,
                "chunks": chunks,
                "objects": objects,
                **_run(url, names, count, objects),
            }
        ledger.close()


def _keys(workers: int, number: int, objects: int) -> list[str]:
    return [f"{workers}/{number}/{position}" for position in range(objects)]


@contextmanager
def _server(home: Path) -> Iterator[str]:
    settings = Settings(home=home)
    url = embedded_url(settings)
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET max_connections = {CONNECTIONS}")
        embedded_server(home / "postgres").close()
        yield embedded_url(settings)
    finally:
        embedded_server(home / "postgres").close()


def _run(url: str, names: Sequence[str], workers: int, objects: int) -> dict[str, float]:
    """Divide the chunks among processes. All start together when the last one is ready."""
    shares = min(PROCESSES, workers)
    processes = []
    for share in range(shares):
        threads = len(range(share, workers, shares))
        command = [
            sys.executable,
            "-m",
            "benchmarks.workers",
            "--work",
            url,
            f"{workers}",
            f"{threads}",
            f"{objects}",
            *names[share::shares],
        ]
        processes.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    for process in processes:
        assert process.stdout
        process.stdout.readline()
    started = time.monotonic()
    outputs = [json.loads(process.communicate("go\n")[0]) for process in processes]
    seconds = time.monotonic() - started
    if any(process.returncode for process in processes):
        raise SystemExit("a worker failed")
    durations = sorted(duration for output in outputs for duration in output)
    return {
        "seconds": seconds,
        "chunks_per_second": len(durations) / seconds,
        "moves_per_second": MOVES * len(durations) / seconds,
        "median_chunk_seconds": statistics.median(durations),
        "slowest_chunk_seconds": durations[-1],
    }


def _work(url: str, workers: int, threads: int, objects: int, names: Sequence[str]) -> None:
    """Take the chunks through their states and print how long each took."""
    ledgers = [Ledger(Database(url)) for _ in range(threads)]
    for ledger in ledgers:
        ledger.lookup.sources()
    print("ready", flush=True)
    sys.stdin.readline()
    durations: list[float] = []

    def move_chunks(ledger: Ledger, chunks: Sequence[str]) -> None:
        for name in chunks:
            started = time.monotonic()
            bring_to(ledger, name, ChunkState.LOCATED)
            durations.append(time.monotonic() - started)

    running = [
        threading.Thread(target=move_chunks, args=(ledger, names[number::threads]))
        for number, ledger in enumerate(ledgers)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    print(json.dumps(durations))


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, and print a line of JSON for each number of workers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workers", description=__doc__)
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=WORKERS, help="numbers of workers to simulate"
    )
    parser.add_argument("--chunks", type=int, default=1_000, help="chunks of each simulation")
    parser.add_argument("--objects", type=int, default=10, help="objects of each chunk")
    parser.add_argument(
        "--keep", action="store_true", help="append the results to benchmarks/history.jsonl"
    )
    options = parser.parse_args(arguments)
    if options.work:
        url, *counts = options.work[:4]
        _work(url, *map(int, counts), names=options.work[4:])
        return
    about = report.about()
    for result in measure(options.workers, chunks=options.chunks, objects=options.objects):
        report.publish(
            {"case": "workers", "scale": "simulation", **result, **about}, keep=options.keep
        )


if __name__ == "__main__":
    main()
