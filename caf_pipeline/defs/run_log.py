"""What a run waits for, in its own log and on the page of the asset that it makes."""

from collections.abc import Sequence
from typing import Final

from dagster import (
    AssetKey,
    AssetObservation,
    DagsterError,
    DagsterInstance,
    MetadataValue,
    OpExecutionContext,
)
from sqlalchemy.exc import SQLAlchemyError

from caf_pipeline.defs.failures import Context
from caf_pipeline.defs.naming import ASSETS, PARTITION_TAG, asset_key
from caf_pipeline.waits import Announcer, Wait

OBSERVED_SECONDS: Final = 5.0
"""A wait that goes on for so long is an observation of the asset, and its end another."""

MOST_OBSERVED: Final = 20
"""Of one run: a server that comes and goes must not fill the asset's page."""


class RunLog:
    """A listener that writes the waits of one run into Dagster."""

    def __init__(self, source: str, run: str, instance: DagsterInstance | None) -> None:
        self._source = source
        self._run = run
        self._instance = instance
        self._context: Context | None = None
        self._announcer = Announcer(self._log)
        self._observed: list[Wait] = []
        self._left = MOST_OBSERVED

    def follow(self, context: Context) -> None:
        """Write into the log of this step from now on."""
        self._context = context

    def __call__(self, waits: Sequence[Wait]) -> None:
        """Take the waits that go on."""
        try:
            self._announcer(waits)
            for wait in [one for one in self._observed if one not in waits]:
                self._observed.remove(wait)
                self._observe(wait, over=True)
            for wait in waits:
                if wait not in self._observed and wait.seconds() >= OBSERVED_SECONDS and self._left:
                    self._left -= 1
                    self._observed.append(wait)
                    self._observe(wait, over=False)
        except (DagsterError, SQLAlchemyError, OSError):
            # Dagster's storage is away: what is shown there is not worth the work that waits
            return

    def _log(self, line: str) -> None:
        if self._context is not None:
            self._context.log.info(line)

    def _observe(self, wait: Wait, *, over: bool) -> None:
        if self._instance is None or self._context is None:
            return
        shown: dict[str, MetadataValue] = {
            "waited_for" if over else "waits_for": MetadataValue.text(wait.what),
            "since": MetadataValue.timestamp(wait.since),
            "ends_by": MetadataValue.text(wait.ends_by),
            "run": MetadataValue.dagster_run(self._run),
        }
        if over:
            shown["seconds"] = MetadataValue.float(round(wait.seconds(), 1))
        chunk = self._context.run.tags.get(PARTITION_TAG)
        key = AssetKey(asset_key(self._source, self._asset()))
        description = (
            f"It waited for {wait.what}." if over else f"It waits for {wait.what}; {wait.ends_by}."
        )
        observation = AssetObservation(
            key, partition=chunk, description=description, metadata=shown
        )
        self._instance.report_runless_asset_event(observation)

    def _asset(self) -> str:
        """Return the asset that the present step is part of."""
        context = self._context
        if context is None:
            return ASSETS[0]
        step = str(
            (
                context if isinstance(context, OpExecutionContext) else context.op_execution_context
            ).op_handle
        )
        return next((name for name in ASSETS if f"__{name}" in step), ASSETS[0])
