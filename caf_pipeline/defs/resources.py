"""Resources build the ledger, the store and the run context when a step first needs them."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, TypeVar

from dagster import (
    ConfigurableResource,
    DagsterError,
    InitResourceContext,
    OpExecutionContext,
    ResourceDependency,
    SensorEvaluationContext,
    multi_or_in_process_executor,
)
from pydantic import PrivateAttr

from caf_pipeline import wiring
from caf_pipeline.asset_keys import DEFAULT_KEYS, AssetKeys
from caf_pipeline.automation.dead_runs import process_tags
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.defs.failures import Context, attempt
from caf_pipeline.defs.source_resource import S3SourceResource
from caf_pipeline.errors import CafError
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.naming import (
    ALL_STEPS,
    LEDGER,
    RETRY_STRATEGY_TAG,
    RUN,
    SOURCE_TAG,
    STORE,
    s3_key,
)
from caf_pipeline.run_context import Lazy, RunContext
from caf_pipeline.settings import Settings
from caf_pipeline.source.protocol import UnavailableSource
from caf_pipeline.store.protocol import ChunkStore
from caf_pipeline.system.processes import Holder, parent_process
from caf_pipeline.waits import Announcer, Waits
from caf_pipeline.wiring import open_ledger

T = TypeVar("T")

_IN_PROCESS: Final = {"in_process", "execute_in_process_executor"}
"""Executors, by name, whose steps are in the run's process."""

_MULTIPROCESS: Final = "multiprocess"
"""The executor whose steps are children of the run's process."""

EVERY_STEP: Final = {LEDGER, STORE, RUN}
"""Steps that list or read the bucket add `s3_key(source)`."""


Execute = Callable[[Context, Callable[[], Any]], Any]
"""Calls a step of a run, and returns its result."""


def run_step(_: Context, step: Callable[[], T]) -> T:
    """Call the step: the default of `execute`."""
    return step()


def ignore(*_: object) -> None:
    """Do nothing: the default of all callbacks."""


class LedgerResource(ConfigurableResource[Ledger]):
    """The ledger, opened when a run first needs it and closed when the run ends."""

    settings: ResourceDependency[Settings]
    _ledger: Ledger | None = PrivateAttr(default=None)

    def get(self) -> Ledger:
        if self._ledger is None:
            self._ledger = open_ledger(self.settings)
        return self._ledger

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        self.close()


class SharedLedger(LedgerResource):
    """An open ledger that outlives the run, for a process that executes many runs."""

    shared: ResourceDependency[Ledger]

    def get(self) -> Ledger:
        return self.shared


class StoreResource(ConfigurableResource[ChunkStore]):
    """The store, opened when a step first needs it and closed when the run ends."""

    settings: ResourceDependency[Settings]
    _opened: list[ChunkStore] = PrivateAttr(default_factory=list)

    def open(self, ledger: Ledger, holder: Holder, waits: Waits) -> ChunkStore:
        self._opened.append(wiring.open_store(self.settings, ledger, holder, waits))
        return self._opened[-1]

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        self.close()


class RunResource(ConfigurableResource["RunResource"]):
    """One run: its callbacks, and the run contexts of its sources.

    Attributes:
        ended: called with the state in which the run leaves a chunk; see `RunContext`.
        on_error: called with a step's error before Dagster converts it to text.
        asset_keys: the keys of the assets.
        executes: by source; called with each of its steps, which it calls.
    """

    settings: ResourceDependency[Settings]
    ended: ResourceDependency[Callable[[ChunkState], None]]
    on_error: ResourceDependency[Callable[[CafError], None]]
    asset_keys: ResourceDependency[AssetKeys]
    executes: ResourceDependency[Mapping[str, Execute]]
    _contexts: dict[str, RunContext] = PrivateAttr(default_factory=dict)
    _ledger: Any = PrivateAttr(default=None)
    _step: Context | None = PrivateAttr(default=None)
    _retry: ExitStack = PrivateAttr(default_factory=ExitStack)

    def open(self, context: Context | SensorEvaluationContext, source: str) -> RunContext:
        """Return the run context of a source, opening it on the first call.

        It can read the bucket only if the step requires the source's S3.
        """
        if isinstance(context, SensorEvaluationContext):
            run = f"sensor {context.sensor_name}"
        else:
            run = context.run.run_id
            self._step = context
        self._retry.close()
        self._ledger = context.resources.caf_ledger
        if source not in self._contexts:
            self._contexts[source] = wiring.open_run_context(
                self.settings,
                source,
                run=run,
                ledger=self._ledger.get(),
                store=context.resources.caf_store.open,
                objects=UnavailableSource(
                    "the staged file that this step needs is not in "
                    f"{self.settings.staging_folder}, and the step cannot read the bucket of "
                    f"'{source}'",
                    hint="set `staging` to a folder that all steps of a run share; run the "
                    "partition from caf_chunk on, which packs the chunk again",
                ),
                ended=self.ended,
                waiting=Announcer(self._log),
            )
            if not isinstance(context, SensorEvaluationContext):
                # Runs of the UI and of asset backfills lack the tags of our jobs.
                tags = {SOURCE_TAG: source}
                if RETRY_STRATEGY_TAG not in context.run.tags:
                    tags[RETRY_STRATEGY_TAG] = ALL_STEPS
                if worker := _run_process(context, self._contexts[source].holder):
                    tags |= process_tags(worker)
                context.instance.add_run_tags(run, tags)
        run_context = self._contexts[source]
        s3 = getattr(context.resources, s3_key(source), None)
        if s3 is None:
            return run_context
        settings, waits = run_context.settings, run_context.waits
        return replace(
            run_context,
            lazy_objects=Lazy(lambda: wiring.open_source(settings, source, waits, s3.get_client())),
        )

    def note_error(self, context: Context, source: str, error: CafError) -> None:
        """Until the next attempt begins, if there is one, the run waits for it."""
        self.on_error(error)
        op = context if isinstance(context, OpExecutionContext) else context.op_execution_context
        retries = op.op_def.retry_policy.max_retries if op.op_def.retry_policy else 0
        if not error.permanent and op.retry_number < retries and source in self._contexts:
            wait = self._contexts[source].waits.waiting(
                f"the next attempt ({error})", ends_by="it begins in a few seconds"
            )
            self._retry.enter_context(wait)

    def _log(self, line: str) -> None:
        from sqlalchemy.exc import SQLAlchemyError

        # Dagster's storage may be away; showing waits must not fail the run.
        with suppress(DagsterError, SQLAlchemyError, OSError):
            if self._step:
                self._step.log.info(line)

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        self._retry.close()
        for run_context in self._contexts.values():
            run_context.waits.close()
        if self._ledger:
            self._ledger.close()  # again, since `waits` may have used it after its own teardown


def _run_process(context: Context, step: Holder) -> Holder | None:
    # The process whose end ends the run; None for executors that are not Dagster's own, or that
    # start steps elsewhere. The parent of an in-process run is the code server, which proves
    # nothing.
    executor = context.job_def.executor_def
    name = executor.name
    if executor is multi_or_in_process_executor:  # the run's config chooses
        execution: Any = context.run.run_config.get("execution") or {}
        name = "in_process" if "in_process" in (execution.get("config") or {}) else _MULTIPROCESS
    if name in _IN_PROCESS:
        return step
    return parent_process(step.run) if name == _MULTIPROCESS else None


def attempt_step(context: Context, source: str, step: Callable[[RunContext], T]) -> T | None:
    """Return a step's result like `failures.attempt`."""
    run: RunResource = context.resources.caf_run
    return attempt(
        context,
        lambda: run.executes.get(source, run_step)(
            context, lambda: step(run.open(context, source))
        ),
        lambda error: run.note_error(context, source, error),
    )


def build_resources(
    settings: Settings,
    keys: AssetKeys = DEFAULT_KEYS,
    executes: Mapping[str, Execute] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the resources by key."""
    return {
        LEDGER: LedgerResource(settings=settings),
        STORE: StoreResource(settings=settings),
        RUN: RunResource(
            settings=settings,
            ended=ignore,
            on_error=ignore,
            asset_keys=keys,
            executes=executes,
        ),
        **{s3_key(name): S3SourceResource.of(source) for name, source in settings.sources.items()},
    }
