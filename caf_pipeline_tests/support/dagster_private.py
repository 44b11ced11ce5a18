"""Names from Dagster's private modules that only tests use; see `caf_pipeline.dagster_private`."""

from contextlib import suppress

from dagster._core.code_pointer import CodePointer
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.definitions.partitions.context import partition_loading_context
from dagster._core.errors import DagsterUserCodeProcessError
from dagster._core.events import EngineEventData
from dagster._core.loader import LoadingContextForTest
from dagster._core.origin import RepositoryPythonOrigin
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorType,
)
from dagster._core.storage.compute_log_manager import ComputeIOType
from dagster._core.storage.tags import GRPC_INFO_TAG, TagType, get_tag_type
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._daemon.types import DaemonHeartbeat
from dagster._utils.error import SerializableErrorInfo
from dagster._utils.interrupts import capture_interrupts

with suppress(ImportError):  # Dagster 1.12 does not have it
    from dagster._core.definitions.utils import is_valid_owner
