"""What the things of a source are called in Dagster, and the run tags that are ours.

Dagster allows letters, digits and `_` in the names of groups, jobs, ops, sensors and schedules, so
a source's `-` becomes `_` in them; keys of assets and names of partitions keep the source's name.
Source: "Flow" in docs/explanation/design.md.
"""

from typing import Final, Literal

from caf_pipeline.errors import UsageError
from caf_pipeline.inventory.chunk_id import ChunkId

LOCATION_NAME: Final = "caf-pipeline"
"""The code location's name.

Fixed, as in workspace.yaml: runs carry it, and are under their job only while it is the same.
"""

REPOSITORY_NAME: Final = "__repository__"
"""What Dagster calls the definitions of a code location that names none."""

PARTITION_TAG: Final = "dagster/partition"
BACKFILL_TAG: Final = "dagster/backfill"
PRIORITY_TAG: Final = "dagster/priority"
BEFORE_BACKFILLS: Final = {PRIORITY_TAG: "1"}
"""Tags of runs that no backfill begins.

Dagster's queue takes the greatest priority first, and a backfill of the UI, which may queue 100,000
runs, has 0.
"""
MAX_RETRIES_TAG: Final = "dagster/max_retries"
RETRY_STRATEGY_TAG: Final = "dagster/retry_strategy"
WILL_RETRY_TAG: Final = "dagster/will_retry"
"""Set to "true" on a failed run that Dagster means to retry."""

SOURCE_TAG: Final = "caf/source"
HELD_TAG: Final = "caf/held_by"
REPORT_TAG: Final = "caf/report"
COMMAND_TAG: Final = "caf/command"
COMMAND: Final = "caf run"

PROCESS_TAG: Final = ".dagster/caf/process"
PARKED_TAG: Final = ".dagster/caf/parked"
OUTAGE_TAG: Final = ".dagster/caf/outage"
"""Only machines read these. The UI shows no tag that begins with `.dagster/`."""

LAUNCH_SENSOR: Final = "launch_chunks"
"""Launches the chunks of every source.

Renamed, it would lose its cursor, and whether an operator has switched it off.
"""

S3_POOL: Final = "s3"
UPLOAD_POOL: Final = "jackal_uploads"

ASSETS: Final = ("s3_inventory", "chunk_plan", "caf_chunk", "stored_chunk", "file_locations")
"""A source's assets in flow order; the last three have a partition for each chunk."""

LEDGER: Final = "ledger"
STORE: Final = "store"
RUN: Final = "run"
"""Keys of the resources that every step asks for; `s3_key` is that of a source."""

JobKind = Literal["plan", "archive", "audit", "prove", "repair", "repair_chunk", "storage_plan"]

ALERT_SENSOR: Final = "watch_sources"

PRUNE_JOB: Final = "prune_events"

CHECKED_ASSET: Final = "chunk_plan"
"""The asset whose checks the conditions are: it has no partitions."""

CHUNK_IS_PROVEN: Final = "chunk_is_proven"
SOURCE_IS_COMPLETE: Final = "source_is_complete"
STORAGE_PLAN_LASTS: Final = "storage_plan_lasts"
PLAN_ACCOUNTS: Final = "plan_accounts_for_inventory"
NO_CHUNK_IS_DAMAGED: Final = "no_chunk_is_damaged"
NO_CHUNK_IS_PARKED: Final = "no_chunk_is_parked"
SOURCE_KEEPS_UP: Final = "source_keeps_up"
FEW_OBJECTS_ARE_SKIPPED: Final = "few_objects_are_skipped"


def identifier(source: str) -> str:
    """Return the source's name as Dagster's identifiers can hold it."""
    return source.replace("-", "_")


def asset_key(source: str, name: str) -> list[str]:
    """Return the key of one of the source's assets."""
    return [source, name]


def s3_key(source: str) -> str:
    """Return the key of the resource that reads the source's bucket."""
    return f"s3_{identifier(source)}"


def partitions_name(source: str) -> str:
    """Return the name of the dynamic partitions of a source: one for each chunk."""
    return f"{source}_chunks"


def source_of(chunk: str) -> str:
    """Return the source of a chunk's id; raise UsageError where it is none."""
    chunk_id = ChunkId.parse(chunk)
    if chunk_id is None:
        raise UsageError(
            f"partition '{chunk}' is not the id of a chunk",
            hint="`caf doctor` removes a partition that no plan made",
        )
    return chunk_id.source


def job_name(source: str, what: JobKind) -> str:
    """Return the name of one of the source's jobs; `jobs` and `maintenance_jobs` say what each
    does.
    """
    return f"{what}_{identifier(source)}"


def new_objects_name(source: str) -> str:
    """Return the name of the sensor that looks for new objects of the source."""
    return f"new_objects_{identifier(source)}"


def reconcile_name(source: str) -> str:
    """Return the name of the schedule that plans a whole inventory of the source."""
    return f"reconcile_{identifier(source)}_daily"


def op_name(source: str, what: str) -> str:
    """Return the name of one of the source's ops, the key of its config.

    The op behind an asset is named after the asset.
    """
    return f"{identifier(source)}__{what}"
