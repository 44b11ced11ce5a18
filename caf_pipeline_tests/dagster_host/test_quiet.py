"""What Dagster's programs say: everything but what is not for the user."""

import logging

import pytest

from caf_pipeline.dagster_host.quiet import hush

NOT_FOR_USERS = [
    ("dagster", "Found a dagster instance configuration value (dagster.yaml) in the current folder, but your DAGSTER_HOME …"),
    ("dagster.daemon.EventLogConsumerDaemon", "No cursor for event type DagsterEventType.RUN_FAILURE, ignoring older events"),
    ("dagster._core.execution.plan.active", "Blocking asset check 'x' emitted no result in step 'y'; downstream step 'z' will …"),
]


@pytest.fixture(autouse=True)
def hushed(monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    hush()
    hush()
    yield
    for name, _ in NOT_FOR_USERS:
        assert len(logging.getLogger(name).filters) == 1


@pytest.mark.parametrize(("logger", "message"), NOT_FOR_USERS)
def test_what_is_not_for_the_user_is_left_out(caplog, logger, message):
    logging.getLogger(logger).warning(message)
    assert caplog.messages == []


@pytest.mark.parametrize("logger", [logger for logger, _ in NOT_FOR_USERS])
def test_every_other_warning_is_said(caplog, logger):
    logging.getLogger(logger).warning("the disk is full")
    assert caplog.messages == ["the disk is full"]
