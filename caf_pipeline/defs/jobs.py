"""Jobs: the assets and checks that run together."""

from collections.abc import Sequence
from typing import Any

from dagster import AssetSelection, define_asset_job, in_process_executor

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.naming import (
    ALL_STEPS,
    ASSETS,
    BEFORE_BACKFILLS,
    CHUNK_ACCOUNTS,
    CHUNK_READS_BACK,
    PLAN_ACCOUNTS,
    RETRY_STRATEGY_TAG,
    SOURCE_IS_COMPLETE,
    SOURCE_TAG,
    STORAGE_PLAN_LASTS,
    JobKind,
    job_name,
)


def source_jobs(source: str, keys: AssetKeys, *, has_wallet: bool) -> list[Any]:
    """Return the jobs of one source."""

    def job(what: JobKind, selection: AssetSelection, description: str) -> Any:  # noqa: ANN401 - Dagster exports no type for it
        # The default executor starts a process for each op, which adds fifty seconds to a chunk.
        # Runs of a backfill come last. The sensor adds these tags to the chunks that it launches.
        tags = {SOURCE_TAG: source, RETRY_STRATEGY_TAG: ALL_STEPS}
        if what != "archive":
            tags |= BEFORE_BACKFILLS
        return define_asset_job(
            job_name(source, what),
            selection=selection,
            tags=tags,
            description=description,
            executor_def=in_process_executor,
        )

    def assets(names: Sequence[str]) -> AssetSelection:
        return AssetSelection.assets(*(keys.key(source, name) for name in names)).without_checks()

    def check(asset: str, name: str) -> AssetSelection:
        return AssetSelection.checks(keys.check_key(source, asset, name))

    accounts = check("chunk_plan", PLAN_ACCOUNTS)
    complete = check("s3_inventory", SOURCE_IS_COMPLETE)
    jobs = [
        job(
            "plan",
            assets(ASSETS[:2]) | accounts | complete,
            "Take an inventory, plan the objects that are not archived yet, and check whether the "
            "source is complete. Each new chunk becomes a partition. Runs daily, and when the "
            "sensor sees new objects.",
        ),
        job(
            "archive",
            assets(ASSETS[2:])
            | check("caf_chunk", CHUNK_ACCOUNTS)
            | check("file_locations", CHUNK_READS_BACK),
            "Archive one chunk (a partition): pack, store, verify, locate. Can be run again at any "
            "time: it resumes.",
        ),
        job(
            "audit",
            complete,
            "Check whether every object of the latest whole inventory is located. Runs after the "
            "last chunk of a plan.",
        ),
    ]
    if has_wallet:
        lasts = check("chunk_plan", STORAGE_PLAN_LASTS)
        jobs.append(job("storage_plan", lasts, "Check how long the bought space lasts."))
    return jobs
