"""Many workers and one ledger, no bytes moved: how many chunks a second a real Postgres takes
through all their states.

A worker takes a chunk's lease, makes the seven moves from planned to located with all that they
write, and gives the lease back. Workers are threads in a few processes, each with connections of
its own as a run has them.
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
from caf_pipeline.ledger.schema_files import make_tables
from caf_pipeline.settings import Settings
from caf_pipeline_tests.contracts.ledger import bring_to, register

WORKERS = (1, 2, 4, 8, 16, 32, 64, 100)
PROCESSES = 4
MOVES = 7
CONNECTIONS = 3 * max(WORKERS)  # two of each worker, and room


def measure(workers: Sequence[int], *, chunks: int, objects: int) -> Iterator[dict[str, Any]]:
    """Yield what so many workers did with `chunks` chunks of `objects` objects."""
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
    """Return the keys of the chunk of this number, in the plan for so many workers."""
    return [f"{workers}/{number}/{each}" for each in range(objects)]


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
    """Share the chunks out among processes; they begin at once, when all are there."""
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
    told = [json.loads(process.communicate("go\n")[0]) for process in processes]
    seconds = time.monotonic() - started
    if any(process.returncode for process in processes):
        raise SystemExit("a worker failed")
    taken = sorted(one for each in told for one in each)
    return {
        "seconds": seconds,
        "chunks_per_second": len(taken) / seconds,
        "moves_per_second": MOVES * len(taken) / seconds,
        "median_chunk_seconds": statistics.median(taken),
        "slowest_chunk_seconds": taken[-1],
    }


def _work(url: str, workers: int, threads: int, objects: int, names: Sequence[str]) -> None:
    """Take the chunks through their states; print how long each took."""
    ledgers = [Ledger(Database(url)) for _ in range(threads)]
    for ledger in ledgers:
        ledger.lookup.sources()
    print("ready", flush=True)
    sys.stdin.readline()
    taken: list[float] = []

    def work(ledger: Ledger, some: Sequence[str]) -> None:
        for name in some:
            began = time.monotonic()
            bring_to(ledger, name, ChunkState.LOCATED)
            taken.append(time.monotonic() - began)

    running = [
        threading.Thread(target=work, args=(ledger, names[number::threads]))
        for number, ledger in enumerate(ledgers)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    print(json.dumps(taken))


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate; a line of JSON for each number of workers on standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workers", description=__doc__)
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--chunks", type=int, default=1_000)
    parser.add_argument("--objects", type=int, default=10)
    parser.add_argument(
        "--keep", action="store_true", help="add what was measured to benchmarks/history.jsonl"
    )
    asked = parser.parse_args(arguments)
    if asked.work:
        url, *counts = asked.work[:4]
        _work(url, *map(int, counts), names=asked.work[4:])
        return
    about = report.about()
    for found in measure(asked.workers, chunks=asked.chunks, objects=asked.objects):
        report.tell({"case": "workers", "scale": "simulation", **found, **about}, keep=asked.keep)


if __name__ == "__main__":
    main()
