"""Opens what commands need, and reports on stderr what they wait for.

Imports nothing heavy: `wiring` loads what is opened.
"""

from __future__ import annotations

import os
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final

from caf_pipeline import wiring
from caf_pipeline.cli.terminal import ask_passphrase, note
from caf_pipeline.errors import SettingsError, StagingError, UsageError
from caf_pipeline.waits import Announcer, Waits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from caf_pipeline.encryption.opening_reader import OpeningReader
    from caf_pipeline.ledger.ledger import Ledger
    from caf_pipeline.ledger.lookup import Lookup
    from caf_pipeline.ledger.records import LocationLookups
    from caf_pipeline.run_context import RunContext
    from caf_pipeline.settings import Settings
    from caf_pipeline.source.protocol import ObjectSource
    from caf_pipeline.system.ranges import FileRanges

RUN: Final = "caf"
"""The holder of a command's leases, as other runs show it."""


def chosen_source(settings: Settings, name: str | None, *, hint: str) -> str:
    """Return `name`, or the only source of the settings.

    Raises:
        SettingsError: There is no such source, or none at all.
        UsageError: No name is given, and there are several sources. It has the hint.
    """
    if name is None and not settings.sources:
        raise SettingsError("the settings have no source", hint="add [sources.NAME] to caf.toml")
    if name is None and len(settings.sources) > 1:
        raise UsageError(f"name a source: {', '.join(sorted(settings.sources))}.", hint=hint)
    chosen = next(iter(settings.sources)) if name is None else name
    settings.source(chosen)
    return chosen


@contextmanager
def opened_lookup(settings: Settings) -> Iterator[Lookup]:
    """Yield look-ups in the ledger."""
    with closing(wiring.open_lookup(settings, Waits(Announcer(note)))) as lookup:
        yield lookup


@contextmanager
def opened_ledger(settings: Settings) -> Iterator[Ledger]:
    """Yield the open ledger."""
    with closing(wiring.open_ledger(settings, Waits(Announcer(note)))) as ledger:
        yield ledger


@contextmanager
def opened_reader(settings: Settings, lookup: Lookup, source: str) -> Iterator[OpeningReader]:
    """Yield a reader of a source's archived chunks.

    Raises:
        SettingsError: There is no such source.
        NotLocated: The ledger has nothing of the source.
    """
    require_archived(settings, lookup, source)
    waits = Waits(Announcer(note))
    reader = wiring.open_reader(settings, lookup, waits, ask_passphrase=ask_passphrase)
    with closing(reader):
        yield reader


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
    context = wiring.open_run_context(
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
            wiring.record_space(settings, ledger, context.store)


# --- sources


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
        # Loaded here because few commands meet an empty source.
        from caf_pipeline.retrieval.reader import nothing_archived  # noqa: PLC0415

        raise nothing_archived(name)


# --- files


@contextmanager
def opened_ranges(words: Sequence[str]) -> Iterator[FileRanges]:
    """Open a FILE (one word) or an archived object (SOURCE and KEY) for reading in ranges.

    Only an archived object needs settings and a database. Raises UsageError for more than two
    words, and like `open_ranges` and `retrieval.fetch`.
    """
    if len(words) > 2:
        raise UsageError(
            f"{len(words)} arguments do not name a file.",
            hint="Give FILE, or SOURCE and KEY of an archived object.",
        )
    if len(words) == 1:
        with wiring.open_file(words[0]) as file:
            yield file
        return
    from caf_pipeline.retrieval.object_ranges import ObjectRanges  # noqa: PLC0415
    from caf_pipeline.retrieval.reader import fetch  # noqa: PLC0415
    from caf_pipeline.settings import load_settings  # noqa: PLC0415

    source, key = words
    settings = load_settings()
    with opened_lookup(settings) as lookup, opened_reader(settings, lookup, source) as store:
        yield ObjectRanges(fetch(lookup, store, source, key, suggest=True))


@contextmanager
def replacing(path: Path, *inputs: str) -> Iterator[None]:
    """Translate OSErrors while `path` is written.

    Raises:
        UsageError: `path` exists and is not a regular file, or is one of the inputs.
        StagingError: It cannot be written.
    """
    try:
        if path.exists():
            if not path.is_file():
                raise UsageError(f"{str(path)!r} is not a file that can be replaced.")
            if any(os.path.exists(name) and path.samefile(name) for name in inputs):
                raise UsageError(
                    f"{str(path)!r} would replace what is read.", hint="Name another file."
                )
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StagingError(
            f"{str(path)!r} cannot be written: {error.strerror}.",
            hint="Name a file in a folder with room.",
        ) from error
