"""Log lines of Dagster's programs: known ones are dropped, all others stay."""

import contextlib
import logging

import pytest
from sqlalchemy import NullPool, QueuePool, SingletonThreadPool, create_engine, text

from caf_pipeline.dagster_host.logging_filters import add_logging_filters
from caf_pipeline_tests.support.dagster_private import (
    DagsterUserCodeProcessError,
    SerializableErrorInfo,
)

NOT_FOR_USERS = [
    (
        "dagster",
        "Found a dagster instance configuration value (dagster.yaml) in the current folder, but "
        "your DAGSTER_HOME …",
    ),
    (
        "dagster.daemon.EventLogConsumerDaemon",
        "No cursor for event type DagsterEventType.RUN_FAILURE, ignoring older events",
    ),
    (
        "dagster._core.execution.plan.active",
        "Blocking asset check 'x' emitted no result in step 'y'; downstream step 'z' will …",
    ),
]


@pytest.fixture(autouse=True)
def filtered(monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    add_logging_filters()
    add_logging_filters()
    yield
    for name, _ in NOT_FOR_USERS:
        assert len(logging.getLogger(name).filters) == 1


@pytest.mark.parametrize(("logger", "message"), NOT_FOR_USERS)
def test_what_is_not_for_the_user_is_left_out(caplog, logger, message):
    logging.getLogger(logger).warning(message)
    assert caplog.messages == []


@pytest.mark.parametrize("logger", [logger for logger, _ in NOT_FOR_USERS])
def test_other_warnings_are_logged(caplog, logger):
    logging.getLogger(logger).warning("disk full")
    assert caplog.messages == ["disk full"]


def fail_tick(error: str) -> None:
    """Log a failed tick as the daemon of Dagster 1.13.27 does, twice."""
    cause = SerializableErrorInfo(f"{error}\n", [], error.partition(":")[0])
    logger = logging.getLogger("dagster.daemon.SensorDaemon")
    try:
        raise DagsterUserCodeProcessError.from_error_info(
            SerializableErrorInfo("SensorExecutionError", ["trace"], None, cause)
        )
    except DagsterUserCodeProcessError:
        logger.error("Sensor tick caught an error", exc_info=True)
        logger.error("Sensor daemon caught an error for sensor caf_new_objects_demo", exc_info=True)


def test_a_tick_that_fails_with_our_error_logs_one_line(caplog):
    fail_tick(
        "caf_pipeline.errors.SourceDenied: there are no usable credentials for bucket 'demo': none "
        "were found"
    )
    (output,) = caplog.records
    assert "caf_new_objects_demo" in output.message
    assert "bucket 'demo'" in output.message
    assert output.exc_info is None
    assert output.exc_info is None


def test_a_tick_that_fails_by_a_fault_keeps_its_tracebacks(caplog):
    fail_tick("KeyError: 'x'")
    assert [bool(record.exc_info) for record in caplog.records] == [True, True]


@pytest.mark.parametrize("kind", [NullPool, QueuePool, SingletonThreadPool])
def test_an_interrupt_in_a_pool_logs_no_traceback(caplog, monkeypatch, kind):
    def close_one(raised: BaseException) -> None:
        engine = create_engine("sqlite://", poolclass=kind)
        connection = engine.connect()
        connection.execute(text("SELECT 1"))
        connection.commit()

        def fail(*_) -> None:
            raise raised

        monkeypatch.setattr(engine.dialect, "do_rollback", fail)
        connection.close()

    with pytest.raises(KeyboardInterrupt):
        close_one(KeyboardInterrupt())
    assert caplog.messages == []
    with contextlib.suppress(OSError):  # what the pool does of it is its own affair
        close_one(OSError("the disk is gone"))
    assert caplog.messages
