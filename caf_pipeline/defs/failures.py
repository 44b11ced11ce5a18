"""How a step's failure is reported to Dagster, and which of Dagster's retry mechanisms may act on
it.

Dagster has three: an op's RetryPolicy, a run retry, and a new run by the sensor. A permanent error
skips the first; run retries are for crashes only (dagster.yaml); the sensor counts failed runs, but
for those that an outage ended. An interrupt ends the run: nothing may retry it. Source: the error
tree in `errors`.
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

from caf_pipeline.defs.naming import COMMAND_TAG, HELD_TAG, OUTAGE_TAG
from caf_pipeline.errors import (
    HITS_EVERY_CHUNK,
    CafError,
    HeldByOther,
    LedgerUnreachable,
    PlanTooSmall,
    SourceUnreachable,
    StagingError,
    StoreUnreachable,
)

T = TypeVar("T")
Context = AssetCheckExecutionContext | AssetExecutionContext | OpExecutionContext

RETRY_TRANSIENT: Final = RetryPolicy(
    max_retries=3, delay=2, backoff=Backoff.EXPONENTIAL, jitter=Jitter.PLUS_MINUS
)
"""For every op: 2, 4 and 8 seconds.

Requests have back-off of their own; this is for what outlasts it.
"""

OUTAGES: Final = (
    SourceUnreachable,
    LedgerUnreachable,
    StoreUnreachable,
    StagingError,
    PlanTooSmall,
    *HITS_EVERY_CHUNK,
)
"""What all chunks need did not answer, or has no room.

That says nothing of the chunk: a run that ends by it is no attempt.
"""


class RunInterrupted(DagsterError, DagsterExecutionInterruptedError):
    """Ctrl-C, or a request to end the run.

    Dagster retries an interrupted op that has a RetryPolicy, but lets its own errors pass: so this
    is one of them, and still an interrupt, which ends the run.
    """


def attempt(
    context: Context, call: Callable[[], T], on_error: Callable[[CafError], None]
) -> T | None:
    """Return what `call` returns, or None where another live run holds the chunk: an outcome, not a
    failure.

    The run is then tagged with the holder's. `on_error` is told an error itself, before Dagster
    makes text of it.

    Raises:
        Failure: with the error's sentence and hint, retried only where the error is transient.
        RunInterrupted: ends the run.
    """
    try:
        return call()
    except HeldByOther as held:
        context.log.info(f"held by run {held.holder}: {held}")
        context.instance.add_run_tags(context.run.run_id, {HELD_TAG: held.holder})
        return None
    except CafError as error:
        on_error(error)
        # Each error of a run is in the place of the one before. With the run's id, since a
        # re-execution inherits all tags.
        outage = context.run.run_id if isinstance(error, OUTAGES) else "none"
        context.instance.add_run_tags(context.run.run_id, {OUTAGE_TAG: outage})
        raise as_failure(error) from error
    except (KeyboardInterrupt, DagsterExecutionInterruptedError) as interrupt:
        if context.run.tags.get(
            COMMAND_TAG
        ):  # the user's Ctrl-C is a request to cancel; a server that ends is not
            context.instance.report_run_canceling(context.run)
        raise RunInterrupted("interrupted") from interrupt


def as_failure(error: CafError) -> Failure:
    """Return the error as Dagster's, so that the UI shows the sentence and the hint."""
    metadata: dict[str, str | int] = {"error": type(error).__name__, "exit_code": error.exit_code}
    if error.hint:
        metadata["hint"] = error.hint
    return Failure(description=str(error), metadata=metadata, allow_retries=not error.permanent)
