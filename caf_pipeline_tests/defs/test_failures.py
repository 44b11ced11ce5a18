"""Failures of steps: what Dagster shows, and which retry applies."""

import pytest
from dagster import DagsterInstance, DagsterRunStatus, RetryPolicy, job, op

from caf_pipeline.defs.failures import attempt
from caf_pipeline.errors import (
    CafError,
    HeldByOther,
    LedgerUnreachable,
    SourceDenied,
    StoreUnreachable,
)
from caf_pipeline.naming import OUTAGE_TAG

TWICE = RetryPolicy(max_retries=2)


@pytest.fixture
def ephemeral():
    with DagsterInstance.ephemeral() as instance:
        yield instance


def execute(
    instance, error: Exception
) -> tuple[list[CafError], DagsterRunStatus, dict[str, object]]:
    """Execute an op that raises `error`; return the errors, the run's status and the metadata."""
    reports: list[CafError] = []

    def fail() -> None:
        raise error

    @op(retry_policy=TWICE)
    def failing(context):
        attempt(context, fail, reports.append)

    @job
    def a_job():
        failing()

    result = a_job.execute_in_process(instance=instance, raise_on_error=False)
    failures = [
        event.step_failure_data.user_failure_data
        for event in result.all_events
        if event.is_step_failure
    ]
    shown = {
        name: value.value
        for failure in failures
        if failure
        for name, value in failure.metadata.items()
    }
    return reports, instance.get_run_by_id(result.run_id).status, shown


def test_a_transient_error_is_retried_by_the_policy(ephemeral):
    reports, status, _ = execute(ephemeral, LedgerUnreachable("the database is away"))
    assert (len(reports), status) == (3, DagsterRunStatus.FAILURE)


def test_a_permanent_error_is_not_retried(ephemeral):
    reports, status, _ = execute(ephemeral, SourceDenied("no entry"))
    assert (len(reports), status) == (1, DagsterRunStatus.FAILURE)


def test_the_failure_shows_kind_exit_code_and_hint(ephemeral):
    _, _, shown = execute(ephemeral, SourceDenied("denied", hint="request access"))
    assert shown == {"error": "SourceDenied", "exit_code": 5, "hint": "request access"}


def test_only_a_last_error_by_outage_marks_the_run(ephemeral):
    execute(ephemeral, StoreUnreachable("no answer"))
    execute(ephemeral, SourceDenied("no entry"))
    denied, unreachable = ephemeral.get_runs()
    assert unreachable.tags[OUTAGE_TAG] == unreachable.run_id
    assert denied.tags[OUTAGE_TAG] == "none"


def test_held_by_another_run_is_an_outcome_and_no_failure(ephemeral):
    reports, status, _ = execute(ephemeral, HeldByOther("held", holder="run-7"))
    assert (reports, status) == ([], DagsterRunStatus.SUCCESS)
    assert ephemeral.get_runs()[0].tags["caf/held_by"] == "run-7"
