"""Removes events and captured output of old runs of our sources from Dagster's storage.

100,000 chunks leave gigabytes of events, which slow the UI down. Runs, partitions,
materializations, checks and step failures stay for pages and sensors. Source:
`SqlEventLogStorageTable` and `SqliteEventLogStorage` of Dagster 1.13.27.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from dagster import DagsterEventType, DagsterInstance, RunsFilter
from sqlalchemy import bindparam, text

from caf_pipeline.automation.launching import ENDED
from caf_pipeline.naming import SOURCE_TAG

CURSOR: Final = "caf/events_pruned_until/{source}"
"""The time (ISO 8601) up to which a source is pruned."""

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
"""Types of removed events, beside log lines, which have none. Later Dagster's new types stay."""

_RUNS_PER_PAGE: Final = 500
_TYPES: Final = [event_type.value for event_type in PRUNED]
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
    """Remove events and output of runs of these sources that ended before `until`.

    Returns the numbers of runs and events. Each call continues after the last one's runs, and may
    be interrupted at any moment.
    """
    runs = events = 0
    for source in sources:
        cursor = CURSOR.format(source=source)
        written = instance.daemon_cursor_storage.get_cursor_values({cursor}).get(cursor)
        pruned_until = datetime.fromisoformat(written) if written else None
        if pruned_until and pruned_until > max(until, datetime.now(UTC)):
            pruned_until = None  # it was written by a wrong clock
        # The overlap makes sure that no run is missed; pruning a run twice does no harm.
        after = pruned_until - timedelta(seconds=1) if pruned_until else None
        ended = RunsFilter(
            statuses=ENDED, tags={SOURCE_TAG: source}, updated_after=after, updated_before=until
        )
        last = None
        while page := instance.get_run_ids(ended, limit=_RUNS_PER_PAGE, cursor=last):
            last = page[-1]
            runs += len(page)
            events += _delete_events(instance, page)
            for run in page:  # the removed events pointed to these files
                instance.compute_log_manager.delete_logs(prefix=[run, "compute_logs"])
        if pruned_until is None or pruned_until < until:
            instance.daemon_cursor_storage.set_cursor_values({cursor: until.isoformat()})
    return runs, events


def _delete_events(instance: DagsterInstance, runs: Sequence[str]) -> int:
    storage: Any = instance.event_log_storage
    if not hasattr(storage, "path_for_shard"):
        with storage.index_connection() as connection:
            return int(connection.execute(_DELETE, {"runs": list(runs)}).rowcount)
    # SQLite has a file for each run. Materializations, checks and states are in another file, too.
    removed = 0
    for path in (Path(storage.path_for_shard(run)) for run in runs):
        if not path.exists():
            continue
        with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)) as file:
            count = file.execute(_DELETE_IN_FILE, _TYPES).rowcount
            if count:  # shrink the file and its write-ahead log
                file.execute("VACUUM")
                file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            removed += count
    return removed
