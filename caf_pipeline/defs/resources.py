"""Resources: what a run needs besides its config. They only build the domain's objects."""

from collections.abc import Callable, Sequence

from dagster import ConfigurableResource, DagsterInstance, InitResourceContext, ResourceDependency
from pydantic import PrivateAttr

from caf_pipeline import wiring
from caf_pipeline.context import Workplace
from caf_pipeline.defs.dead_runs import process_tags
from caf_pipeline.defs.run_log import Context, RunLog
from caf_pipeline.errors import CafError
from caf_pipeline.ledger.postgres import Ledger
from caf_pipeline.settings import Settings
from caf_pipeline.waits import Listener, Wait


def ignore_progress(objects: int, size_bytes: int) -> None:
    """Tell nobody of objects and bytes packed."""


def ignore_upload(size_bytes: int) -> None:
    """Tell nobody of bytes sent."""


def ignore_waits(waits: Sequence[Wait]) -> None:
    """Show no waits but in Dagster and the ledger."""


def ignore_error(error: CafError) -> None:
    """Tell nobody but Dagster of an error."""


class LedgerResource(ConfigurableResource[Ledger]):
    """The ledger: opened by the first step of a run that asks, closed when the run ends."""

    settings: ResourceDependency[Settings]
    _ledger: Ledger | None = PrivateAttr(default=None)

    def get(self) -> Ledger:
        """Return the open ledger.

        Raises:
            LedgerUnreachable.
        """
        if self._ledger is None:
            self._ledger = wiring.open_ledger(self.settings)
        return self._ledger

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        """Close the ledger's connections, where it was opened."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None


class SharedLedger(LedgerResource):
    """An open ledger that outlives the run, of a process that does many."""

    shared: ResourceDependency[Ledger]

    def get(self) -> Ledger:
        """Return it."""
        return self.shared


class Pipeline(ConfigurableResource["Pipeline"]):
    """Opens a source's workplace for a step.

    Attributes:
        progress: told objects and bytes as they are packed, as differences.
        upload_progress: told bytes as they are sent, as differences.
        on_error: told an error of a step before Dagster makes text of it.
        waiting: told what a run waits for.
    """

    settings: ResourceDependency[Settings]
    ledger: LedgerResource
    progress: ResourceDependency[Callable[[int, int], None]]
    upload_progress: ResourceDependency[Callable[[int], None]]
    on_error: ResourceDependency[Callable[[CafError], None]]
    waiting: ResourceDependency[Listener]
    _open: dict[tuple[str, str], Workplace] = PrivateAttr(default_factory=dict)
    _logs: dict[tuple[str, str], RunLog] = PrivateAttr(default_factory=dict)

    def open_in(self, context: Context, source: str) -> Workplace:
        """Return the workplace of a source for a step, whose log says what is waited for."""
        key = source, context.run.run_id
        if key not in self._logs:
            self._logs[key] = RunLog(source, context.run.run_id, context.instance)
        self._logs[key].follow(context)
        return self.open(source, run=context.run.run_id, instance=context.instance)

    def open(self, source: str, *, run: str, instance: DagsterInstance | None = None) -> Workplace:
        """Return the workplace of a source for one run; the second call of the run returns the first one's.

        Args:
            source: its name.
            run: the Dagster run that works, which becomes the holder of leases; a sensor names itself.
            instance: where the run is tagged with this process, so that it can be told when that is dead.
        """
        if (source, run) not in self._open:
            from caf_pipeline.defs.source_resource import S3SourceResource  # noqa: PLC0415 - dagster_aws takes 3 s to load

            client = S3SourceResource.of(self.settings.source(source)).get_client()
            work = wiring.open_workplace(
                self.settings,
                source,
                run=run,
                ledger=self.ledger.get(),
                client=client,
                progress=self.progress,
                upload_progress=self.upload_progress,
                waiting=self._listener(source, run),
            )
            if instance is not None:
                instance.add_run_tags(run, process_tags(work.holder))
            self._open[source, run] = work
        return self._open[source, run]

    def _listener(self, source: str, run: str) -> Listener:
        log = self._logs.get((source, run))

        def told(waits: Sequence[Wait]) -> None:
            self.waiting(waits)
            if log is not None:
                log(waits)

        return told

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        """Close the stores of the workplaces that were opened."""
        self._logs.clear()
        while self._open:
            _, work = self._open.popitem()
            wiring.close_store(work.store)


def pipeline_resource(
    settings: Settings,
    *,
    progress: Callable[[int, int], None] = ignore_progress,
    upload_progress: Callable[[int], None] = ignore_upload,
    on_error: Callable[[CafError], None] = ignore_error,
    waiting: Listener = ignore_waits,
) -> Pipeline:
    """Return the resource that every op, check and sensor takes as `pipeline`."""
    return Pipeline(
        settings=settings,
        ledger=LedgerResource(settings=settings),
        progress=progress,
        upload_progress=upload_progress,
        on_error=on_error,
        waiting=waiting,
    )
