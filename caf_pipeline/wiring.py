"""Opens what reading needs, as the settings say: look-ups of the ledger, what reads chunks, the
archive.

`run_wiring` opens the rest. A process that only reads loads none of it, and starts sooner.
"""

import contextlib
from typing import TYPE_CHECKING

from caf_pipeline.ledger.database import database_of, waiting_for_database
from caf_pipeline.ledger.lookup import Lookup
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.waits import Waits

if TYPE_CHECKING:
    from caf_pipeline.retrieval.archive import Archive


def open_lookup(settings: Settings, waits: Waits | None = None) -> Lookup:
    """Return the look-ups of the ledger that the settings name, with its tables.

    `waits` says it while the database does not answer, and while its tables are made.

    Raises: LedgerUnreachable, LedgerError: it cannot be used. The message names the database
        without its password.
    """
    waits = waits or Waits()
    with waiting_for_database(settings, waits):
        lookup = Lookup(database_of(settings))
        lookup.bring_up(waits)
    return lookup


def open_reader(settings: Settings, lookup: Lookup, waits: Waits | None = None) -> ChunkReader:
    """Open what reads chunks of the store that the settings name.

    It has no wallet, and posts and uploads nothing.
    """
    if settings.store.kind == "jackal":
        from caf_pipeline.store.jackal.read import open_jackal_reader  # noqa: PLC0415 - a folder needs no network

        return open_jackal_reader(
            settings.jackal, lookup.seen_height, lookup.provider_records, waits
        )
    from caf_pipeline.store.directory import DirectoryReader  # noqa: PLC0415 - only one of the two is ever needed

    return DirectoryReader(settings.store.folder, lookup.folder_store)


def open_archive(settings: Settings | None = None) -> "Archive":
    """Open what is archived, for programs beside `caf`: by the settings, else by those that `caf`
    would take here.

    Raises: SettingsError: one of them cannot be used. LedgerUnreachable, LedgerError: the database
        cannot. TypeError: it is a path.
    """
    from caf_pipeline.retrieval.archive import Archive  # noqa: PLC0415 - the commands need none

    if settings is None:
        settings = load_settings()
    elif not isinstance(settings, Settings):  # "", too: others would be read than were meant
        raise TypeError(
            f"{settings!r} is no settings: open_archive(load_settings(path)) reads those of a file"
        )
    with contextlib.ExitStack() as opened:
        lookup = open_lookup(settings)
        opened.callback(lookup.close)
        store = open_reader(settings, lookup)
        opened.callback(store.close)
        return Archive(lookup, store, opened.pop_all().close)
