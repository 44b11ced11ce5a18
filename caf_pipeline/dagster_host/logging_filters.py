"""Filters log records of Dagster and SQLAlchemy that users need not see.

Every program of Dagster loads this, because dagster.yaml names a class of `storage`. Source:
`dev_command_impl`, `get_new_cursor` and `ActiveExecution` of Dagster 1.13.27; gRPC's
"GRPC_VERBOSITY"; `_finalize_fairy` of SQLAlchemy 2.1.
"""

import logging
import os
from typing import Final

_DROPPED: Final = {
    # The dagster.yaml in DAGSTER_HOME is a link to that file; see `home`.
    "dagster": (
        "Found a dagster instance configuration value (dagster.yaml) in the current folder",
    ),
    # If another run holds a chunk, its checks do not run, and the later steps do nothing.
    "dagster._core.execution.plan.active": ("Blocking asset check ",),
    # Logged at the first start for each type of event.
    "dagster.daemon.EventLogConsumerDaemon": ("No cursor for event type ",),
}

_POOLS: Final = ("NullPool", "QueuePool", "SingletonThreadPool")

_OUR_ERRORS: Final = "caf_pipeline.errors."


def _shorten_failed_tick(record: logging.LogRecord) -> bool:
    # Logs one sentence if a tick failed with one of our errors, e.g. because of the settings or the
    # bucket. Dagster would log it twice, with tracebacks. The UI still shows the traceback.
    infos = (
        getattr(record.exc_info[1], "user_code_process_error_infos", None)
        if record.exc_info
        else None
    )
    cause = infos[0].cause if infos else None
    if cause is None or not cause.message.startswith(_OUR_ERRORS):
        return True
    record.msg = f"{record.getMessage()}: {cause.message.partition(': ')[2].strip()}"
    record.args, record.exc_info = (), None
    return not record.msg.startswith("Sensor tick caught an error")


def _drop_known(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_DROPPED[record.name])


def _drop_interrupt(record: logging.LogRecord) -> bool:
    # An interrupt while a connection returns to its pool is logged and raised.
    raised = record.exc_info[0] if record.exc_info else None
    return raised is None or issubclass(raised, Exception)


def add_logging_filters() -> None:
    """Add the filters, and silence gRPC's messages about forks. Idempotent."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    for name in _DROPPED:
        logging.getLogger(name).addFilter(_drop_known)
    for pool in _POOLS:
        logging.getLogger(f"sqlalchemy.pool.impl.{pool}").addFilter(_drop_interrupt)
    logging.getLogger("dagster.daemon.SensorDaemon").addFilter(_shorten_failed_tick)
