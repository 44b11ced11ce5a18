"""Resources: what a run needs besides its config.

They only build the domain's objects, when a step asks for them.

A definition names what it needs by key, not by parameter: the key of a source's S3 is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from dagster import (
    ConfigurableResource,
    InitResourceContext,
    ResourceDependency,
    SensorEvaluationContext,
)
from pydantic import PrivateAttr

from caf_pipeline import run_wiring
from caf_pipeline.automation.dead_runs import process_tags
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.defs.failures import Context, attempt
from caf_pipeline.defs.naming import LEDGER, RUN, SOURCE_TAG, STORE, s3_key
from caf_pipeline.defs.run_log import RunLog
from caf_pipeline.defs.source_resource import S3SourceResource
from caf_pipeline.errors import CafError
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import Holder
from caf_pipeline.run_context import Lazy, RunContext
from caf_pipeline.run_wiring import open_ledger
from caf_pipeline.settings import Settings
from caf_pipeline.source.protocol import UnavailableSource
from caf_pipeline.store.protocol import ChunkStore
from caf_pipeline.waits import Listener, Wait, Waits

T = TypeVar("T")

EVERY_STEP: Final = {LEDGER, STORE, RUN}
"""What every step and every sensor asks for; who lists or reads the bucket asks for
`s3_key(source)` besides.
"""


def ignore(*_: object) -> None:
    """Do no more with progress, waits and errors than Dagster and the ledger do."""


class LedgerResource(ConfigurableResource[Ledger]):
    """The ledger: opened by the first step of a run that needs it, closed when the run ends."""

    settings: ResourceDependency[Settings]
    _ledger: Ledger | None = PrivateAttr(default=None)

    def get(self) -> Ledger:
        """Return the open ledger.

        Raises:
            LedgerUnreachable.
        """
        if self._ledger is None:
            self._ledger = open_ledger(self.settings)
        return self._ledger

    def close(self) -> None:
        """Close the ledger's connections, where it was opened. Later questions open new ones."""
        if self._ledger is not None:
            self._ledger.close()

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        """Close the ledger's connections."""
        self.close()


class SharedLedger(LedgerResource):
    """An open ledger that outlives the run, of a process that does many."""

    shared: ResourceDependency[Ledger]

    def get(self) -> Ledger:
        """Return it."""
        return self.shared


class StoreResource(ConfigurableResource[ChunkStore]):
    """The store that the settings name: opened by the first step of a run that asks, closed when
    the run ends.
    """

    settings: ResourceDependency[Settings]
    _opened: list[ChunkStore] = PrivateAttr(default_factory=list)

    def open(self, ledger: Ledger, holder: Holder, waits: Waits) -> ChunkStore:
        """Open the store; see `run_wiring.open_store`."""
        self._opened.append(run_wiring.open_store(self.settings, ledger, holder, waits))
        return self._opened[-1]

    def close(self) -> None:
        """Close what was opened."""
        while self._opened:
            self._opened.pop().close()

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        """Close what was opened."""
        self.close()


class RunResource(ConfigurableResource["RunResource"]):
    """One run: whom it tells what, and the run contexts of its sources.

    Attributes:
        progress: told objects and bytes as they are packed, as differences.
        upload_progress: told bytes as they are sent, as differences.
        ended: told the state in which the run leaves a chunk; see `RunContext`.
        on_error: told an error of a step before Dagster makes text of it.
        waiting: told what a run waits for.
    """

    settings: ResourceDependency[Settings]
    progress: ResourceDependency[Callable[[int, int], None]]
    upload_progress: ResourceDependency[Callable[[int], None]]
    ended: ResourceDependency[Callable[[ChunkState], None]]
    on_error: ResourceDependency[Callable[[CafError], None]]
    waiting: ResourceDependency[Listener]
    _works: dict[str, RunContext] = PrivateAttr(default_factory=dict)
    _logs: dict[str, RunLog] = PrivateAttr(default_factory=dict)

    def open(self, context: Context | SensorEvaluationContext, source: str) -> RunContext:
        """Return the run context of a source, which the first step of the run opens.

        It reads the bucket if the definition of the step or sensor asks for the source's S3.
        """
        run = (
            f"sensor {context.sensor_name}"
            if isinstance(context, SensorEvaluationContext)
            else context.run.run_id
        )
        if not isinstance(context, SensorEvaluationContext):
            self._logs.setdefault(source, RunLog(source, run, context.instance)).follow(context)
        if source not in self._works:
            self._works[source] = run_wiring.open_run_context(
                self.settings,
                source,
                run=run,
                ledger=context.resources.ledger.get(),
                store=context.resources.store.open,
                objects=UnavailableSource(
                    f"this step does not read the bucket of '{source}', and what it needs is not "
                    "in staging any more",
                    hint="run the partition from caf_chunk on, which packs the chunk again",
                ),
                progress=self.progress,
                upload_progress=self.upload_progress,
                ended=self.ended,
                waiting=self._listener(source),
            )
            if not isinstance(
                context, SensorEvaluationContext
            ):  # so that it can be told when this process is dead
                of_source = (
                    {} if SOURCE_TAG in context.run.tags else {SOURCE_TAG: source}
                )  # a run of the UI has none
                context.instance.add_run_tags(
                    run, of_source | process_tags(self._works[source].holder)
                )
        run_context = self._works[source]
        s3 = getattr(context.resources, s3_key(source), None)
        if s3 is None:
            return run_context
        settings, waits = run_context.settings, run_context.waits
        return replace(
            run_context,
            lazy_objects=Lazy(
                lambda: run_wiring.open_source(settings, source, waits, s3.get_client())
            ),
        )

    def _listener(self, source: str) -> Listener:
        def told(waits: Sequence[Wait]) -> None:
            self.waiting(waits)
            if source in self._logs:
                self._logs[source](waits)

        return told


def attempt_step(context: Context, source: str, step: Callable[[RunContext], T]) -> T | None:
    """Return what a step returns, or None where another live run holds the chunk; see
    `failures.attempt`.
    """
    run: RunResource = context.resources.run
    return attempt(context, lambda: step(run.open(context, source)), run.on_error)


def build_resources(settings: Settings) -> dict[str, Any]:
    """Return the resources by their keys: the ledger, the store, the run, and each source's S3."""
    return {
        LEDGER: LedgerResource(settings=settings),
        STORE: StoreResource(settings=settings),
        RUN: RunResource(
            settings=settings,
            progress=ignore,
            upload_progress=ignore,
            ended=ignore,
            on_error=ignore,
            waiting=ignore,
        ),
        **{s3_key(name): S3SourceResource.of(source) for name, source in settings.sources.items()},
    }
