"""Opens look-ups in the ledger, and a reader of archived chunks."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final

from caf_pipeline.cli.terminal import note
from caf_pipeline.encryption.opening import OpeningReader
from caf_pipeline.errors import NotLocated
from caf_pipeline.ledger.lookup import Lookup
from caf_pipeline.ledger.protocol import LocationLookups
from caf_pipeline.settings import Settings
from caf_pipeline.waits import Announcer, Waits
from caf_pipeline.wiring import open_lookup, open_reader

RUN: Final = "caf"
"""The holder of a command's leases, as other runs show it."""


@contextmanager
def opened_lookup(settings: Settings) -> Iterator[Lookup]:
    """Yield look-ups in the ledger."""
    with closing(open_lookup(settings, Waits(Announcer(note)))) as lookup:
        yield lookup


@contextmanager
def opened_reader(settings: Settings, lookup: Lookup, source: str) -> Iterator[OpeningReader]:
    """Yield a reader of a source's archived chunks.

    Raises:
        SettingsError: There is no such source.
        NotLocated: The ledger has nothing of the source.
    """
    require_archived(settings, lookup, source)
    with closing(open_reader(settings, lookup, Waits(Announcer(note)))) as reader:
        yield reader


def known_sources(settings: Settings, lookup: LocationLookups) -> list[str]:
    """Return the sources in the settings or the ledger, sorted."""
    return sorted({*lookup.sources(), *settings.sources})


def require_source(settings: Settings, lookup: LocationLookups, name: str) -> None:
    """Raise SettingsError for an unknown source."""
    if name not in settings.sources and name not in (recorded := lookup.sources()):
        raise settings.unknown_source(name, recorded)


def require_archived(settings: Settings, lookup: LocationLookups, name: str) -> None:
    """Raise SettingsError for an unknown source, NotLocated for an empty one."""
    require_source(settings, lookup, name)
    if name not in lookup.sources():
        raise NotLocated(
            f"nothing of source '{name}' is archived yet", hint=f"caf run {name} archives it"
        )
