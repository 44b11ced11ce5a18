"""Which chunks are launched now, which wait, and which are given up.

The ledger says which chunks have work to do; Dagster's runs and backfills say which are being worked on or waited for.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dagster import AssetCheckKey, AssetKey, DagsterInstance, DagsterRunStatus, RunRecord, RunsFilter

from caf_pipeline.chunk_state import UNDER_WAY, ChunkState
from caf_pipeline.defs.dagster_private import AssetCheckExecutionRecordStatus, BulkActionStatus, PartitionBackfill
from caf_pipeline.defs.naming import ASSETS, OLD_PARKED_TAG, PARKED_TAG, PARTITION_TAG, SOURCE_IS_COMPLETE, asset_key
from caf_pipeline.ledger.postgres import Ledger
from caf_pipeline.ledger.records import Chunk
from caf_pipeline.settings import ChunkRunSettings

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
"""After a failed run the next waits a minute, then two, four … an hour: an outage must not use up a chunk's attempts."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a look at the ledger comes to.

    Attributes:
        launch: chunks to be launched, in flow order of their plans.
        give_up: chunks to be parked, each with its last failed run.
        active: chunks with a run that is queued or started.
        waiting: chunks that wait for a backfill or for their back-off.
    """

    launch: Sequence[str]
    give_up: Sequence[tuple[str, RunRecord]]
    active: int
    waiting: int

    @property
    def waits(self) -> bool:
        """Whether any chunk has work that is going on or still to come."""
        return bool(self.launch or self.active or self.waiting)


def chunks_with_work(ledger: Ledger, source: str) -> list[Chunk]:
    """Return a source's chunks under way; and those whose run died after their last move, before it gave staging back."""
    left = [one.chunk for one in ledger.reservations() if one.state in (ChunkState.LOCATED, ChunkState.EMPTY)]
    unreleased = [chunk for chunk in map(ledger.chunk, left) if chunk.source == source]
    return [*ledger.chunks(source, UNDER_WAY), *unreleased]


def choose_chunks(instance: DagsterInstance, ledger: Ledger, source: str, settings: ChunkRunSettings) -> Choice:
    """Choose among a source's chunks that have work, so that at most `settings.max_in_flight` are going at once."""
    under_way = chunks_with_work(ledger, source)
    active = active_partitions(instance)
    planned_elsewhere = backfilled_partitions(instance, source)
    going = sum(chunk.name in active for chunk in under_way)
    launch: list[str] = []
    give_up: list[tuple[str, RunRecord]] = []
    waiting = 0
    for chunk in under_way:
        if chunk.name in active:
            continue
        if chunk.name in planned_elsewhere:
            waiting += 1
            continue
        if going + len(launch) >= settings.max_in_flight:
            break
        failed = failed_runs(instance, chunk.name, settings.attempts)
        if chunk.state in UNDER_WAY and failed and max(chunk.attempts, len(failed)) >= settings.attempts:
            give_up.append((chunk.name, failed[0]))
        elif _due_at(failed) > time.time():
            waiting += 1
        else:
            launch.append(chunk.name)
    return Choice(launch, give_up, going, waiting)


def _due_at(failed: Sequence[RunRecord]) -> float:
    """Return when a chunk with these failed runs may be launched again, in seconds since the epoch; 0 where there are none."""
    if not failed:
        return 0.0
    wait: int = min(FIRST_WAIT_SECONDS << (len(failed) - 1), LONGEST_WAIT_SECONDS)
    return (failed[0].end_time or 0.0) + wait


def active_partitions(instance: DagsterInstance) -> set[str]:
    """Return the partitions of all runs that are queued or started, however they were launched."""
    runs = instance.get_runs(RunsFilter(statuses=UNFINISHED))
    return {run.tags[PARTITION_TAG] for run in runs if PARTITION_TAG in run.tags}


def backfilled_partitions(instance: DagsterInstance, source: str) -> set[str]:
    """Return the source's partitions that an unfinished backfill has or will have runs for."""
    requested = instance.get_backfills(status=BulkActionStatus.REQUESTED)
    return {name for backfill in requested for name in _targets(backfill, source)}


def _targets(backfill: PartitionBackfill, source: str) -> set[str]:
    if backfill.partition_names is not None:
        return set(backfill.partition_names)
    if backfill.asset_backfill_data is None:
        return set()
    keys: set[str] = set()
    for name in ASSETS[2:]:
        subset = backfill.asset_backfill_data.get_target_partitions_subset(AssetKey(asset_key(source, name)))
        keys |= set(subset.get_partition_keys())
    return keys


def audit_is_due(instance: DagsterInstance, ledger: Ledger, source: str) -> bool:
    """Tell whether a chunk was located after the check `source_is_complete` last began, which had not passed."""
    key = AssetCheckKey(AssetKey(asset_key(source, "s3_inventory")), SOURCE_IS_COMPLETE)
    last = instance.event_log_storage.get_latest_asset_check_execution_by_key([key]).get(key)
    if last is None or last.status is AssetCheckExecutionRecordStatus.SUCCEEDED:
        return False
    located = (chunk.located_at for chunk in ledger.chunks(source, [ChunkState.LOCATED]) if chunk.located_at)
    return any(at.timestamp() > last.create_timestamp for at in located)


def failed_runs(instance: DagsterInstance, chunk: str, limit: int) -> list[RunRecord]:
    """Return the failed runs of a chunk since it last succeeded or was parked, at most `limit`, latest first."""
    finished = RunsFilter(
        tags={PARTITION_TAG: chunk}, statuses=[DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]
    )
    failed: list[RunRecord] = []
    for record in instance.get_run_records(finished, limit=limit):
        run = record.dagster_run
        parked = run.tags.get(PARKED_TAG) == run.run_id or OLD_PARKED_TAG in run.tags
        if run.status is DagsterRunStatus.SUCCESS or parked:
            break
        if run.status is DagsterRunStatus.FAILURE:
            failed.append(record)
    return failed
