"""What a command opens that works on chunks: one source's run context, the store."""

from collections.abc import Iterator
from contextlib import contextmanager

from caf_pipeline.cli.opening import RUN
from caf_pipeline.cli.terminal import note
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.processes import this_process
from caf_pipeline.run_context import RunContext
from caf_pipeline.run_wiring import open_run_context, open_store
from caf_pipeline.settings import Settings
from caf_pipeline.source.protocol import ObjectSource
from caf_pipeline.store.protocol import ChunkStore
from caf_pipeline.waits import Announcer, Waits


@contextmanager
def opened_store(settings: Settings, ledger: Ledger) -> Iterator[ChunkStore]:
    """Open the store, whichever it is, while the context lasts."""
    store = open_store(settings, ledger, this_process(RUN), Waits(Announcer(note)))
    try:
        yield store
    finally:
        store.close()


@contextmanager
def opened_run_context(
    settings: Settings,
    ledger: Ledger,
    source: str,
    objects: ObjectSource | None = None,
    *,
    register: bool = True,
) -> Iterator[RunContext]:
    """Open a source's run context while the context lasts; its objects are those in S3 where no
    others are given.

    The ledger learns of the source, unless `register` is False.
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
    try:
        yield context
    finally:
        context.close()
