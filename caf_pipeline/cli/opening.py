"""What a command opens and closes again: the ledger, one source's run context, the network.

Nothing here is loaded before a command asks for it: `caf --help` must not wait for a database driver.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from caf_pipeline.cli.terminal import note
from caf_pipeline.errors import CafError, NotLocated, StagingError, UsageError
from caf_pipeline.waits import Announcer, Waits

if TYPE_CHECKING:
    from caf_pipeline.ledger.postgres import Ledger
    from caf_pipeline.run_context import RunContext
    from caf_pipeline.settings import Settings
    from caf_pipeline.source.protocol import ObjectSource
    from caf_pipeline.store.jackal.write import JackalStore
    from caf_pipeline.store.protocol import ChunkStore, TransactionLog
    from caf_pipeline.system.ranges import FileRanges

RUN: Final = "caf"
"""The holder of a command's leases, which another run shows in 'held by run …'."""


@dataclass(frozen=True, slots=True)
class Network:
    """Jackal as a command sees it. `account` is the wallet's name in the ledger."""

    ledger: "Ledger"
    store: "JackalStore"
    log: "TransactionLog"
    account: str


def load_settings() -> "Settings":
    """Return the settings of caf.toml and the environment; what reads them is most of what a command on files would load.

    Raises:
        SettingsError: one of them cannot be used.
    """
    from caf_pipeline import settings  # noqa: PLC0415

    return settings.load_settings()


def dagster_command(name: str) -> Callable[..., Any]:
    """Return a function of `dagster_host` by its entry point, since the command line does not import that folder.

    Raises:
        CafError: the installation is older than this source code, and does not have the entry point.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415  takes longer to load than most commands

    for entry in entry_points(group="caf_pipeline.commands", name=name):
        command: Callable[..., Any] = entry.load()
        return command
    raise CafError(f"the installation has no entry point '{name}'", hint="install caf-pipeline again, as `make setup` does")


@contextmanager
def opened_ledger(settings: "Settings") -> "Iterator[Ledger]":
    """Open the ledger while the context lasts."""
    from caf_pipeline.wiring import open_ledger  # noqa: PLC0415  loaded by the commands that use it

    with closing(open_ledger(settings, Waits(Announcer(note)))) as ledger:
        yield ledger


@contextmanager
def opened_store(settings: "Settings", ledger: "Ledger") -> "Iterator[ChunkStore]":
    """Open the store, whichever it is, while the context lasts."""
    from caf_pipeline.ledger.processes import this_process  # noqa: PLC0415
    from caf_pipeline.wiring import open_store  # noqa: PLC0415

    store = open_store(settings, ledger, this_process(RUN), Waits(Announcer(note)))
    try:
        yield store
    finally:
        store.close()


@contextmanager
def opened_archive(settings: "Settings", ledger: "Ledger", source: str) -> "Iterator[ChunkStore]":
    """Open the store to read what was archived of a source, while the context lasts.

    Raises:
        SettingsError: there is no such source. NotLocated: the ledger has nothing of it.
    """
    require_archived(settings, ledger, source)
    with opened_store(settings, ledger) as store:
        yield store


@contextmanager
def opened_ranges(words: Sequence[str]) -> "Iterator[FileRanges]":
    """Open what two words or one name, while the context lasts: an archived object by SOURCE and KEY, or a FILE.

    Raises:
        UsageError: more words. Else as `open_ranges`, and as `opened_archive` and `fetch`.
    """
    if len(words) > 2:
        raise UsageError(
            f"{len(words)} arguments do not name a file.", hint="Give FILE, or SOURCE and KEY of an archived object."
        )
    if len(words) == 1:
        from caf_pipeline.cli.archives import open_s3  # noqa: PLC0415
        from caf_pipeline.system.ranges import open_ranges  # noqa: PLC0415

        with open_ranges(words[0], open_s3) as file:
            yield file
        return
    from caf_pipeline.retrieval.object_ranges import ObjectRanges  # noqa: PLC0415
    from caf_pipeline.retrieval.reader import fetch  # noqa: PLC0415

    source, key = words
    settings = load_settings()
    with opened_ledger(settings) as ledger, opened_archive(settings, ledger, source) as store:
        yield ObjectRanges(fetch(ledger, store, source, key))


@contextmanager
def replacing(path: Path, *read: str) -> Iterator[None]:
    """Write a file while the context lasts.

    Raises:
        UsageError: something else than a file stands there, or it is one of those that are read. StagingError: an OSError inside.
    """
    try:
        if path.exists():
            if not path.is_file():
                raise UsageError(f"{str(path)!r} is not a file that can be replaced.")
            if any(os.path.exists(one) and path.samefile(one) for one in read):
                raise UsageError(f"{str(path)!r} would replace what is read.", hint="Name another file.")
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StagingError(
            f"{str(path)!r} cannot be written: {error.strerror}.", hint="Name a file in a folder with room."
        ) from error


@contextmanager
def opened_run_context(
    settings: "Settings", ledger: "Ledger", source: str, objects: "ObjectSource | None" = None, *, register: bool = True
) -> "Iterator[RunContext]":
    """Open a source's run context while the context lasts; its objects are those in S3 where no others are given.

    The ledger learns of the source, unless `register` is False.
    """
    from caf_pipeline.wiring import open_run_context  # noqa: PLC0415

    context = open_run_context(
        settings, source, run=RUN, ledger=ledger, objects=objects, waiting=Announcer(note), register=register
    )
    try:
        yield context
    finally:
        context.close()


@contextmanager
def opened_network(settings: "Settings") -> Iterator[Network]:
    """Open Jackal while the context lasts.

    Raises:
        SettingsError: chunks are kept elsewhere, or the network's settings are incomplete.
    """
    from caf_pipeline.ledger.processes import this_process  # noqa: PLC0415
    from caf_pipeline.wiring import open_jackal  # noqa: PLC0415

    holder = this_process(RUN)
    with opened_ledger(settings) as ledger, closing(open_jackal(settings, ledger, holder, Waits(Announcer(note)))) as store:
        account = f"{settings.jackal.chain_id}/{store.wallet.address}"
        yield Network(ledger, store, ledger.transactions(holder), account)


def known_sources(settings: "Settings", ledger: "Ledger") -> list[str]:
    """Return the names of all sources of the settings and of the ledger."""
    return sorted({*ledger.sources(), *settings.sources})


def require_source(settings: "Settings", ledger: "Ledger", name: str) -> None:
    """Raise SettingsError, naming those that there are, where neither the settings nor the ledger have a source."""
    if name not in settings.sources and name not in (known := ledger.sources()):
        raise settings.unknown_source(name, known)


def require_archived(settings: "Settings", ledger: "Ledger", name: str) -> None:
    """Raise as `require_source`; NotLocated where the ledger has nothing of the source."""
    require_source(settings, ledger, name)
    if name not in ledger.sources():
        raise NotLocated(f"nothing of source '{name}' is archived yet", hint=f"caf run {name} archives it")
