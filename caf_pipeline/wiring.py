"""Opens what readers need: look-ups in the ledger, a reader of chunks, the archive.

`run_wiring` opens the rest. A process that only reads does not load it, and starts sooner.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from caf_pipeline.encryption.opening import OpeningReader
from caf_pipeline.ledger.database import database_of, waiting_for_database
from caf_pipeline.ledger.lookup import Lookup
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.waits import Waits

if TYPE_CHECKING:
    from caf_pipeline.retrieval.archive import Archive


def open_lookup(settings: Settings, waits: Waits | None = None) -> Lookup:
    """Open look-ups in the ledger, and create missing tables.

    `waits` reports when the database does not answer, and while tables are created. Raises
    LedgerUnreachable, or LedgerError if the database cannot be used. No message has the password.
    """
    waits = waits or Waits()
    with waiting_for_database(settings, waits):
        lookup = Lookup(database_of(settings))
        lookup.bring_up(waits)
    return lookup


def open_reader(
    settings: Settings,
    lookup: Lookup,
    waits: Waits | None = None,
    *,
    ask_passphrase: Callable[[], str] | None = None,
) -> OpeningReader:
    """Return a reader of the configured store's chunks, which opens encrypted ones.

    It has no wallet. `ask_passphrase` is for an identity file that needs it.
    """
    stored = _open_stored(settings, lookup, waits)
    return OpeningReader(
        stored, lookup.chunk_header, settings.encryption, ask_passphrase=ask_passphrase
    )


def _open_stored(settings: Settings, lookup: Lookup, waits: Waits | None) -> ChunkReader:
    if settings.store.kind == "jackal":
        # A store in a folder does not load the network.
        from caf_pipeline.store.jackal.read import open_jackal_reader  # noqa: PLC0415

        return open_jackal_reader(
            settings.jackal, lookup.seen_height, lookup.provider_records, waits
        )
    from caf_pipeline.store.directory import DirectoryReader  # noqa: PLC0415

    return DirectoryReader(settings.store.folder, lookup.folder_store)


def open_archive(settings: Settings | None = None) -> "Archive":
    """Open the archive for other programs, with the settings of `caf` by default.

    Raises:
        SettingsError: A setting is wrong, or there is no caf.toml.
        LedgerUnreachable: The database does not answer.
        LedgerError: The database cannot be used.
        TypeError: `settings` is something else, such as a path.
    """
    from caf_pipeline.retrieval.archive import Archive  # noqa: PLC0415 - commands do not need it

    if settings is None:
        settings = load_settings()
    elif not isinstance(settings, Settings):
        raise TypeError(f"{settings!r}: use open_archive(load_settings(path)) to read a file")
    with contextlib.ExitStack() as opened:
        lookup = open_lookup(settings)
        opened.callback(lookup.close)
        store = open_reader(settings, lookup)
        opened.callback(store.close)
        return Archive(lookup, store, opened.pop_all().close)
