"""All names that this project uses from Dagster's private API.

A missing name is an error when this module is loaded. A test fails if Dagster's version differs
from `READ_IN`. Then check each name in Dagster's source, prefer a public one, and set `READ_IN`.
"""

import re
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import dagster
from dagster import DagsterInstance

from caf_pipeline.errors import SettingsError, first_line

if TYPE_CHECKING:
    from dagster._core.storage.base_storage import DagsterStorage
    from dagster._core.storage.sqlite_storage import DagsterSqliteStorage


def _unsupported(reason: str) -> SettingsError:
    needed = requires("caf-pipeline") or ()
    supported = next(text for text in needed if re.match("dagster[<>=]", text))
    return SettingsError(
        f"Dagster {dagster.__version__} cannot be used ({reason}): caf-pipeline needs {supported}",
        hint=f"install '{supported}'",
    )


try:
    # A check result refers to a materialization: a partition shows only results with it.
    from dagster._core.definitions.asset_checks.asset_check_evaluation import (
        AssetCheckEvaluationTargetMaterializationData,
    )

    # `execute_here`: like `JobDefinition.execute_in_process`, for a run with a code location.
    # Fallback: `execute_in_process`.
    from dagster._core.definitions.job_base import InMemoryJob

    # Metadata of an output for which Dagster logs no materialization, e.g. of an observation.
    from dagster._core.definitions.source_asset import (
        SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION,
    )

    # The run launcher: raised if a code server is gone, so that its runs are dead.
    from dagster._core.errors import DagsterUserCodeUnreachableError
    from dagster._core.execution.api import execute_run_iterator

    # `caf backfill`: what the UI creates for a backfill. The sensor skips chunks of backfills.
    from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill

    # `FollowedComputeLogs`: Dagster's local manager, without its programs. Fallback: name Dagster's
    # manager in dagster.yaml.
    from dagster._core.execution.compute_logs import redirect_to_file
    from dagster._core.execution.execute_in_process import merge_run_tags

    # `caf run`: an instance with one part of dagster.yaml replaced.
    from dagster._core.instance.ref import InstanceRef

    # The run launchers: their base class, and their answers to run monitoring.
    from dagster._core.launcher import (
        CheckRunHealthResult,
        LaunchRunContext,
        RunLauncher,
        WorkerStatus,
    )

    # The run of a plan launches chunks as the sensor would.
    from dagster._core.origin import JobPythonOrigin
    from dagster._core.remote_origin import (
        RegisteredCodeLocationOrigin,
        RemoteJobOrigin,
        RemotePartitionSetOrigin,
        RemoteRepositoryOrigin,
    )
    from dagster._core.scheduler.instigation import InstigatorStatus

    # Alerts: the last result of a check.
    from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus
    from dagster._core.storage.compute_log_manager import CapturedLogContext
    from dagster._core.storage.local_compute_log_manager import LocalComputeLogManager
    from dagster._core.storage.noop_compute_log_manager import NoOpComputeLogManager

    # `demo/ui.py`: servers for our code location.
    from dagster._core.workspace.load_target import WorkspaceFileTarget

    # The run launcher: asks a code server whether it has the process of a run.
    from dagster._grpc.types import CanCancelExecutionRequest, CanCancelExecutionResult

    # The base class of everything that dagster.yaml names by module and class.
    from dagster._serdes import ConfigurableClass, ConfigurableClassData
except ImportError as error:
    raise _unsupported(first_line(error)) from error

READ_IN: Final = "1.13.27"

INSTANCE_MEMBERS: Final = (
    "add_backfill",
    "add_run_tags",
    "all_instigator_state",
    "compute_log_manager",
    "create_run_for_job",
    "daemon_cursor_storage",
    "event_log_storage",
    "get_backfill",
    "get_backfills",
    "get_concurrency_config",
    "get_daemon_heartbeats",
    "get_records_for_run",
    "get_ref",
    "get_run_ids",
    "get_runs",
    "get_runs_count",
    "global_op_concurrency_default_limit",
    "report_run_canceled",
    "report_run_canceling",
    "report_run_failed",
    "run_coordinator",
    "run_launcher",
    "run_monitoring_enabled",
    "run_retries_enabled",
    "run_retries_max_retries",
)
"""Members of an instance that Dagster does not mark as public. They are called plainly."""

EVENT_LOG_MEMBERS: Final = (
    "free_concurrency_slots_for_run",
    "get_asset_check_execution_history",
    "get_concurrency_info",
    "get_latest_asset_check_execution_by_key",
    "get_pool_limits",
    "set_concurrency_slots",
)
"""Methods of an instance's `event_log_storage`, which Dagster does not export."""


def _require_members() -> None:
    missing = [name for name in INSTANCE_MEMBERS if not hasattr(DagsterInstance, name)]
    # The class is searched for in its source, since its module loads SQLAlchemy and alembic.
    source = Path(dagster.__file__).parent / "_core" / "storage" / "event_log" / "base.py"
    text = source.read_text("utf-8") if source.exists() else ""
    missing += [name for name in EVENT_LOG_MEMBERS if f"def {name}(" not in text]
    if missing:
        raise _unsupported(f"it has no {', '.join(missing)}")


_require_members()


_SLOW: Final = {
    "DagsterStorage": "dagster._core.storage.base_storage",
    "DagsterSqliteStorage": "dagster._core.storage.sqlite_storage",
}
"""`ChosenStorage`: SQLite or Postgres, selected by the environment. Fallback: name one of them in
dagster.yaml. They are loaded at first use: 0.4 s of CPU, since they load SQLAlchemy and alembic.
"""


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _SLOW:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_SLOW[name]), name)
    except (ImportError, AttributeError) as error:
        raise _unsupported(first_line(error)) from error
