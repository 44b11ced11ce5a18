"""Which chunks are launched now, which wait, and which are given up.

The ledger says which chunks have work to do; Dagster's runs and backfills say which are being
worked on or waited for. A look takes a page of each source's chunks, and of Dagster only what is
known of these, so that it costs the same beside 10^5 others.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from dagster import (
    AssetCheckKey,
    AssetKey,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    RunRecord,
    RunsFilter,
)

from caf_pipeline.chunk_state import UNDER_WAY, ChunkState
from caf_pipeline.defs.naming import (
    ASSETS,
    BACKFILL_TAG,
    HELD_TAG,
    OUTAGE_TAG,
    PARKED_TAG,
    PARTITION_TAG,
    SOURCE_IS_COMPLETE,
    SOURCE_TAG,
    WILL_RETRY_TAG,
    asset_key,
    job_name,
)
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import Chunk, LaunchableChunk
from caf_pipeline.settings import ChunkRunSettings

ENDED: Final = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]
UNFINISHED: Final = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]
"""Statuses of a run that will still work, or does."""

FIRST_WAIT_SECONDS: Final = 60
LONGEST_WAIT_SECONDS: Final = 3_600
"""After a failed run the next waits a minute, then two, four … an hour.

Runs that an outage ended make the pause longer, too.
"""

RETRY_LOST_SECONDS: Final = 60
"""A failed run is retried within seconds: Dagster's event log consumer looks every 5 s
(event_log_consumer.py, 1.13).
"""

UNSUBMITTED_SECONDS: Final = 25 * 3600
"""For a day Dagster's daemon goes on with a tick that was cut off, and submits the runs that it had
created.
"""

PAGE: Final = 100
"""Chunks of one source that a look takes; the next goes on after them where none of them could be
launched.
"""

RUNS_READ: Final = 1_000
"""Of these chunks, the latest that a look reads. A run is about 0.3 ms, and a chunk has few."""


@dataclass(slots=True)
class Choice:
    """What a look at one source comes to.

    Attributes:
        launch: chunks to be launched, the oldest first.
        give_up: chunks to be parked, each with its last failed run.
        active: runs of chunks that are queued or started.
        waiting: chunks that wait for a backfill or for their back-off.
        next_after: the `caf_file_id` after which the next look goes on; 0 for the first.
    """

    launch: list[LaunchableChunk] = field(default_factory=list)
    give_up: list[tuple[LaunchableChunk, RunRecord]] = field(default_factory=list)
    active: int = 0
    waiting: int = 0
    next_after: int = 0


def chunks_with_work(ledger: Ledger, source: str) -> list[Chunk]:
    """Return a source's chunks under way; and those whose run died after their last move, before it
    gave staging back.
    """
    left = [
        one.chunk
        for one in ledger.staging.list()
        if one.state in (ChunkState.LOCATED, ChunkState.EMPTY)
    ]
    unreleased = [chunk for chunk in map(ledger.chunks.get, left) if chunk.source == source]
    return [*ledger.chunks.list(source, UNDER_WAY), *unreleased]


def choose_chunks(
    instance: DagsterInstance,
    source: str,
    page: Sequence[LaunchableChunk],
    backfills: "Backfills",
    settings: ChunkRunSettings,
) -> Choice:
    """Choose among a page of a source's chunks, so that at most `settings.max_in_flight` runs of
    its job go on at once.
    """
    of_backfills = _unfinished_runs(
        instance, source, backfills.of_jobs
    )  # first: what they queue meanwhile makes no room
    choice = Choice(active=max(_unfinished_runs(instance, source) - of_backfills, 0))
    room = settings.max_in_flight - choice.active
    if room <= 0:
        return choice
    runs = runs_of(instance, [chunk.name for chunk in page])
    for chunk in page:
        of_chunk = runs.get(chunk.name, ())
        if chunk.held or any(record.dagster_run.status in UNFINISHED for record in of_chunk):
            continue
        if backfills.having(source, chunk.name, of_chunk):
            choice.waiting += 1
            continue
        if len(choice.launch) >= room:
            return choice
        failed = failed_runs(of_chunk)
        if (
            chunk.state in UNDER_WAY
            and len(attempts := [run for run in failed if not by_outage(run)]) >= settings.attempts
        ):
            choice.give_up.append((chunk, attempts[0]))
        elif waits(failed):
            choice.waiting += 1
        else:
            choice.launch.append(chunk)
    under_way = [chunk for chunk in page if chunk.state in UNDER_WAY]
    if len(under_way) == PAGE and len(choice.launch) < room:
        choice.next_after = under_way[-1].caf_file_id
    return choice


def _unfinished_runs(
    instance: DagsterInstance, source: str, backfills: Sequence[str] | None = None
) -> int:
    """Return how many runs of chunks of a source are unfinished; only those of some backfills,
    where these are given.
    """
    if backfills is not None and not backfills:
        return 0
    tags = {} if backfills is None else {BACKFILL_TAG: backfills}
    return instance.get_runs_count(
        RunsFilter(job_name=job_name(source, "archive"), statuses=UNFINISHED, tags=tags)
    )


def runs_of(instance: DagsterInstance, chunks: Sequence[str]) -> Mapping[str, Sequence[RunRecord]]:
    """Return the latest runs of a page of chunks, `RUNS_READ` at most, by chunk and the latest
    first.
    """
    found: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for record in instance.get_run_records(
        RunsFilter(tags={PARTITION_TAG: list(chunks)}), limit=RUNS_READ
    ):
        found[record.dagster_run.tags[PARTITION_TAG]].append(record)
    return found


def failed_runs(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Return the failed runs of a chunk since it last succeeded or was parked, latest first."""
    failed: list[RunRecord] = []
    for record in records:
        run = record.dagster_run
        parked = run.tags.get(PARKED_TAG) == run.run_id
        succeeded = run.status is DagsterRunStatus.SUCCESS and not run.tags.get(
            HELD_TAG
        )  # which did nothing: another had it
        if succeeded or parked:
            break
        if run.status is DagsterRunStatus.FAILURE:
            failed.append(record)
    return failed


def by_outage(record: RunRecord) -> bool:
    """Tell whether a run failed since a server that all chunks need gave no answer, or since no
    worker was there to begin it.
    """
    return (
        record.start_time is None
        or record.dagster_run.tags.get(OUTAGE_TAG) == record.dagster_run.run_id
    )


def waits(failed: Sequence[RunRecord]) -> bool:
    """Tell whether it is too soon to launch a chunk again that has these failed runs."""
    if not failed:
        return False
    # An end that is hours ahead was written while a clock was wrong; those of two machines may
    # differ a little.
    return (
        -LONGEST_WAIT_SECONDS < time.time() - (failed[0].end_time or 0.0) < _pause_seconds(failed)
    )


def _pause_seconds(failed: Sequence[RunRecord]) -> int:
    return min(FIRST_WAIT_SECONDS << min(len(failed) - 1, 6), LONGEST_WAIT_SECONDS)


class Backfills:
    """Which chunks unfinished backfills have or will have a run of.

    Attributes:
        ids: of all unfinished backfills.
        of_jobs: the ids of those that run a source's job; the others run assets.
    """

    def __init__(self, instance: DagsterInstance) -> None:
        latest = instance.get_backfills(limit=1)
        # Dagster exports the type of a backfill's status nowhere; a backfill has it.
        found = instance.get_backfills(status=type(latest[0].status)("REQUESTED")) if latest else ()
        self.ids = [backfill.backfill_id for backfill in found]
        self.of_jobs = [
            backfill.backfill_id for backfill in found if backfill.partition_names is not None
        ]
        self._named = {
            name: backfill.backfill_id
            for backfill in found
            for name in backfill.partition_names or ()
        }
        self._of_assets = [
            (backfill.backfill_id, data.target_subset.partitions_subsets_by_asset_key)
            for backfill in found
            if backfill.partition_names is None
            and (data := backfill.asset_backfill_data) is not None
        ]

    def having(self, source: str, chunk: str, runs: Sequence[RunRecord]) -> str:
        """Return the id of one that has or will have a run of this chunk, whose latest runs are
        given; "" where there is none.

        A backfill runs no chunk again whose run has ended, however long the rest of it takes.
        """
        keys = [AssetKey(asset_key(source, name)) for name in ASSETS[2:]]
        of_assets = (
            backfill_id
            for backfill_id, wanted in self._of_assets
            if any(chunk in wanted[key] for key in keys if key in wanted)
        )
        backfill_id = self._named.get(chunk) or next(of_assets, "")
        its = [
            record.dagster_run
            for record in runs
            if record.dagster_run.tags.get(BACKFILL_TAG) == backfill_id
        ]
        return "" if its and all(run.status in ENDED for run in its) else backfill_id


def give_up_lost_retries(
    instance: DagsterInstance, backfills: Sequence[str], sources: Collection[str]
) -> None:
    """Let backfills end which wait for retries of runs that Dagster will not launch any more.

    It changes only runs of chunks of these sources: other projects may share the Dagster instance.
    Whether a failed run is retried is asked once, when its failure is consumed. Where Dagster's
    daemon is killed just then, the run is marked and never retried, and its backfill is under way
    for ever. The chunk itself is launched from the ledger.
    """
    for backfill in backfills:
        of_it = {BACKFILL_TAG: backfill}
        if instance.get_runs(RunsFilter(tags=of_it, statuses=UNFINISHED), limit=1):
            # it goes on anyhow; to look at all of its failed runs each time is work for nothing
            continue
        long_ago = datetime.now(UTC) - timedelta(seconds=RETRY_LOST_SECONDS)
        failed = {**of_it, WILL_RETRY_TAG: "true"}
        for run in instance.get_runs(
            RunsFilter(tags=failed, statuses=[DagsterRunStatus.FAILURE], updated_before=long_ago)
        ):
            if run.is_complete_and_waiting_to_retry and _archives(run, sources):
                instance.add_run_tags(run.run_id, {WILL_RETRY_TAG: "false"})


def _archives(run: DagsterRun, sources: Collection[str]) -> bool:
    """Return whether a run archives a chunk of these sources: by their job, or by an asset of a
    chunk.
    """
    assets = {AssetKey(asset_key(source, name)) for source in sources for name in ASSETS[2:]}
    return run.job_name in {
        job_name(source, "archive") for source in sources
    } or not assets.isdisjoint(run.asset_selection or ())


def end_unsubmitted_runs(instance: DagsterInstance, sources: Collection[str]) -> None:
    """Let runs of these sources fail that were created and never submitted, since daemon or
    webserver were killed just then.

    Dagster leaves them as they are, and a source whose plan is such a run would never be planned
    again.
    """
    long_ago = datetime.now(UTC) - timedelta(seconds=UNSUBMITTED_SECONDS)
    lost = RunsFilter(
        statuses=[DagsterRunStatus.NOT_STARTED],
        tags={SOURCE_TAG: list(sources)},
        created_before=long_ago,
    )
    for run in instance.get_runs(lost, limit=PAGE):
        instance.report_run_failed(
            run, message="The run was created and never submitted: what created it was killed."
        )


def audits_due(
    instance: DagsterInstance, sources: Sequence[str], located: Mapping[str, datetime]
) -> list[str]:
    """Return the sources with a chunk located after the check `source_is_complete` last began,
    which had not passed.
    """
    keys = {
        source: AssetCheckKey(AssetKey(asset_key(source, "s3_inventory")), SOURCE_IS_COMPLETE)
        for source in sources
    }
    checks = instance.event_log_storage.get_latest_asset_check_execution_by_key(list(keys.values()))
    due = []
    for source, key in keys.items():
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
