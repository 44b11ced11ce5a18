"""Helpers for sensor ticks."""

from collections.abc import Callable
from typing import Final, TypeVar

from dagster import AssetExecutionContext, SensorEvaluationContext, SensorResult, SkipReason

from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.system.deadline import Deadline

TickResult = SensorResult | SkipReason
TickContext = SensorEvaluationContext | AssetExecutionContext

TICK_SECONDS: Final = 15.0
"""Deadline for a tick's requests to servers. The whole tick takes less than 20 s."""

T = TypeVar("T")


def ask_in_time(
    context: TickContext, deadline: Deadline, whom: str, question: Callable[[], T]
) -> T:
    """Return the result of `question`, or raise Overdue; see `Deadline.ask`.

    A question that ends after the deadline closes its resources.
    """
    # Built in this thread: Dagster loses resources that are built in another thread.
    resources = context.resources

    def close() -> None:
        resources.caf_ledger.close()
        resources.caf_store.close()

    return deadline.ask(whom, question, late=close)


def pause_reason(ledger: Ledger) -> str:
    """Return why ticks are skipped; "" if an operator has not paused everything."""
    reason = ledger.controls.current().paused
    return f"Paused: {reason}. `caf resume` ends it." if reason else ""
