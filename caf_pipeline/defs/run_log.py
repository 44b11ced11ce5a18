"""Shows the waits of a run in its log and on the page of its asset."""

from collections.abc import Sequence
from typing import Final

from dagster import (
    AssetCheckExecutionContext,
    AssetObservation,
    DagsterError,
    DagsterInstance,
    MetadataValue,
)
from sqlalchemy.exc import SQLAlchemyError

from caf_pipeline.automation.asset_keys import AssetKeys
from caf_pipeline.defs.failures import Context
from caf_pipeline.defs.naming import ASSETS, PARTITION_TAG
from caf_pipeline.waits import Announcer, Wait

OBSERVED_SECONDS: Final = 5.0
"""Longer waits are observed on the asset when noticed and when they end."""

MAX_OBSERVED_WAITS: Final = 20
"""Per run, so that an unstable server does not fill the asset's page."""


class RunLog:
    """Writes the waits of one run to Dagster."""

    def __init__(
        self, source: str, run: str, instance: DagsterInstance | None, keys: AssetKeys
    ) -> None:
        self._source = source
        self._keys = keys
        self._run = run
        self._instance = instance
        self._context: Context | None = None
        self._announcer = Announcer(
            lambda line: self._context.log.info(line) if self._context else None
        )
        self._observed: list[Wait] = []
        self._observations_left = MAX_OBSERVED_WAITS

    def follow(self, context: Context) -> None:
        self._context = context

    def __call__(self, waits: Sequence[Wait]) -> None:
        try:
            self._announcer(waits)
            for wait in [wait for wait in self._observed if wait not in waits]:
                self._observed.remove(wait)
                self._observe(wait, over=True)
            for wait in waits:
                is_new = wait not in self._observed and wait.seconds() >= OBSERVED_SECONDS
                if is_new and self._observations_left:
                    self._observations_left -= 1
                    self._observed.append(wait)
                    self._observe(wait, over=False)
        except (DagsterError, SQLAlchemyError, OSError):
            return  # Dagster's storage is away; showing waits must not fail the run

    def _observe(self, wait: Wait, *, over: bool) -> None:
        context = self._context
        if self._instance is None or context is None:
            return
        shown: dict[str, MetadataValue] = {
            "waited_for" if over else "waits_for": MetadataValue.text(wait.what),
            "since": MetadataValue.timestamp(wait.since),
            "ends_by": MetadataValue.text(wait.ends_by),
            "run": MetadataValue.dagster_run(self._run),
        }
        if over:
            shown["seconds"] = MetadataValue.float(round(wait.seconds(), 1))
        keys = (
            {check.asset_key for check in context.check_specs}
            if isinstance(context, AssetCheckExecutionContext)
            else context.selected_asset_keys
        )
        observation = AssetObservation(
            next(iter(keys), self._keys.key(self._source, ASSETS[0])),
            partition=context.run.tags.get(PARTITION_TAG),
            description=(
                f"The run waited for {wait.what}."
                if over
                else f"The run waits for {wait.what}; {wait.ends_by}."
            ),
            metadata=shown,
        )
        self._instance.report_runless_asset_event(observation)
