"""What a command that reads opens and closes again: look-ups of the ledger, what reads archived
chunks.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final

from caf_pipeline.cli.terminal import note
from caf_pipeline.errors import NotLocated
from caf_pipeline.ledger.lookup import Lookup
from caf_pipeline.ledger.protocol import LocationLookups
from caf_pipeline.settings import Settings
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.waits import Announcer, Waits
from caf_pipeline.wiring import open_lookup, open_reader

RUN: Final = "caf"
"""The holder of a command's leases, which another run shows in 'held by run …'."""


@contextmanager
def opened_lookup(settings: Settings) -> Iterator[Lookup]:
    """Open the look-ups of the ledger while the context lasts."""
    with closing(open_lookup(settings, Waits(Announcer(note)))) as lookup:
        yield lookup


@contextmanager
def opened_reader(settings: Settings, lookup: Lookup, source: str) -> Iterator[ChunkReader]:
    """Open what reads the archived chunks of a source, while the context lasts.

    Raises:
        SettingsError: there is no such source. NotLocated: the ledger has nothing of it.
    """
    require_archived(settings, lookup, source)
    with closing(open_reader(settings, lookup, Waits(Announcer(note)))) as reader:
        yield reader


def known_sources(settings: Settings, lookup: LocationLookups) -> list[str]:
    """Return the names of all sources of the settings and of the ledger."""
    return sorted({*lookup.sources(), *settings.sources})


def require_source(settings: Settings, lookup: LocationLookups, name: str) -> None:
    """Raise SettingsError, naming those that there are, where neither the settings nor the ledger
    have a source.
    """
    if name not in settings.sources and name not in (known := lookup.sources()):
        raise settings.unknown_source(name, known)


def require_archived(settings: Settings, lookup: LocationLookups, name: str) -> None:
    """Raise as `require_source`; NotLocated where the ledger has nothing of the source."""
    require_source(settings, lookup, name)
    if name not in lookup.sources():
        raise NotLocated(
            f"nothing of source '{name}' is archived yet", hint=f"caf run {name} archives it"
        )
