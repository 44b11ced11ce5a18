"""The doctor, the state before and after it, and processes that it meets."""

import contextlib
import functools
import hashlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psycopg

from caf_pipeline.errors import HeldByOther, LeaseLost
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.maintenance.doctor.examine import Settler, examine
from caf_pipeline.maintenance.doctor.findings import Actor, Finding, Kind, UnknownPosts
from caf_pipeline.run_context import RunContext
from caf_pipeline.store.jackal.write import JackalStore
from caf_pipeline.system.processes import is_alive, this_process
from caf_pipeline_tests.support.kills import Fatal, Moments, Process
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import a_run_context

NOT_COMPARED = {"chain_heights", "folder_store", "providers"}
"""Tables with observations of a chain: its height and the speed of its providers."""


# --- processes


class Holder(Process):
    """A process that holds a lease. It has the lease when the constructor returns."""

    def __init__(self, url: str, name: str, seconds: float) -> None:
        self._connection, connection = multiprocessing.Pipe()
        super().__init__(functools.partial(_hold, connection, url, name, seconds))
        connection.close()
        assert self._connection.recv() == "held"

    def keeps_its_lease(self) -> bool:
        """Ask the process whether it still holds its lease."""
        self._connection.send("?")
        return bool(self._connection.recv())


def holding(url: str, name: str, *, seconds: float = 600) -> Holder:
    """Start a process that holds a lease of so many seconds."""
    return Holder(url, name, seconds)


def killed_holding(url: str, name: str) -> None:
    """Kill a process while it holds a lease."""
    holding(url, name).kill()


def _hold(parent: Connection, url: str, name: str, seconds: float, moments: Moments) -> None:
    ledger = Ledger(Database(url), lease_seconds=seconds)
    with ledger.leases.hold(name, this_process("run-child")) as lease:
        parent.send("held")
        while parent.recv():
            try:
                lease.check()
            except LeaseLost:
                parent.send(False)
            else:
                parent.send(True)


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


def _doctor(moments: Moments, folder: Path, url: str) -> None:
    context = a_run_context(folder, MemorySource({}), Ledger(Database(url)), run="doctor")
    for finding in examined(context):
        with contextlib.suppress(HeldByOther):  # as `caf doctor` does
            if finding.mend is not None:
                finding.mend()


def doctor_process(folder: Path, url: str, *, fatal: Fatal | None = None) -> Process:
    """Start a doctor in a process that kills itself at a moment."""
    return Process(functools.partial(_doctor, folder=folder, url=url), fatal=fatal)
