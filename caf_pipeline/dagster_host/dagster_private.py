"""All names that this project uses from Dagster's private modules.

A test fails if Dagster's version differs from `READ_IN`. Then check each name in Dagster's source,
prefer a public one, and set `READ_IN`.
"""

from typing import Final

# `execute_here`: like `JobDefinition.execute_in_process`, for a run with a code location. Fallback:
# `execute_in_process`.
from dagster._core.definitions.job_base import InMemoryJob

# The run launcher: raised if a code server is gone, so that its runs are dead.
from dagster._core.errors import DagsterUserCodeUnreachableError
from dagster._core.execution.api import execute_run_iterator

# `caf backfill`: what the UI creates for a backfill.
from dagster._core.execution.backfill import PartitionBackfill

# `FollowedComputeLogs`: Dagster's local manager, without its programs. Fallback: name Dagster's
# manager in dagster.yaml.
from dagster._core.execution.compute_logs import redirect_to_file
from dagster._core.execution.execute_in_process import merge_run_tags

# `caf run`: an instance with one part of dagster.yaml replaced.
from dagster._core.instance.ref import InstanceRef

# The run launchers: their base class, and their answers to run monitoring.
from dagster._core.launcher import CheckRunHealthResult, LaunchRunContext, RunLauncher, WorkerStatus
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

# `ChosenStorage`: SQLite or Postgres, selected by the environment. Fallback: name one of them in
# dagster.yaml.
from dagster._core.storage.base_storage import DagsterStorage
from dagster._core.storage.compute_log_manager import CapturedLogContext
from dagster._core.storage.local_compute_log_manager import LocalComputeLogManager
from dagster._core.storage.noop_compute_log_manager import NoOpComputeLogManager
from dagster._core.storage.sqlite_storage import DagsterSqliteStorage

# `demo/ui.py`: servers for our code location.
from dagster._core.workspace.load_target import WorkspaceFileTarget

# The run launcher: asks a code server whether it has the process of a run.
from dagster._grpc.types import CanCancelExecutionRequest, CanCancelExecutionResult

# The base class of everything that dagster.yaml names by module and class.
from dagster._serdes import ConfigurableClass, ConfigurableClassData

READ_IN: Final = "1.13.27"
