"""Pruning keeps Dagster's storage small.

It removes events and captured output of old runs of our sources.

It is off unless `runs.keep_events_days` is set, and leaves runs of other projects in the same
Dagster instance alone. A chunk's run leaves some forty events; of 100,000 chunks that is gigabytes,
which the UI reads through. What a run is and how it ended, partitions, materializations, checks,
and the failures of steps stay for ever: pages and sensors are made of them. Dagster purges ticks
(`retention` in dagster.yaml), not events. Its UI deletes whole runs, with their materializations.
Source: `SqlEventLogStorageTable` and `SqliteEventLogStorage` of Dagster 1.13.27.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from dagster import DagsterEventType, DagsterInstance, RunsFilter
from sqlalchemy import bindparam, text

from caf_pipeline.automation.launching import ENDED
from caf_pipeline.defs.naming import SOURCE_TAG

CURSOR: Final = "caf/events_pruned_until/{source}"
"""The cursor in Dagster's storage with the time up to which a source's runs were pruned, in ISO
8601.
"""

PRUNED: Final = (
    DagsterEventType.STEP_OUTPUT,
    DagsterEventType.STEP_INPUT,
    DagsterEventType.STEP_START,
    DagsterEventType.STEP_SUCCESS,
    DagsterEventType.STEP_SKIPPED,
    DagsterEventType.STEP_WORKER_STARTING,
    DagsterEventType.STEP_WORKER_STARTED,
    DagsterEventType.STEP_UP_FOR_RETRY,
    DagsterEventType.STEP_RESTARTED,
    DagsterEventType.RESOURCE_INIT_STARTED,
    DagsterEventType.RESOURCE_INIT_SUCCESS,
    DagsterEventType.LOADED_INPUT,
    DagsterEventType.HANDLED_OUTPUT,
    DagsterEventType.ENGINE_EVENT,
    DagsterEventType.LOGS_CAPTURED,
)
"""And lines of the log, which have no type.

What Dagster adds in later versions is kept until it is named here.
"""

_RUNS_AT_ONCE: Final = 500
_TYPES: Final = [each.value for each in PRUNED]
_DELETE: Final = text(
    "DELETE FROM event_logs WHERE run_id IN :runs AND (dagster_event_type IN :types OR "
    "dagster_event_type IS NULL)"
).bindparams(bindparam("runs", expanding=True), bindparam("types", _TYPES, expanding=True))
_DELETE_IN_FILE: Final = (
    "DELETE FROM event_logs WHERE dagster_event_type IN "
    f"({','.join('?' * len(_TYPES))}) OR dagster_event_type IS NULL"
)
_BUSY_SECONDS: Final = 10


def prune(instance: DagsterInstance, until: datetime, sources: Sequence[str]) -> tuple[int, int]:
    """Remove events and captured output of runs of these sources that ended before `until`.

    Returns how many runs were looked at, and how many events removed. Runs that were pruned before
    are not looked at again. It may be ended at any moment, and begun again.
    """
    pruned = [_prune_source(instance, until, source) for source in sources]
    return sum(runs for runs, _ in pruned), sum(events for _, events in pruned)


def _prune_source(instance: DagsterInstance, until: datetime, source: str) -> tuple[int, int]:
    cursor = CURSOR.format(source=source)
    written = instance.daemon_cursor_storage.get_cursor_values({cursor}).get(cursor)
    pruned_until = datetime.fromisoformat(written) if written else None
    if pruned_until and pruned_until > max(
        until, datetime.now(UTC)
    ):  # written while the clock was wrong: begin again
        pruned_until = None
    after = (
        pruned_until - timedelta(seconds=1) if pruned_until else None
    )  # a run of that very moment is looked at twice
    runs = events = 0
    for ids in _ended(instance, source, after, until):
        runs += len(ids)
        events += _delete(instance, ids)
        for run in ids:  # what led to these files is among the events
            instance.compute_log_manager.delete_logs(prefix=[run, "compute_logs"])
    if pruned_until is None or pruned_until < until:
        instance.daemon_cursor_storage.set_cursor_values({cursor: until.isoformat()})
    return runs, events


def _ended(
    instance: DagsterInstance, source: str, after: datetime | None, until: datetime
) -> Iterator[list[str]]:
    """Yield the ids of a source's runs that ended, or were changed last, between two times.

    Every run of the source has its name as a tag: from the run's job, or from its first step if the
    UI began the run.
    """
    ended = RunsFilter(
        statuses=ENDED, tags={SOURCE_TAG: source}, updated_after=after, updated_before=until
    )
    cursor = None
    while ids := instance.get_run_ids(ended, limit=_RUNS_AT_ONCE, cursor=cursor):
        yield list(ids)
        cursor = ids[-1]


def _delete(instance: DagsterInstance, runs: list[str]) -> int:
    storage: Any = instance.event_log_storage
    if hasattr(
        storage, "path_for_shard"
    ):  # SQLite: a file for each run; materializations, checks and states are in another, too
        return sum(_delete_in(Path(storage.path_for_shard(run))) for run in runs)
    with storage.index_connection() as connection:
        return int(connection.execute(_DELETE, {"runs": runs}).rowcount)


def _delete_in(path: Path) -> int:
    if not path.exists():
        return 0
    with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)) as file:
        removed = file.execute(_DELETE_IN_FILE, _TYPES).rowcount
        if removed:
            file.execute("VACUUM")  # else the file keeps its size
            file.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # and so does its log
        return removed
