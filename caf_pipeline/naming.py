"""Names of our definitions in Dagster, and our run tags.

Names begin with `caf_`, since all definitions of a project share one namespace. Asset keys and
groups begin with the source. Dagster allows no `-` in names other than keys and partitions.
"""

from typing import Final, Literal

from caf_pipeline.errors import UsageError
from caf_pipeline.inventory.chunk_id import ChunkId

LOCATION_NAME: Final = "caf-pipeline"
"""Must equal workspace.yaml's. Dagster lists a job's runs only while it stays the same."""

REPOSITORY_NAME: Final = "__repository__"

PARTITION_TAG: Final = "dagster/partition"
BACKFILL_TAG: Final = "dagster/backfill"
SENSOR_TAG: Final = "dagster/sensor_name"
RUN_KEY_TAG: Final = "dagster/run_key"
DATA_VERSION_TAG: Final = "dagster/data_version"
PRIORITY_TAG: Final = "dagster/priority"
BEFORE_BACKFILLS: Final = {PRIORITY_TAG: "1"}
"""Priority over the up to 100,000 runs of a backfill, which have 0."""
MAX_RETRIES_TAG: Final = "dagster/max_retries"
RETRY_STRATEGY_TAG: Final = "dagster/retry_strategy"
ALL_STEPS: Final = "ALL_STEPS"
"""A retry repeats all steps, since staging may be lost with its machine."""
WILL_RETRY_TAG: Final = "dagster/will_retry"
"""Value "true" on a failed run that Dagster will retry."""

SOURCE_TAG: Final = "caf/source"
HELD_TAG: Final = "caf/held_by"
REPORT_TAG: Final = "caf/report"
COMMAND_TAG: Final = "caf/command"
COMMAND: Final = "caf run"

PROCESS_TAG: Final = ".dagster/caf/process"
OUTAGE_TAG: Final = ".dagster/caf/outage"
"""The UI hides tags that begin with `.dagster/`."""

LAUNCH_SENSOR: Final = "caf_launch_chunks"
"""Must not change: Dagster stores the cursor and the on/off state under this name."""

S3_POOL: Final = "caf_s3"
UPLOAD_POOL: Final = "caf_jackal_uploads"

ASSETS: Final = ("s3_inventory", "chunk_plan", "caf_chunk", "stored_chunk", "file_locations")
"""In flow order; the last three have partitions."""

PACK: Final = "caf_pack_chunk"

LEDGER: Final = "caf_ledger"
STORE: Final = "caf_store"
RUN: Final = "caf_run"

JobKind = Literal["plan", "archive", "audit", "prove", "repair", "repair_chunk", "storage_plan"]

ALERT_SENSOR: Final = "caf_watch_sources"
DEAD_RUNS_SENSOR: Final = "caf_end_dead_runs"

LOOK_JOB: Final = "caf_look"
PRUNE_JOB: Final = "caf_prune_events"
RESTORE_JOB: Final = "caf_restore"

CHECKED_ASSET: Final = "chunk_plan"
"""Shows its source's conditions as checks, without partitions."""

CHUNK_ACCOUNTS: Final = "caf_chunk_accounts_for_plan"
CHUNK_IS_PROVEN: Final = "caf_chunk_is_proven"
CHUNK_READS_BACK: Final = "caf_chunk_reads_back"
SOURCE_IS_COMPLETE: Final = "caf_source_is_complete"
STORAGE_PLAN_LASTS: Final = "caf_storage_plan_lasts"
PLAN_ACCOUNTS: Final = "caf_plan_accounts_for_inventory"
NO_CHUNK_IS_DAMAGED: Final = "caf_no_chunk_is_damaged"
NO_CHUNK_IS_PARKED: Final = "caf_no_chunk_is_parked"
SOURCE_KEEPS_UP: Final = "caf_source_keeps_up"
FEW_OBJECTS_ARE_SKIPPED: Final = "caf_few_objects_are_skipped"


def identifier(source: str) -> str:
    """Return the source's name as a Dagster identifier."""
    return source.replace("-", "_")


def asset_key(source: str, name: str) -> list[str]:
    """Return the key of a source's asset."""
    return [source, name]


def s3_key(source: str) -> str:
    """Return the source's S3 resource key."""
    return f"caf_s3_{identifier(source)}"


def partitions_name(source: str) -> str:
    """Name the source's dynamic partitions."""
    return f"caf_{source}_chunks"


def source_of(chunk: str) -> str:
    """Return a chunk's source. Raises a UsageError for an invalid id."""
    chunk_id = ChunkId.parse(chunk)
    if chunk_id is None:
        raise UsageError(
            f"partition '{chunk}' is not the id of a chunk",
            hint="`caf doctor` removes a partition that no plan made",
        )
    return chunk_id.source


def job_name(source: str, what: JobKind) -> str:
    """Name a job."""
    return f"caf_{what}_{identifier(source)}"


def new_objects_name(source: str) -> str:
    """Name the sensor for new objects."""
    return f"caf_new_objects_{identifier(source)}"


def reconcile_name(source: str) -> str:
    """Name the schedule of whole plans."""
    return f"caf_reconcile_{identifier(source)}_daily"


def op_name(source: str, what: str) -> str:
    """Name an op and its config; an asset's or check's op has that name."""
    return f"caf_{identifier(source)}__{what}"
