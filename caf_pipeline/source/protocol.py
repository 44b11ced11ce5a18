"""The interfaces of a source, a restore target and an event queue.

Keys are bytes, range ends are exclusive, times are aware and in UTC. Every `ObjectSource` passes
`caf_pipeline_tests/contracts/object_source.py`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NoReturn, Protocol

from typing_extensions import Buffer

from caf_pipeline.errors import SourceError
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.objects import S3Object, VersionCounts


@dataclass(frozen=True, slots=True)
class Checksum:
    """S3's checksum over a full object. `algorithm` is as in `new_digest`."""

    algorithm: str
    digest: bytes

    @property
    def text(self) -> str:
        """The form in manifests and ledger: `<algorithm>:<hexadecimal digest>`."""
        return f"{self.algorithm}:{self.digest.hex()}"


@dataclass(frozen=True, slots=True)
class ObjectHead:
    """The answer to a HEAD. `checksums` are digests over the full object, by algorithm."""

    headers: ObjectHeaders
    checksums: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """A range of an object. Only a whole object may have S3's `checksum`."""

    body: Buffer
    headers: ObjectHeaders
    checksum: Checksum | None = None


@dataclass(slots=True)
class ReportCounts:
    """Statistics of a report's rows, in which objects may repeat.

    `multipart` is 0, and `encryption` "unknown", if the report lacks the column.
    """

    left_out: VersionCounts = field(default_factory=VersionCounts)
    outside_prefix: int = 0
    multipart: int = 0
    storage_classes: Counter[str] = field(default_factory=Counter)
    encryption: Counter[str] = field(default_factory=Counter)

    def add(self, other: "ReportCounts") -> None:
        self.left_out += other.left_out
        self.outside_prefix += other.outside_prefix
        self.multipart += other.multipart
        self.storage_classes += other.storage_classes
        self.encryption += other.encryption


@dataclass(frozen=True, slots=True)
class InventoryReport:
    """A listing of a bucket that S3 itself wrote.

    `taken_at` is when S3 began to read the bucket. `fetch` downloads into a folder, several files
    concurrently. It yields files of SNAPSHOT_SCHEMA with objects in any order, and raises
    ReportRefused, StagingError and the errors of a listing.
    """

    url: str
    taken_at: datetime
    file_count: int
    size_bytes: int
    keeps_versions: bool | None
    fetch: Callable[[Path], Iterator[tuple[Path, ReportCounts]]]


class LastPage(list[S3Object]):
    """A page that the source knows to be the last."""


class PendingRead(Protocol):
    """A GET that is under way. No thread waits for it."""

    def waiting(self) -> AbstractContextManager[object]:
        """Return a context in which to wait. It reports a GET that stalls."""
        ...

    def has_failed(self) -> bool: ...

    def was_refused(self) -> bool:
        """Return whether the server asked for fewer requests."""
        ...

    def part(self) -> ObjectPart | None:
        """Wait for the answer; None if the GET failed.

        `ObjectSource.read` then retries it or raises the error.
        """
        ...

    def cancel(self) -> None:
        """`part` must not be called afterwards."""
        ...


class ObjectSource(Protocol):
    """A bucket and prefix to archive. Safe to call from several threads."""

    def list_pages(
        self,
        *,
        after: bytes = b"",
        max_pages: int | None = None,
        in_order: bool = False,
        versions: bool = False,
        by_version: bool | None = None,
    ) -> Iterator[Sequence[S3Object]]:
        """Yield pages of current objects whose keys are greater than `after`.

        Keys include the source's prefix. No page is empty. `versions` adds older versions and
        delete markers; pages beyond `max_pages` then complete the last key. `in_order` requires
        keys that ascend by their bytes. `by_version` is the result of `keeps_versions`, the same
        for all parts of a listing; None asks the bucket.

        Raises:
            SourceDenied, BucketMissing, SourceUnreachable, ListingRefused: nothing of the failing
                page was yielded.
            SettingsError: the settings ask for every version, and the bucket keeps none.
            ListingUnordered: with `in_order`, keys do not ascend, or the source refuses `after`.
        """
        ...

    def keeps_versions(self) -> bool | None:
        """Return whether the bucket keeps versions; None if the credentials may not ask.

        Costs a request. Raises the errors of a listing.
        """
        ...

    def open_report(self, name: str = "") -> InventoryReport:
        """Return the newest complete report whose name begins with `name`.

        A name is a time such as `2026-11-21T01-00Z`. Reads the manifest only. Raises the errors of
        a listing. Raises SettingsError without a folder of reports, UsageError if `name` is not at
        least a day, and ReportRefused without a usable report.
        """
        ...

    def find_reports(self, since: datetime | None) -> Sequence[str]:
        """Return the names of complete reports after the minute of `since`, newest first.

        Raises the errors of a listing.
        """
        ...

    def read(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart:
        """Read `[start_byte, end_byte)` of exactly this identity, by version id or If-Match.

        The part has the requested size, and is held in memory.

        Raises:
            ObjectUnavailable: a retry in this run cannot help; has the skip reason.
            ObjectReadFailed: all retries failed.
            SourceDenied, BucketMissing: nothing of the source can be read.
        """
        ...

    def begin(
        self, obj: S3Object, start_byte: int, end_byte: int, ended: Callable[[], None]
    ) -> PendingRead | None:
        """Start a GET of a range as in `read`; None if only `read` can read it. Never raises.

        `ended` is called from any thread when the GET has ended, perhaps before this returns.
        """
        ...

    def full_object_checksum(self, obj: S3Object) -> Checksum | None:
        """Return S3's checksum over an object that is read in parts, or None.

        Sends a request only if the listing named a checksum.
        """
        ...

    def read_headers(self, obj: S3Object) -> ObjectHead:
        """Return headers and checksums of exactly this identity, by one HEAD.

        Raises as `read`; reason `changed` if the time differs from `obj.last_modified`.
        """
        ...

    def clock(self) -> datetime:
        """Return the time of the clock that sets LastModified. Costs a request."""
        ...


@dataclass(frozen=True, slots=True)
class ExistingObject:
    """An object that a restore target already has.

    `etag` pins the content for `ObjectTarget.read`. Size and ETag are None and "" if the server
    reports none. `sha256` is S3's own over the whole object.
    """

    size_bytes: int | None
    etag: str
    headers: ObjectHeaders
    sha256: bytes | None


class KeyTaken(Exception):
    """The key already has an object, which must not be replaced."""


class ObjectUpload(Protocol):
    """A multipart upload. The object appears with `complete`, and not before.

    `write` and `complete` raise as `ObjectTarget.put`.
    """

    def write(self, piece: bytes) -> None: ...

    def mark(self) -> object: ...

    def rewind(self, mark: object) -> None:
        """Drop all bytes written after the mark."""
        ...

    def complete(self, *, replace: bool) -> bool:
        """Returns as `ObjectTarget.put`."""
        ...

    def abort(self) -> None: ...


class ObjectTarget(Protocol):
    """A bucket and key prefix to restore to. Safe to call from several threads.

    Raises SourceDenied, BucketMissing or SourceUnreachable if no object can be written, NotRestored
    if this object cannot.
    """

    def place(self, key: str) -> str:
        """Return the address for messages; raises NotRestored if the key is too long."""
        ...

    def keys_between(self, first: str, last: str) -> Collection[str] | None:
        """Return the keys after `first` up to and including `last`, from a few pages.

        None if there are more, or the listing is forbidden or not in byte order.
        """
        ...

    def find(self, key: str) -> ExistingObject | None: ...

    def read(self, key: str, existing: ExistingObject) -> Iterator[bytes]: ...

    def put(
        self, key: str, body: bytes, sha256: bytes, headers: ObjectHeaders, *, replace: bool
    ) -> bool:
        """Write in one request; raises KeyTaken if the key is taken and `replace` false.

        Returns whether the bucket compared its SHA-256 before the object appeared.
        """
        ...

    def upload(self, key: str, size_bytes: int, headers: ObjectHeaders) -> ObjectUpload: ...


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """A notification that a key changed. Only the bucket knows its current content.

    `sequencer` orders the events of a key: upper-case hexadecimal, or "". `restored`: a temporary
    copy came out of cold storage.
    """

    key: bytes
    sequencer: str
    restored: bool = False


@dataclass(frozen=True, slots=True)
class QueueMessage:
    """A message that was received and not yet deleted.

    `message_id` is the same when it is received again. `wrong` says why the message, or a part of
    it, is no notification of the source's bucket.
    """

    message_id: str
    receipt: str
    body: bytes
    events: Sequence[ObjectEvent]
    wrong: str


class EventQueue(Protocol):
    """S3's event notifications, which may arrive twice, late, and in any order.

    Safe to call from several threads. Both methods raise SourceUnreachable, SourceDenied or
    SourceError.
    """

    def receive(self) -> Sequence[QueueMessage]:
        """Return some messages, or none. Each returns after a minute unless deleted."""
        ...

    def delete(self, messages: Sequence[QueueMessage]) -> None:
        """A message that could not be deleted comes again."""
        ...


class UnavailableSource:
    """A source whose every method raises SourceError with `why`."""

    def __init__(self, why: str, *, hint: str = "") -> None:
        self._why, self._hint = why, hint

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise SourceError(self._why, hint=self._hint)

    list_pages = keeps_versions = open_report = find_reports = _refuse
    read = begin = full_object_checksum = read_headers = clock = _refuse
