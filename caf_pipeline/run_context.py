"""The run context: a source, the settings, the run, and ports that are opened at first use."""

import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.encryption.opening import OpeningReader
from caf_pipeline.errors import StagingError
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import Holder
from caf_pipeline.settings import Settings, SourceSettings
from caf_pipeline.source.protocol import ObjectSource
from caf_pipeline.store.protocol import ChunkStore, Lease
from caf_pipeline.throttle import Throttle
from caf_pipeline.waits import Waits

T = TypeVar("T")


class Lazy(Generic[T]):
    """A value that is created at first use and closed once. Thread-safe."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], None] | None = None) -> None:
        """Store the functions. If `close` is None, the caller closes the value."""
        self._make = make
        self._close = close
        self._made: list[T] = []
        self._lock = threading.RLock()

    @classmethod
    def of(cls, value: T) -> "Lazy[T]":
        """Wrap an existing value, which its owner closes."""
        return cls(lambda: value)

    def get(self) -> T:
        """Return the value."""
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]

    def close(self) -> None:
        """Close the value if it was created. Another `get` creates a new value."""
        with self._lock:
            values, self._made = self._made, []
        if self._close:
            for value in values:
                self._close(value)


def _no_progress(objects: int, size_bytes: int) -> None:
    """Ignore the progress."""


def _no_upload_progress(size_bytes: int) -> None:
    """Ignore the progress."""


def _no_end(state: ChunkState) -> None:
    """Ignore the end."""


@dataclass(frozen=True)
class RunContext:
    """The parts that every step of a run works with.

    Attributes:
        source: Name of the source.
        settings: All settings.
        holder: The run.
        lazy_objects: See `objects`.
        lazy_store: See `store`.
        lazy_ledger: See `ledger`.
        progress: Receives packed objects and bytes, as differences.
        upload_progress: Receives uploaded bytes, as differences. Every copy counts.
        ended: Receives `located` or `empty` when this run moves a chunk to that state.
        throttle: The operator's controls. None: no pause and no limits.
        waits: Reports what the run waits for.
    """

    source: str
    settings: Settings
    holder: Holder
    lazy_objects: Lazy[ObjectSource]
    lazy_store: Lazy[ChunkStore]
    lazy_ledger: Lazy[Ledger]
    progress: Callable[[int, int], None] = field(default=_no_progress)
    upload_progress: Callable[[int], None] = field(default=_no_upload_progress)
    ended: Callable[[ChunkState], None] = field(default=_no_end)
    throttle: Throttle | None = None
    waits: Waits = field(default_factory=Waits)

    @property
    def objects(self) -> ObjectSource:
        """The source's objects, opened at first use."""
        return self.lazy_objects.get()

    @property
    def store(self) -> ChunkStore:
        """The store, opened at first use."""
        return self.lazy_store.get()

    @cached_property
    def opened(self) -> OpeningReader:
        """The store's chunks in CAF coordinates. Encrypted ones need an identity."""
        return OpeningReader(self.store, self.ledger.lookup.chunk_header, self.settings.encryption)

    @property
    def ledger(self) -> Ledger:
        """The ledger, opened at first use."""
        return self.lazy_ledger.get()

    def close(self) -> None:
        """Close what this context opened."""
        self.lazy_objects.close()
        self.lazy_store.close()
        self.lazy_ledger.close()

    @property
    def source_settings(self) -> SourceSettings:
        """The settings of this source."""
        return self.settings.source(self.source)

    @property
    def all_versions(self) -> bool:
        """Whether all versions of a key are archived."""
        return self.source_settings.versions == "all"

    @property
    def address(self) -> str:
        """Endpoint, bucket and prefix, without secrets."""
        return address_of(self.source_settings)

    @property
    def archive_id(self) -> str:
        """32 hex digits that identify the source's name and address."""
        return archive_id_of(self.source, self.address)

    def lease(self, name: str) -> AbstractContextManager[Lease]:
        """Hold a lease while the context lasts. See `Leases.hold`."""
        return self.ledger.leases.hold(name, self.holder, waits=self.waits)

    def wait_while_paused(self, check: Callable[[], None]) -> None:
        """Wait until the operator resumes.

        Calls `check` at least once. It may raise to end the wait.
        """
        if self.throttle is None:
            check()
        else:
            self.throttle.wait_while_paused(check)

    def inventories(self) -> Path:
        """Return the folder of this source's snapshots. Creates it."""
        return _folder(self.settings.home / "inventories" / self.source)

    def plans(self) -> Path:
        """Return the folder of this source's plans. Creates it."""
        return _folder(self.settings.home / "plans" / self.source)

    def kept_locations(self) -> Path:
        """Return the folder with the cache of this source's locations. May be deleted any time."""
        return self.settings.home / "located" / self.source

    def staging(self) -> Path:
        """Return the staging folder. Creates it."""
        return _folder(self.settings.staging_folder)


def address_of(settings: SourceSettings) -> str:
    """Return a source's endpoint, bucket and prefix."""
    return f"{settings.endpoint_url or 'aws'}/{settings.bucket}/{settings.prefix}"


def archive_id_of(source: str, address: str) -> str:
    """Return the id of a source's archive. It depends on the name and the address."""
    return hashlib.sha256(f"caf-pipeline archive\0{source}\0{address}".encode()).hexdigest()[:32]


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StagingError(
            f"the folder {path} cannot be created: {error.strerror}",
            hint="move what is there, or change 'home' or 'staging'",
        ) from error
    return path
