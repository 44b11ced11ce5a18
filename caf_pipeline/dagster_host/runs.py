"""`caf runs`: lists Dagster's runs with the states and waits of their chunks from the ledger."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from json import dumps as dump_json
from typing import Final

from dagster import (
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    RunRecord,
    RunsFilter,
)

from caf_pipeline.automation.dead_runs import process_lives
from caf_pipeline.automation.launching import ENDED, UNFINISHED
from caf_pipeline.dagster_host.home import dagster_home
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.errors import NotLocated, first_line, one_line
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.naming import BACKFILL_TAG, HELD_TAG, PARTITION_TAG, SOURCE_TAG
from caf_pipeline.settings import Settings
from caf_pipeline.system.quantities import show_time, table_lines
from caf_pipeline.wiring import open_ledger

_NO_REASON: Final = "from outside the execution context"
"""Dagster's message (`report_run_failed`, 1.13.27) if a launch failed. An earlier event has why."""

MAX_UNFINISHED: Final = 1_000
PAGE: Final = 200

MAX_READ: Final = 20_000
"""Runs searched for those of a source, in some seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """A run in the output of `caf runs`.

    Attributes:
        status: Dagster's, in lower case.
        since: when the run was created, started or ended, depending on its status.
        result: why it failed, who holds its chunk, or what it waits for.
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
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value or None for name, value in values.items()} | {
            "since": self.since.isoformat()
        }


def runs_command(source: str | None, *, settings: Settings, last: int, json: bool) -> int:
    """Print unfinished and the `last` ended runs; return the exit status."""
    with closing(open_ledger(settings)) as ledger:
        if source is not None and source not in settings.sources:
            recorded = ledger.lookup.sources()
            if source not in recorded:
                raise settings.unknown_source(source, recorded)
        runs: Sequence[ShownRun] = []
        if dagster_home(settings).is_dir():  # listing runs must not create the folder
            with open_instance(settings) as instance:
                runs = find_runs(instance, ledger, source, last)
    if json:
        for run in runs:
            sys.stdout.write(dump_json(run.as_json()) + "\n")
    else:
        _print(runs)
    return 0


def find_runs(
    instance: DagsterInstance, ledger: Ledger, source: str | None, last: int
) -> list[ShownRun]:
    """Return unfinished runs, then the `last` ended ones, latest first."""
    unfinished = {
        record.dagster_run.run_id: record
        for record in read_runs(instance, UNFINISHED, source, MAX_UNFINISHED)
    }
    ended = {
        record.dagster_run.run_id: record for record in read_runs(instance, ENDED, source, last)
    }
    # A run that ends between the two queries is in both results.
    records = [
        *(record for run_id, record in unfinished.items() if run_id not in ended),
        *ended.values(),
    ]
    waits: defaultdict[str, list[str]] = defaultdict(list)
    for item in ledger.progress.live():
        waits[item.holder.run] += [wait.sentence for wait in item.work.waits]
    return [_shown(instance, ledger, record, waits) for record in records]


def read_runs(
    instance: DagsterInstance, statuses: Sequence[DagsterRunStatus], source: str | None, limit: int
) -> Iterator[RunRecord]:
    """Yield the latest runs with these statuses, latest first.

    UI runs lack the tag of the source, so it is compared here.
    """
    cursor, read = None, 0
    while limit and read < MAX_READ:
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
    chunk, chunk_state = run.tags.get(PARTITION_TAG, ""), ""
    if chunk:
        with suppress(NotLocated):
            chunk_state = str(ledger.chunks.get(chunk).state)
    result = ""
    if run.status not in ENDED:
        is_dead = process_lives(run) is False
        result = "; ".join(waits.get(run.run_id, ()))
        result = "its process is dead; the daemon will end it" if is_dead else result
    elif holder := run.tags.get(HELD_TAG):
        result = f"held by run {holder}"
    elif run.status is DagsterRunStatus.FAILURE:
        result = _failure(instance, run.run_id)
    since = record.end_time if run.status in ENDED else record.start_time
    return ShownRun(
        run_id=run.run_id,
        job=run.job_name,
        backfill=run.tags.get(BACKFILL_TAG, ""),
        source=_source_of(run),
        chunk=chunk,
        chunk_state=chunk_state,
        status=run.status.value.lower(),
        since=datetime.fromtimestamp(since, UTC)
        if since
        else record.create_timestamp.astimezone(UTC),
        result=result,
    )


def _failure(instance: DagsterInstance, run_id: str) -> str:
    # The error of the last failed step, otherwise of the launcher, otherwise of the run.
    def last_event(event_type: DagsterEventType) -> DagsterEvent | None:
        records = instance.get_records_for_run(
            run_id, of_type=event_type, limit=1, ascending=False
        ).records
        return records[0].event_log_entry.dagster_event if records else None

    if event := last_event(DagsterEventType.STEP_FAILURE):
        data = event.step_failure_data
        message = data.error.message if data.error else ""
        if data.user_failure_data:
            message = data.user_failure_data.description or ""
        return first_line(Exception(message))
    event = last_event(DagsterEventType.RUN_FAILURE)
    message = event.message or "" if event else ""
    if _NO_REASON in message:
        records = instance.get_records_for_run(
            run_id, of_type=DagsterEventType.ENGINE_EVENT, ascending=False
        ).records
        for engine_event in (record.event_log_entry.dagster_event for record in records):
            if engine_event and (error := engine_event.engine_event_data.error):
                return first_line(Exception(error.message))
    return first_line(Exception(message)) if event else ""


def _print(runs: Sequence[ShownRun]) -> None:
    if not runs:
        print("no runs")
        return
    rows = [
        (
            run.run_id,
            run.chunk or run.job,
            run.chunk_state,
            run.status,
            show_time(run.since),
        )
        for run in runs
    ]
    for line in table_lines(("run", "job or chunk", "ledger", "status", "since"), rows):
        print(line)
    for run in runs:
        if run.result:
            print(f"{run.run_id}: {one_line(run.result)}")
