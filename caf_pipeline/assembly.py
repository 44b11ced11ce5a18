"""Joins steps and adapters: opens the ledger, the store and a source as the settings say.

Not here: settings (`settings`), what is done with the parts (`planning`, `archive`, `retrieve`).
"""

from collections.abc import Callable
from typing import Any

from caf_pipeline.database import open_database
from caf_pipeline.directory_store import DirectoryStore
from caf_pipeline.interfaces import ChunkStore, Ledger
from caf_pipeline.ledger import PostgresLedger
from caf_pipeline.processes import this_process
from caf_pipeline.settings import Settings
from caf_pipeline.workplace import Workplace


def open_ledger(settings: Settings) -> PostgresLedger:
    """Open the ledger, its schema brought up to date."""
    return PostgresLedger(open_database(settings))


def open_store(settings: Settings) -> ChunkStore:
    """Open the store that the settings name."""
    return DirectoryStore(settings.store.folder)


def open_workplace(
    settings: Settings,
    source: str,
    *,
    run: str,
    ledger: Ledger | None = None,
    client: Any = None,  # noqa: ANN401 - boto3's clients have no type of their own
    progress: Callable[[int, int], None] | None = None,
) -> Workplace:
    """Open everything that the steps of one source need.

    Args:
        settings: all settings.
        source: the source's name.
        run: who works, e.g. a Dagster run id.
        ledger: an open ledger to use.
        client: a boto3 S3 client to use.
        progress: see `Workplace`.
    """
    from caf_pipeline.s3 import open_s3_source  # noqa: PLC0415 - half a second that reading the ledger does not need

    objects = open_s3_source(source, settings.source(source), attempts=settings.packing.request_attempts, client=client)
    work = Workplace(
        source=source,
        settings=settings,
        objects=objects,
        store=open_store(settings),
        ledger=ledger or open_ledger(settings),
        holder=this_process(run),
        **({"progress": progress} if progress else {}),
    )
    work.ledger.register_source(source, work.archive_id, work.address)
    return work
