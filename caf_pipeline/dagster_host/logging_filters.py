"""What Dagster's programs, and SQLAlchemy under them, say that is not for the user of this project:
left out by its logger.

Our dagster.yaml names a class of `storage`, which every program of Dagster loads and which loads
this. Source: `dev_command_impl`, `get_new_cursor` and `ActiveExecution` of Dagster 1.13.27; gRPC's
"GRPC_VERBOSITY"; `_finalize_fairy` of SQLAlchemy 2.1.
"""

import logging
import os
from typing import Final

_LEFT_OUT: Final = {
    # It is in the folder that is DAGSTER_HOME as a link to this very file (`home`).
    "dagster": (
        "Found a dagster instance configuration value (dagster.yaml) in the current folder",
    ),
    # Of a chunk that another run holds: its checks have nothing to look at, and the steps after
    # them do nothing.
    "dagster._core.execution.plan.active": ("Blocking asset check ",),
    # At the first start, for each kind of event: there are no older ones.
    "dagster.daemon.EventLogConsumerDaemon": ("No cursor for event type ",),
}

_POOLS: Final = ("NullPool", "QueuePool", "SingletonThreadPool")
"""Of SQLAlchemy, which Dagster's storages use; each logs by its own name."""

_OUR_ERRORS: Final = "caf_pipeline.errors."


def _is_said(record: logging.LogRecord) -> bool:
    """Leave out the records of a logger that begin with certain words."""
    return not record.getMessage().startswith(_LEFT_OUT[record.name])


def _say_failed_ticks(record: logging.LogRecord) -> bool:
    """Log a tick that failed with one of our errors as one sentence; Dagster logs it twice, each
    time with tracebacks.

    Such an error is about the settings or the bucket. The tick still fails, and the UI shows its
    traceback.
    """
    infos = (
        getattr(record.exc_info[1], "user_code_process_error_infos", None)
        if record.exc_info
        else None
    )
    cause = infos[0].cause if infos else None
    if cause is None or not cause.message.startswith(_OUR_ERRORS):
        return True
    record.msg, record.args = (
        f"{record.getMessage()}: {cause.message.partition(': ')[2].strip()}",
        (),
    )
    record.exc_info = None
    return not record.msg.startswith("Sensor tick caught an error")


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """Leave out the traceback of an interrupt that came while a connection went back to its pool:
    it is raised as well.
    """
    raised = record.exc_info[0] if record.exc_info else None
    return raised is None or issubclass(raised, Exception)


def add_logging_filters() -> None:
    """Leave them out in this process; and what gRPC says of every fork, in those that it starts as
    well. May be repeated.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    for name in _LEFT_OUT:
        logging.getLogger(name).addFilter(_is_said)
    for pool in _POOLS:
        logging.getLogger(f"sqlalchemy.pool.impl.{pool}").addFilter(_is_no_interrupt)
    logging.getLogger("dagster.daemon.SensorDaemon").addFilter(_say_failed_ticks)
