"""Decides which chunks are launched now, which wait, and which are given up.

The ledger has the chunks with work, Dagster those under way. A tick reads one page per source, so
its cost is constant.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    RunRecord,
    RunsFilter,
)

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.chunk_state import UNDER_WAY, ChunkState
from caf_pipeline.dagster_private import BulkActionStatus
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import LaunchableChunk
from caf_pipeline.naming import (
    ASSETS,
    BACKFILL_TAG,
    LOOK_JOB,
    PARTITION_TAG,
    SOURCE_IS_COMPLETE,
    SOURCE_TAG,
    WILL_RETRY_TAG,
    job_name,
)
from caf_pipeline.records import Chunk
from caf_pipeline.settings import ChunkRunSettings

ENDED: Final = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]
UNFINISHED: Final = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]

FIRST_WAIT_SECONDS: Final = 60
LONGEST_WAIT_SECONDS: Final = 3_600
"""Pause after a failed run: one minute, doubled up to this with each failure, outages included."""

RETRY_LOST_SECONDS: Final = 60
"""Dagster retries a failed run within seconds: its event log consumer (1.13) polls every 5 s."""

UNSUBMITTED_SECONDS: Final = 25 * 3600
"""Dagster's daemon resumes an interrupted tick for a day, and submits the runs it had created."""

PAGE: Final = 100
"""Chunks of a source that a tick reads; the next tick reads the next page."""

RUNS_READ: Final = 1_000
"""Latest runs of these chunks that a tick reads, 0.3 ms each. A chunk has few."""


@dataclass(slots=True)
class ChunkSelection:
    """The decisions about one page of a source's chunks.

    Attributes:
        launch: the oldest first.
        run_keys: of the chunks in `launch`. A chunk's key changes with its latest run, so that two
            decisions at the same time lead to one run. None if its latest run is not known.
        give_up: chunks to park.
        active: queued and started runs.
        waiting: for a backfill or their back-off.
        next_after: the next tick's start (exclusive `caf_file_id`; 0: from the first).
    """

    launch: list[LaunchableChunk] = field(default_factory=list)
    run_keys: dict[str, str | None] = field(default_factory=dict)
    give_up: list[LaunchableChunk] = field(default_factory=list)
    active: int = 0
    waiting: int = 0
    next_after: int = 0


def chunks_with_work(ledger: Ledger, source: str) -> list[Chunk]:
    """Return a source's chunks under way, and finished chunks that still occupy staging.

    The latter's run died before it released staging.
    """
    names = [
        reservation.chunk
        for reservation in ledger.staging.list()
        if reservation.state in (ChunkState.LOCATED, ChunkState.EMPTY)
    ]
    unreleased = [chunk for chunk in map(ledger.chunks.get, names) if chunk.source == source]
    return [*ledger.chunks.list(source, UNDER_WAY), *unreleased]


def select_chunks(
    instance: DagsterInstance,
    source: str,
    page: Sequence[LaunchableChunk],
    backfills: "Backfills",
    settings: ChunkRunSettings,
) -> ChunkSelection:
    """Decide about a page of a source's chunks.

    At most `settings.max_in_flight` runs of the source's job are under way, beside backfills.
    """
    # Count the runs of backfills first: runs that a backfill queues in between must not make room.
    in_backfills = _count_unfinished_runs(instance, source, backfills.of_jobs)
    active = max(_count_unfinished_runs(instance, source) - in_backfills, 0)
    selection = ChunkSelection(active=active)
    room = settings.max_in_flight - active
    if room <= 0:
        return selection
    runs = runs_of(instance, [chunk.name for chunk in page])
    all_read = sum(map(len, runs.values())) < RUNS_READ
    for chunk in page:
        records = runs.get(chunk.name, ())
        if chunk.held or any(record.dagster_run.status in UNFINISHED for record in records):
            continue
        if backfills.covering(source, chunk.name, records):
            selection.waiting += 1
            continue
        if len(selection.launch) >= room:
            return selection
        # A move of the chunk, also that of `caf unpark`, ends the pause.
        recent = [run for run in records if (run.end_time or 0) >= chunk.updated_at.timestamp()]
        failed = [run for run in recent if run.dagster_run.status is DagsterRunStatus.FAILURE]
        if chunk.state in UNDER_WAY and len(chunk.failures) >= settings.attempts:
            selection.give_up.append(chunk)
        elif is_backing_off(failed):
            selection.waiting += 1
        else:
            selection.launch.append(chunk)
            latest = records[0].dagster_run.run_id if records else "no run"
            selection.run_keys[chunk.name] = f"{chunk.name} after {latest}" if all_read else None
    under_way = [chunk for chunk in page if chunk.state in UNDER_WAY]
    if len(under_way) == PAGE and len(selection.launch) < room:
        selection.next_after = under_way[-1].caf_file_id
    return selection


def _count_unfinished_runs(
    instance: DagsterInstance, source: str, backfills: Sequence[str] | None = None
) -> int:
    if backfills is not None and not backfills:
        return 0
    tags = {} if backfills is None else {BACKFILL_TAG: backfills}
    runs = RunsFilter(job_name=job_name(source, "archive"), statuses=UNFINISHED, tags=tags)
    return instance.get_runs_count(runs)


def runs_of(instance: DagsterInstance, chunks: Sequence[str]) -> Mapping[str, Sequence[RunRecord]]:
    """Return the latest runs by chunk, latest first; `RUNS_READ` runs in all."""
    runs: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for record in instance.get_run_records(
        RunsFilter(tags={PARTITION_TAG: list(chunks)}), limit=RUNS_READ
    ):
        runs[record.dagster_run.tags[PARTITION_TAG]].append(record)
    return runs


def is_backing_off(failed: Sequence[RunRecord]) -> bool:
    """Return whether another run is too soon after these, latest first."""
    if not failed:
        return False
    # Clocks of two machines may differ a little. An end that is hours ahead was written by a wrong
    # clock.
    seconds_ago = time.time() - (failed[0].end_time or 0.0)
    pause_seconds = min(FIRST_WAIT_SECONDS << min(len(failed) - 1, 6), LONGEST_WAIT_SECONDS)
    return -LONGEST_WAIT_SECONDS < seconds_ago < pause_seconds


class Backfills:
    """The unfinished backfills, and their chunks; `of_jobs` are of a job, the others of assets."""

    def __init__(self, instance: DagsterInstance, keys: AssetKeys) -> None:
        self._keys = keys
        unfinished = instance.get_backfills(status=BulkActionStatus.REQUESTED)
        self.ids = [backfill.backfill_id for backfill in unfinished]
        self.of_jobs = [
            backfill.backfill_id for backfill in unfinished if backfill.partition_names is not None
        ]
        self._by_partition = {
            name: backfill.backfill_id
            for backfill in unfinished
            for name in backfill.partition_names or ()
        }
        self._of_assets = [
            (backfill.backfill_id, data.target_subset.partitions_subsets_by_asset_key)
            for backfill in unfinished
            if backfill.partition_names is None
            and (data := backfill.asset_backfill_data) is not None
        ]

    def covering(self, source: str, chunk: str, records: Sequence[RunRecord]) -> str:
        """Return the id of a backfill that runs or will run this chunk; "" if there is none.

        A backfill does not run a chunk again if its run in the chunk's latest `records` has ended.
        """
        keys = [self._keys.key(source, name) for name in ASSETS[2:]]
        of_assets = (
            backfill_id
            for backfill_id, subsets in self._of_assets
            if any(chunk in subsets[key] for key in keys if key in subsets)
        )
        backfill_id = self._by_partition.get(chunk) or next(of_assets, "")
        statuses = [
            record.dagster_run.status
            for record in records
            if record.dagster_run.tags.get(BACKFILL_TAG) == backfill_id
        ]
        return "" if statuses and all(status in ENDED for status in statuses) else backfill_id


def give_up_lost_retries(
    instance: DagsterInstance,
    backfills: Sequence[str],
    sources: Collection[str],
    keys: AssetKeys,
) -> None:
    """End backfills that wait for retries which Dagster has lost.

    A daemon killed while it handles a failure leaves the run marked for a retry, and its backfill
    unfinished. Once the mark is gone, the sensor launches the chunk.
    """
    jobs = {job_name(source, "archive") for source in sources}
    assets = {keys.key(source, name) for source in sources for name in ASSETS[2:]}
    long_ago = datetime.now(UTC) - timedelta(seconds=RETRY_LOST_SECONDS)
    for backfill in backfills:
        tags = {BACKFILL_TAG: backfill}
        unfinished = RunsFilter(tags=tags, statuses=UNFINISHED)
        if instance.get_runs(unfinished, limit=1):
            continue  # the backfill is still working, so there is no need to read its failed runs
        lost = RunsFilter(
            tags={**tags, WILL_RETRY_TAG: "true"},
            statuses=[DagsterRunStatus.FAILURE],
            updated_before=long_ago,
        )
        for run in instance.get_runs(lost):
            archives = run.job_name in jobs or not assets.isdisjoint(run.asset_selection or ())
            if run.is_complete_and_waiting_to_retry and archives:
                instance.add_run_tags(run.run_id, {WILL_RETRY_TAG: "false"})


def end_unsubmitted_runs(instance: DagsterInstance, sources: Collection[str]) -> None:
    """Fail runs of these sources, and looks, that were created but never submitted.

    Such a run blocks its source's plans, or all looks.
    """
    long_ago = datetime.now(UTC) - timedelta(seconds=UNSUBMITTED_SECONDS)
    statuses = [DagsterRunStatus.NOT_STARTED]
    tags = {SOURCE_TAG: list(sources)}
    message = "The run was never submitted: the process that created it was killed."
    for lost in (
        RunsFilter(statuses=statuses, tags=tags, created_before=long_ago),
        RunsFilter(statuses=statuses, job_name=LOOK_JOB, created_before=long_ago),
    ):
        for run in instance.get_runs(lost, limit=PAGE):
            instance.report_run_failed(run, message)


def audits_due(
    instance: DagsterInstance,
    sources: Sequence[str],
    located: Mapping[str, datetime],
    keys: AssetKeys,
) -> list[str]:
    """Return the sources with a chunk located since a completeness check that did not pass."""
    check_keys = {
        source: keys.check_key(source, "s3_inventory", SOURCE_IS_COMPLETE) for source in sources
    }
    checks = instance.event_log_storage.get_latest_asset_check_execution_by_key(
        list(check_keys.values())
    )
    due = []
    for source, key in check_keys.items():
        last = checks.get(key)
        failed = last is not None and last.status.value != "SUCCEEDED"
        if (
            last
            and failed
            and source in located
            and located[source].timestamp() > last.create_timestamp
        ):
            due.append(source)
    return due
