"""What this project uses of Dagster's private modules.

They are imported here only, and everybody else imports them from here.

Read in the version `READ_IN`. Dagster may move or change any of it in any release: a test compares
the versions and fails when they differ. What to do then: look up each name in Dagster's source, see
that it still does what the line above it says, correct the import, and set `READ_IN`. Where Dagster
has a public name for it by then, import that where it is used instead.
"""

from typing import Final

# `execute_here`: what `JobDefinition.execute_in_process` does, on a run that says which code
# location it is of. Else: that.
from dagster._core.definitions.job_base import InMemoryJob

# The run launcher: a code server that is gone is an answer about its runs.
from dagster._core.errors import DagsterUserCodeUnreachableError

# `caf run`: which runs were ended by an interrupt that came between two steps.
from dagster._core.events import RunFailureReason
from dagster._core.execution.api import execute_run_iterator

# `caf backfill`: what the UI makes of it.
from dagster._core.execution.backfill import BULK_ACTION_TERMINAL_STATUSES, PartitionBackfill

# `FollowedComputeLogs`: Dagster's local manager, without the programs that it starts. Else: name
# Dagster's in dagster.yaml.
from dagster._core.execution.compute_logs import redirect_to_file
from dagster._core.execution.execute_in_process import merge_run_tags

# `caf run`: an instance with one part of dagster.yaml replaced.
from dagster._core.instance.ref import InstanceRef

# The run launchers: what all of Dagster's are, and the words of their answer to run monitoring.
from dagster._core.launcher import CheckRunHealthResult, LaunchRunContext, RunLauncher, WorkerStatus
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

# `ChosenStorage`: SQLite or Postgres, by the environment. Else: name one of the two in
# dagster.yaml.
from dagster._core.storage.base_storage import DagsterStorage
from dagster._core.storage.compute_log_manager import CapturedLogContext

# `sqlite_storage`: Dagster's storages on SQLite, for the name by which each makes engines. Else:
# leave them as they are.
from dagster._core.storage.event_log.sqlite import sqlite_event_log
from dagster._core.storage.local_compute_log_manager import LocalComputeLogManager
from dagster._core.storage.noop_compute_log_manager import NoOpComputeLogManager
from dagster._core.storage.runs.sqlite import sqlite_run_storage
from dagster._core.storage.schedules.sqlite import sqlite_schedule_storage
from dagster._core.storage.sql import create_engine
from dagster._core.storage.sqlite_storage import DagsterSqliteStorage

# With `RunFailureReason`.
from dagster._core.storage.tags import RUN_FAILURE_REASON_TAG
from dagster._core.workspace.load_target import WorkspaceFileTarget

# The run launcher: the question whether a code server knows the process of a run.
from dagster._grpc.types import CanCancelExecutionRequest, CanCancelExecutionResult

# What dagster.yaml may name by module and class is one of these.
from dagster._serdes import ConfigurableClass, ConfigurableClassData

READ_IN: Final = "1.13.27"
