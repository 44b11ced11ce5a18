"""`caf runs`: runs as Dagster's storage has them, with what the ledger knows of their chunks and
waits.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from json import dumps as dump_json
from typing import Final

from dagster import (
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    RunRecord,
    RunsFilter,
)
from rich.console import Console
from rich.table import Table

from caf_pipeline.automation.dead_runs import process_lives
from caf_pipeline.automation.launching import ENDED, UNFINISHED
from caf_pipeline.dagster_host.home import dagster_home
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.defs.naming import BACKFILL_TAG, HELD_TAG, PARTITION_TAG, SOURCE_TAG
from caf_pipeline.errors import NotLocated, first_line, one_line
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.run_wiring import open_ledger
from caf_pipeline.settings import Settings

_NO_REASON: Final = "from outside the execution context"
"""What Dagster says of a run that could not be launched (`report_run_failed` of 1.13.27); an event
before it has the reason.
"""

MOST_GOING_ON: Final = 1_000
PAGE: Final = 200
"""Runs that are read at once."""

MOST_READ: Final = 20_000
"""Runs that are looked through for those of a source: some seconds of Dagster's storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """A run as it is shown.

    Attributes:
        source, chunk: "" where it has none.
        chunk_state: as the ledger has it; "" where the ledger has no such chunk.
        status: Dagster's word.
        since: when it was asked for, began, or ended, by its status.
        result: how it ended, or what it waits for; "" where there is nothing to say.
    """

    run_id: str
    job: str
    backfill: str
    source: str
    chunk: str
    chunk_state: str
    status: str
    since: datetime
    result: str

    def as_json(self) -> dict[str, object]:
        """Return it as a program reads it."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value or None for name, value in values.items()} | {
            "since": self.since.isoformat()
        }


def runs_command(source: str | None, *, settings: Settings, last: int, json: bool) -> int:
    """Print the runs of a source, or all, that go on, and the `last` that ended; return the exit
    status.

    Raises:
        SettingsError: there is no such source.
    """
    with closing(open_ledger(settings)) as ledger:
        if (
            source is not None
            and source not in settings.sources
            and source not in (known := ledger.lookup.sources())
        ):
            raise settings.unknown_source(source, known)
        found: Sequence[ShownRun] = []
        if dagster_home(
            settings
        ).is_dir():  # else no Dagster ever ran here, and a look makes nothing
            with open_instance(settings) as instance:
                found = find_runs(instance, ledger, source, last)
    if json:
        for run in found:
            sys.stdout.write(dump_json(run.as_json()) + "\n")
    else:
        _print(found)
    return 0


def find_runs(
    instance: DagsterInstance, ledger: Ledger, source: str | None, last: int
) -> list[ShownRun]:
    """Return the runs that go on, then the `last` that ended, each the latest first."""
    going_on = {
        record.dagster_run.run_id: record
        for record in _of(instance, UNFINISHED, source, MOST_GOING_ON)
    }
    ended = {record.dagster_run.run_id: record for record in _of(instance, ENDED, source, last)}
    # A run may end between the two questions: it ended.
    records = [
        *(record for run_id, record in going_on.items() if run_id not in ended),
        *ended.values(),
    ]
    waits: defaultdict[str, list[str]] = defaultdict(list)
    for one in ledger.waits.list():
        waits[one.run].append(one.wait.sentence)
    return [_shown(instance, ledger, record, waits) for record in records]


def _of(
    instance: DagsterInstance, statuses: Sequence[DagsterRunStatus], source: str | None, limit: int
) -> Iterator[RunRecord]:
    """Yield runs of these statuses, the latest first.

    The source is no filter of Dagster's: runs of the UI lack its tag.
    """
    cursor, read = None, 0
    while limit and read < MOST_READ:
        page = instance.get_run_records(RunsFilter(statuses=statuses), limit=PAGE, cursor=cursor)
        for record in page:
            if source in (None, _source_of(record.dagster_run)):
                yield record
                limit -= 1
                if not limit:
                    return
        if len(page) < PAGE:
            return
        read, cursor = read + len(page), page[-1].dagster_run.run_id


def _source_of(run: DagsterRun) -> str:
    chunk = ChunkId.parse(run.tags.get(PARTITION_TAG, ""))
    return chunk.source if chunk else run.tags.get(SOURCE_TAG, "")


def _shown(
    instance: DagsterInstance, ledger: Ledger, record: RunRecord, waits: Mapping[str, Sequence[str]]
) -> ShownRun:
    run = record.dagster_run
    chunk = run.tags.get(PARTITION_TAG, "")
    since = record.end_time if run.status in ENDED else record.start_time
    return ShownRun(
        run_id=run.run_id,
        job=run.job_name,
        backfill=run.tags.get(BACKFILL_TAG, ""),
        source=_source_of(run),
        chunk=chunk,
        chunk_state=_state_of(ledger, chunk) if chunk else "",
        status=run.status.value.lower(),
        since=datetime.fromtimestamp(since, UTC)
        if since
        else record.create_timestamp.astimezone(UTC),
        result=_result(instance, run, waits.get(run.run_id, ())),
    )


def _state_of(ledger: Ledger, chunk: str) -> str:
    try:
        return str(ledger.chunks.get(chunk).state)
    except NotLocated:
        return ""


def _result(instance: DagsterInstance, run: DagsterRun, waits: Sequence[str]) -> str:
    if run.status not in ENDED:
        return (
            "; ".join(waits)
            if process_lives(run) is not False
            else "its process is dead; the daemon ends it"
        )
    if holder := run.tags.get(HELD_TAG):
        return f"held by run {holder}"
    return _failure(instance, run.run_id) if run.status is DagsterRunStatus.FAILURE else ""


def _failure(instance: DagsterInstance, run_id: str) -> str:
    """Return why a run failed: what its last failed step says, else what Dagster says of the
    run.
    """
    for kind in (DagsterEventType.STEP_FAILURE, DagsterEventType.RUN_FAILURE):
        found = instance.get_records_for_run(run_id, of_type=kind, limit=1, ascending=False).records
        event = found[0].event_log_entry.dagster_event if found else None
        if event is None:
            continue
        if event.is_step_failure:
            data = event.step_failure_data
            said = (
                data.user_failure_data.description
                if data.user_failure_data
                else data.error.message
                if data.error
                else ""
            )
            return first_line(Exception(said or ""))
        said = event.message or ""
        return (_launch_error(instance, run_id) if _NO_REASON in said else "") or first_line(
            Exception(said)
        )
    return ""


def _launch_error(instance: DagsterInstance, run_id: str) -> str:
    """Return the last error of what was to launch a run; "" where it told none, or its events were
    pruned.
    """
    found = instance.get_records_for_run(
        run_id, of_type=DagsterEventType.ENGINE_EVENT, ascending=False
    ).records
    events = [record.event_log_entry.dagster_event for record in found]
    errors = (event.engine_event_data.error for event in events if event)
    return next((first_line(Exception(error.message)) for error in errors if error), "")


def _print(found: Sequence[ShownRun]) -> None:
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if not found:
        console.print("no runs")
        return
    rows = [
        (
            run.run_id,
            run.chunk or run.job,
            run.chunk_state,
            run.status,
            f"{run.since:%Y-%m-%d %H:%M:%S} UTC",
        )
        for run in found
    ]
    table = Table(box=None, pad_edge=False)
    for column, cells in zip(
        ("run", "job or chunk", "ledger", "status", "since"), zip(*rows, strict=True), strict=True
    ):
        # Whole, however wide the terminal is: ids and states are copied, and read by other
        # programs.
        table.add_column(column, no_wrap=True, min_width=max(map(len, cells)))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for run in found:
        if run.result:
            console.print(f"{run.run_id}: {one_line(run.result)}")
