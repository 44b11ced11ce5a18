"""Reports a step's failure to Dagster and decides how it may be retried.

An op's RetryPolicy retries transient errors; run retries are for crashes only (dagster.yaml). An
interrupted run is never retried.
"""

from collections.abc import Callable
from typing import Final, TypeVar

from dagster import (
    AssetCheckExecutionContext,
    AssetExecutionContext,
    Backoff,
    DagsterError,
    DagsterExecutionInterruptedError,
    Failure,
    Jitter,
    OpExecutionContext,
    RetryPolicy,
)

from caf_pipeline.errors import OUTAGES, CafError, HeldByOther
from caf_pipeline.naming import COMMAND_TAG, HELD_TAG, OUTAGE_TAG

T = TypeVar("T")
Context = AssetCheckExecutionContext | AssetExecutionContext | OpExecutionContext

RETRY_TRANSIENT: Final = RetryPolicy(
    max_retries=3, delay=2, backoff=Backoff.EXPONENTIAL, jitter=Jitter.PLUS_MINUS
)
"""Waits of 2, 4 and 8 seconds, after the back-off of its requests."""


class RunInterrupted(DagsterError, DagsterExecutionInterruptedError):
    """Ctrl-C, or a request to terminate the run.

    Dagster retries an interrupted op that has a RetryPolicy, except for a DagsterError.
    """


def attempt(
    context: Context, call: Callable[[], T], on_error: Callable[[CafError], None]
) -> T | None:
    """Return the result of `call`, or None if another live run holds the chunk.

    The run is then tagged with the holder's id.

    Raises:
        Failure: `call` raised a CafError. Dagster retries it only if it is transient.
        RunInterrupted: the run was interrupted.
    """
    try:
        return call()
    except HeldByOther as held:
        context.log.info(f"held by run {held.holder}: {held}")
        tags = {HELD_TAG: held.holder}
        context.instance.add_run_tags(context.run.run_id, tags)
        return None
    except CafError as error:
        on_error(error)
        # The run's last error decides. The value is the run's id, since a re-execution inherits
        # all tags.
        outage = context.run.run_id if isinstance(error, OUTAGES) else "none"
        context.instance.add_run_tags(context.run.run_id, {OUTAGE_TAG: outage})
        raise as_failure(error) from error
    except (KeyboardInterrupt, DagsterExecutionInterruptedError) as interrupt:
        # In a command, Ctrl-C is a request to cancel. In a server, it ends the server.
        if context.run.tags.get(COMMAND_TAG):
            context.instance.report_run_canceling(context.run)
        raise RunInterrupted("interrupted") from interrupt


def as_failure(error: CafError) -> Failure:
    """Return a failure with the error's message and hint."""
    metadata: dict[str, str | int] = {"error": type(error).__name__, "exit_code": error.exit_code}
    if error.hint:
        metadata["hint"] = error.hint
    return Failure(description=str(error), metadata=metadata, allow_retries=not error.permanent)
