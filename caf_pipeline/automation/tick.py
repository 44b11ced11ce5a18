"""One tick of a sensor: questions to servers within its time, and the answer to Dagster."""

from collections.abc import Callable
from typing import TypeVar

from dagster import SensorEvaluationContext, SensorResult, SkipReason

from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.system.deadline import Deadline

TickResult = SensorResult | SkipReason
T = TypeVar("T")


def ask_in_time(
    context: SensorEvaluationContext, deadline: Deadline, whom: str, question: Callable[[], T]
) -> T:
    """Return what a tick asks of a server; see `Deadline.ask`.

    What it opens after the tick is over is closed.
    """
    resources = (
        context.resources
    )  # made here: where Dagster makes them in another thread, it does not find them again

    def close() -> None:
        resources.ledger.close()
        resources.store.close()

    return deadline.ask(whom, question, late=close)


def pause_reason(ledger: Ledger) -> str:
    """Return the reason for which a tick is skipped while an operator has paused everything; ""
    otherwise.
    """
    reason = ledger.controls.current().paused
    return f"Paused: {reason}. `caf resume` ends it." if reason else ""
