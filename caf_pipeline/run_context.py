"""What one step works with: a source, its settings, the run that works, and the three ports, each
opened when it is asked for.
"""

import hashlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from caf_pipeline.chunk_state import ChunkState
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
    """A value that is made when it is first asked for, and closed once. Safe for several
    threads.
    """

    def __init__(self, make: Callable[[], T], close: Callable[[T], None] | None = None) -> None:
        """Take what makes the value, and what closes it. Without `close`, somebody else closes
        it.
        """
        self._make = make
        self._close = close
        self._made: list[T] = []
        self._lock = threading.RLock()

    @classmethod
    def of(cls, value: T) -> "Lazy[T]":
        """Return a value that was made by somebody else, who also closes it."""
        return cls(lambda: value)

    def get(self) -> T:
        """Return the value."""
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]

    def close(self) -> None:
        """Close the value if it was made; `get` would make another one."""
        with self._lock:
            made, self._made = self._made, []
        if self._close:
            for value in made:
                self._close(value)


def _no_progress(objects: int, size_bytes: int) -> None:
    """Ignore the progress."""


def _no_upload_progress(size_bytes: int) -> None:
    """Ignore the progress."""


def _no_end(state: ChunkState) -> None:
    """Ignore the end."""


@dataclass(frozen=True)
class RunContext:
    """One source's parts, as every step gets them.

    Attributes: source: the source's name. settings: all settings. holder: the run that works.
        lazy_objects: see `objects`. lazy_store: see `store`. lazy_ledger: see `ledger`. progress:
        told objects and bytes as they are packed, as differences. upload_progress: told bytes as
        they are sent to the store, as differences; every copy counts. ended: told `located` or
        `empty` once this run, and no other, has moved a chunk there. throttle: what the operator
        ordered; without one nothing is ever held up. waits: where it is said what the run waits
        for.
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
        """The source's objects, opened now if they are not open."""
        return self.lazy_objects.get()

    @property
    def store(self) -> ChunkStore:
        """The store, opened now if it is not open."""
        return self.lazy_store.get()

    @property
    def ledger(self) -> Ledger:
        """The ledger, opened now if it is not open."""
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
        """Whether every version of a key is an object to archive, and not only the current one."""
        return self.source_settings.versions == "all"

    @property
    def address(self) -> str:
        """Which bucket and prefix this is, without any secret."""
        return address_of(self.source_settings)

    @property
    def archive_id(self) -> str:
        """An opaque name of the archive, the same for the same source at the same address: 32 hex
        digits.
        """
        return archive_id_of(self.source, self.address)

    def lease(self, name: str) -> AbstractContextManager[Lease]:
        """Hold a lease while the context lasts: see `Leases.hold`."""
        return self.ledger.leases.hold(name, self.holder, waits=self.waits)

    def wait_while_paused(self, check: Callable[[], None]) -> None:
        """Return once the operator has nothing paused; `check` is called at least once, and may
        raise to end the wait.
        """
        if self.throttle is None:
            check()
        else:
            self.throttle.wait_while_paused(check)

    def inventories(self) -> Path:
        """Return the folder of this source's snapshots, made if it is missing."""
        return _folder(self.settings.home / "inventories" / self.source)

    def plans(self) -> Path:
        """Return the folder of this source's plans, made if it is missing."""
        return _folder(self.settings.home / "plans" / self.source)

    def kept_locations(self) -> Path:
        """Return where what the ledger has located of this source is kept as files; they may be
        removed at any time.
        """
        return self.settings.home / "located" / self.source

    def staging(self) -> Path:
        """Return the staging folder, made if it is missing."""
        return _folder(self.settings.staging_folder)


def address_of(settings: SourceSettings) -> str:
    """Return which bucket and prefix a source is."""
    return f"{settings.endpoint_url or 'aws'}/{settings.bucket}/{settings.prefix}"


def archive_id_of(source: str, address: str) -> str:
    """Return the id of a source's archive, which changes with its name and with its address."""
    return hashlib.sha256(f"caf-pipeline archive\0{source}\0{address}".encode()).hexdigest()[:32]


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StagingError(
            f"the folder {path} cannot be made: {error.strerror}",
            hint="free the path or set 'home' or 'staging' elsewhere",
        ) from error
    return path
