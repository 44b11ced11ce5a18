"""The run context: a source, the settings, the run, and ports that are opened at first use."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.encryption.opening_reader import OpeningReader
from caf_pipeline.errors import NotLocated, StagingError
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.records import Lease
from caf_pipeline.settings import Settings, SourceSettings
from caf_pipeline.source.protocol import ObjectSource
from caf_pipeline.store.protocol import ChunkStore
from caf_pipeline.system.processes import Holder
from caf_pipeline.system.secret_files import make_private
from caf_pipeline.throttle import Throttle
from caf_pipeline.waits import Waits

T = TypeVar("T")


class Lazy(Generic[T]):
    """A value that is created at first use and closed once. Thread-safe."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], None] | None = None) -> None:
        """If `close` is None, the caller closes the value."""
        self._make = make
        self._close = close
        self._made: list[T] = []
        self._lock = threading.RLock()

    @classmethod
    def of(cls, value: T) -> "Lazy[T]":
        return cls(lambda: value)

    def get(self) -> T:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]

    @property
    def is_open(self) -> bool:
        return bool(self._made)

    def close(self) -> None:
        """Another `get` creates a new value."""
        with self._lock:
            values, self._made = self._made, []
        if self._close:
            for value in values:
                self._close(value)


def _no_end(state: ChunkState) -> None: ...


@dataclass(frozen=True)
class RunContext:
    """The parts that every step of a run works with.

    Attributes:
        ended: Receives `located` or `empty` when this run moves a chunk to that state.
        throttle: The operator's controls. None: no pause and no limits.
        waits: Reports what the run waits for, and how far it is.
    """

    source: str
    settings: Settings
    holder: Holder
    lazy_objects: Lazy[ObjectSource]
    lazy_store: Lazy[ChunkStore]
    lazy_ledger: Lazy[Ledger]
    ended: Callable[[ChunkState], None] = field(default=_no_end)
    throttle: Throttle | None = None
    waits: Waits = field(default_factory=Waits)

    @property
    def objects(self) -> ObjectSource:
        return self.lazy_objects.get()

    @property
    def store(self) -> ChunkStore:
        return self.lazy_store.get()

    @cached_property
    def opened(self) -> OpeningReader:
        """Encrypted chunks need an identity."""
        return OpeningReader(self.store, self.ledger.lookup.chunk_header, self.settings.encryption)

    @property
    def ledger(self) -> Ledger:
        return self.lazy_ledger.get()

    def close(self) -> None:
        self.lazy_objects.close()
        self.lazy_store.close()
        self.waits.close()
        self.lazy_ledger.close()

    @property
    def source_settings(self) -> SourceSettings:
        return self.settings.source(self.source)

    @property
    def all_versions(self) -> bool:
        return self.source_settings.versions == "all"

    @property
    def address(self) -> str:
        """Endpoint, bucket and prefix, without secrets."""
        return address_of(self.source_settings)

    @cached_property
    def archive_id(self) -> str:
        """Raises NotLocated before the source is registered."""
        archive_id = self.ledger.sources.archive_id(self.source)
        if archive_id is None:
            raise NotLocated(
                f"the ledger has no source '{self.source}', so it has no archive id",
                hint="take an inventory of it first",
            )
        return archive_id

    def lease(self, name: str, *, attempt: bool = False) -> AbstractContextManager[Lease]:
        """See `Leases.hold`."""
        return self.ledger.leases.hold(name, self.holder, waits=self.waits, attempt=attempt)

    def wait_while_paused(self, check: Callable[[], None]) -> None:
        """Calls `check` at least once, which may raise to end the wait."""
        if self.throttle is None:
            check()
        else:
            self.throttle.wait_while_paused(check)

    def inventories(self) -> Path:
        """Created if missing."""
        return _folder(self.settings.home / "inventories" / self.source)

    def plans(self) -> Path:
        """Created if missing."""
        return _folder(self.settings.home / "plans" / self.source)

    def kept_locations(self) -> Path:
        """A cache, which may be deleted any time."""
        return self.settings.home / "located" / self.source

    def staging(self) -> Path:
        """Created if missing."""
        return _folder(self.settings.staging_folder)


def address_of(settings: SourceSettings) -> str:
    """Return a source's endpoint, bucket and prefix."""
    return f"{settings.endpoint_url or 'aws'}/{settings.bucket}/{settings.prefix}"


def _folder(path: Path) -> Path:
    try:
        make_private(path)
    except OSError as error:
        raise StagingError(
            f"the folder {path} cannot be created: {error.strerror}",
            hint="move what is there, or change 'home' or 'staging'",
        ) from error
    return path
