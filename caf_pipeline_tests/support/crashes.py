"""Processes that are killed, the doctor that runs afterwards, and the state before and after.

`python -m caf_pipeline_tests.support.crashes lease URL NAME SECONDS` prints "held", then "kept" or
"lost" for each line of its standard input. `… inventory URL FOLDER` prints "held" when the first
page is written.
"""

import contextlib
import hashlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psycopg

from caf_pipeline.errors import HeldByOther, LeaseLost
from caf_pipeline.ledger.chunk_moves import ChunkMoves
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.leases import Leases
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.processes import is_alive, this_process
from caf_pipeline.ledger.runs import Staging, StrayRows
from caf_pipeline.ledger.transactions import TransactionLog
from caf_pipeline.maintenance.doctor.examine import Settler, examine
from caf_pipeline.maintenance.doctor.findings import Actor, Finding, Kind, UnknownPosts
from caf_pipeline.run_context import RunContext
from caf_pipeline.store.jackal.write import JackalStore
from caf_pipeline_tests.support.dying_runs import PRELOADED, a_steady_source
from caf_pipeline_tests.support.jackal_stores import open_jackal_store
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_chunk

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(PRELOADED)

NOT_COMPARED = {"chain_heights", "folder_store", "providers"}
"""Tables with observations of a chain: its height and the speed of its providers."""


@contextlib.contextmanager
def started(*arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """Start this module, and yield the process once it holds its lease."""
    command = [sys.executable, "-m", "caf_pipeline_tests.support.crashes", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def killed(what: str, url: str, name: str, seconds: str) -> None:
    """Kill a process while it holds a lease."""
    assert what == "lease"
    here, there = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_hold, args=(url, name, float(seconds), there))
    process.start()
    there.close()
    assert here.recv() == "held"
    here.close()
    process.kill()
    process.join()


def _hold(url: str, name: str, seconds: float, parent: Connection) -> None:
    with Ledger(Database(url), lease_seconds=seconds).leases.hold(name, this_process("run-child")):
        parent.send("held")
        time.sleep(600)


def says(process: "subprocess.Popen[str]") -> str:
    """Ask a process whether it still holds its lease."""
    assert process.stdin
    assert process.stdout
    process.stdin.write("?\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


# --- killed at a moment


def _kill_at(owner: object, name: str, *, before: bool) -> None:
    original = getattr(owner, name)

    def deadly(*arguments: Any, **named: Any) -> None:
        if not before:
            original(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, deadly)


def _run(folder: str, url: str, chunk: str, at: tuple[str, bool], settings: dict[str, Any]) -> None:
    name, before = at
    owner = next(owner for owner in (TransactionLog, ChunkMoves, Staging) if hasattr(owner, name))
    _kill_at(owner, name, before=before)
    ledger = Ledger(Database(url))
    store = open_jackal_store if "jackal" in settings else None
    archive_chunk(
        a_run_context(
            Path(folder), a_steady_source(), ledger, run="run-dead", store=store, **settings
        ),
        chunk,
    )


def run_killed(
    folder: Path, url: str, chunk: str, *, at: str, before: bool = False, **settings: Any
) -> None:
    """Run a chunk's steps in a process that kills itself at a call of this ledger or log method."""
    process = _PROCESSES.Process(
        target=_run, args=(str(folder), url, chunk, (at, before), settings)
    )
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == -signal.SIGKILL, process.exitcode


# --- the doctor


def examined(
    context: RunContext, unknown_posts: UnknownPosts = UnknownPosts.REPORT
) -> Iterator[Finding]:
    """Yield the findings of the doctor, as `caf doctor` does."""
    settler = None
    if isinstance(store := context.store, JackalStore):
        log = context.ledger.transactions(context.holder)
        settler = Settler(lambda: store.poster.account, lambda: store.poster.settle(log))
    return examine(
        context,
        alive=lambda holder: is_alive(holder.boot_id, holder.pid, holder.process_started),
        settler=settler,
        unknown_posts=unknown_posts,
    )


def found(context: RunContext, *, reported: bool = False) -> list[tuple[Kind, str]]:
    """Return kind and name of the findings that the doctor can mend, or of all findings."""
    return [
        (finding.kind, finding.name)
        for finding in examined(context)
        if reported or finding.actor is Actor.DOCTOR
    ]


def mended(context: RunContext) -> list[tuple[Kind, str, str]]:
    """Mend the findings of the doctor; return kind, name and result."""
    return [
        (finding.kind, finding.name, finding.mend().done)
        for finding in examined(context)
        if finding.mend is not None
    ]


def everything(folder: Path, url: str) -> dict[str, Any]:
    """Return all rows of the database and all files of the folder."""
    state: dict[str, Any] = {}
    with psycopg.connect(url) as connection:
        names = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1"
        ).fetchall()
        for (name,) in names:
            if name not in NOT_COMPARED:
                state[name] = sorted(
                    map(repr, connection.execute(f"SELECT {name}::text FROM {name}").fetchall())
                )
    for path in sorted(folder.rglob("*")):
        state[str(path)] = (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "a folder"
        )
    return state


_DEADLY = ((os, "unlink"), (shutil, "rmtree"), (Leases, "end"), (Staging, "release"),
           (StrayRows, "drop"), (Leases, "hold"))  # fmt: skip


def _count_and_die(owner: object, name: str, moments: list[int], fatal: int) -> None:
    original = getattr(owner, name)

    def counted(*arguments: Any, **named: Any) -> Any:
        for done in (False, True):
            moments[0] += 1
            if moments[0] == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            if not done:
                result = original(*arguments, **named)
        return result

    setattr(owner, name, counted)


def _doctor(folder: str, url: str, fatal: int) -> None:
    moments = [0]
    for owner, name in _DEADLY:
        _count_and_die(owner, name, moments, fatal)
    context = a_run_context(Path(folder), MemorySource({}), Ledger(Database(url)), run="doctor")
    for finding in examined(context):
        with contextlib.suppress(HeldByOther):  # as `caf doctor` does
            if finding.mend is not None:
                finding.mend()


def doctor_process(folder: Path, url: str, *, fatal: int = 0) -> Any:
    """Start a doctor in a process that kills itself at its `fatal`-th moment; 0 is never."""
    process = _PROCESSES.Process(target=_doctor, args=(str(folder), url, fatal))
    process.start()
    return process


def main() -> None:
    _, url, name, seconds = sys.argv[1:]
    with Ledger(Database(url), lease_seconds=float(seconds)).leases.hold(
        name, this_process("run-child")
    ) as lease:
        print("held", flush=True)
        for _ in sys.stdin:
            try:
                lease.check()
                print("kept", flush=True)
            except LeaseLost:
                print("lost", flush=True)


if __name__ == "__main__":
    main()
