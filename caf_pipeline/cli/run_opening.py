"""Opens the run context of a source, or the store."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from caf_pipeline.cli.opening import RUN
from caf_pipeline.cli.terminal import note
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.processes import this_process
from caf_pipeline.run_context import RunContext
from caf_pipeline.run_wiring import open_run_context, open_store, record_space
from caf_pipeline.settings import Settings
from caf_pipeline.source.protocol import ObjectSource
from caf_pipeline.store.protocol import ChunkStore
from caf_pipeline.waits import Announcer, Waits


@contextmanager
def opened_store(settings: Settings, ledger: Ledger) -> Iterator[ChunkStore]:
    """Yield the configured store. Then record when the space on Jackal ends."""
    holder = this_process(RUN)
    with closing(open_store(settings, ledger, holder, Waits(Announcer(note)))) as store:
        yield store
        record_space(settings, ledger, store)


@contextmanager
def opened_run_context(
    settings: Settings,
    ledger: Ledger,
    source: str,
    objects: ObjectSource | None = None,
    *,
    register: bool = True,
) -> Iterator[RunContext]:
    """Yield the run context of a source.

    `objects` are by default those in S3; `register` adds the source to the ledger. If the command
    used the store, the ledger records when the space on Jackal ends.
    """
    context = open_run_context(
        settings,
        source,
        run=RUN,
        ledger=ledger,
        objects=objects,
        waiting=Announcer(note),
        register=register,
    )
    with closing(context):
        yield context
        if context.lazy_store.is_open:
            record_space(settings, ledger, context.store)
