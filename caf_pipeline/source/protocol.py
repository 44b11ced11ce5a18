"""What a source of objects is: it lists them, and reads each by its exact identity.

Keys are bytes, ends are exclusive, times are aware and in UTC. Every implementation passes the
contract suite `caf_pipeline_tests/contracts/object_source.py`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    """S3's own checksum over a full object: "sha256", "sha1", "crc32", "crc32c" or "crc64nvme", and
    its raw digest.
    """

    algorithm: str
    digest: bytes

    @property
    def text(self) -> str:
        """The checksum as manifest and ledger record it: the algorithm, a colon, and the digest in
        hexadecimal digits.
        """
        return f"{self.algorithm}:{self.digest.hex()}"


@dataclass(frozen=True, slots=True)
class ObjectHead:
    """The answer to a HEAD.

    `checksums` has the digest of each checksum over the full object, by its algorithm.
    """

    headers: ObjectHeaders
    checksums: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """Some bytes of one object, `len(body)` of them, and the headers that came along.

    `checksum` is S3's own, where the part is all of the object and there is one.
    """

    body: Buffer
    headers: ObjectHeaders
    checksum: Checksum | None = None


@dataclass(slots=True)
class ReportCounts:
    """What an inventory report has beside the source's objects, and of what kind these are.

    Counted are the report's rows: a snapshot keeps one of those that are repeated, and here each
    counts.

    Attributes: left_out: older versions and delete markers that no row was made of, since the
        settings ask for current versions. outside_prefix: objects whose keys do not begin with the
        source's prefix. multipart: objects of the source that were uploaded in parts, where the
        report tells. storage_classes, encryption: objects of the source by these; "unknown" where
        the report does not tell.
    """

    left_out: VersionCounts = field(default_factory=VersionCounts)
    outside_prefix: int = 0
    multipart: int = 0
    storage_classes: Counter[str] = field(default_factory=Counter)
    encryption: Counter[str] = field(default_factory=Counter)

    def add(self, other: "ReportCounts") -> None:
        """Add the counts of other rows."""
        self.left_out += other.left_out
        self.outside_prefix += other.outside_prefix
        self.multipart += other.multipart
        self.storage_classes += other.storage_classes
        self.encryption += other.encryption


@dataclass(frozen=True, slots=True)
class InventoryReport:
    """What a bucket held at one time, as S3 itself wrote it down.

    Attributes: url: of the report's folder. taken_at: when S3 began to read the bucket for it.
        size_bytes: of its files. keeps_versions: what `ObjectSource.keeps_versions` told when it
        was opened, by which its rows are read. fetch: fetches the files into a folder, several at
        once, and yields as Parquet files of SNAPSHOT_SCHEMA what they have
            of the source, without any order, along with the counts of each. Raises ReportRefused
            where a file is missing or damaged, StagingError where there is no room, and what a
            listing raises.
    """

    url: str
    taken_at: datetime
    file_count: int
    size_bytes: int
    keeps_versions: bool | None
    fetch: Callable[[Path], Iterator[tuple[Path, ReportCounts]]]


class LastPage(list[S3Object]):
    """The last page of a listing, where the source knows without another request that no page
    follows.
    """


class PendingRead(Protocol):
    """The GET of all of an object, under way; no thread waits for it."""

    def has_failed(self) -> bool:
        """Tell whether it is known already that it gives no part."""
        ...

    def part(self) -> ObjectPart | None:
        """Wait for the end and return all of the object, as `ObjectSource.read` does.

        None where the GET failed; a call of `ObjectSource.read` then tries again, or raises why it
        failed.
        """
        ...

    def cancel(self) -> None:
        """Cancel the GET; `part` must not be called afterwards."""
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
        """Yield pages of current objects whose key is greater than `after` (bytes), in the order of
        the listing.

        Delete markers and older versions are left out, unless `versions` asks for them; keys keep
        the source's prefix. No page is empty, and `max_pages` counts those that are yielded; one
        that ends the listing is a `LastPage`. With `versions`, further ones follow that have the
        rest of the last key's versions. With `in_order` keys ascend by their bytes; those of
        versions of a key are equal. `by_version` is what `keeps_versions` told, for all parts of
        one listing; where it is None, it is asked.

        Raises: SourceDenied, BucketMissing, SourceUnreachable, ListingRefused: nothing was yielded
            of the page at fault. SettingsError: the settings ask for every version, and the bucket
            keeps none. ListingUnordered: with `in_order`, a page has a key that is not greater than
            the one before, or one before where
                the listing was to begin, or the source refuses to begin there.
        """
        ...

    def keeps_versions(self) -> bool | None:
        """Tell whether the bucket keeps versions, so that objects are listed with their version
        ids; None: it may not be asked.

        Costs a request.

        Raises:
            SettingsError: see `list_pages`. What else a listing raises.
        """
        ...

    def open_report(self, name: str = "") -> InventoryReport:
        """Return the newest complete inventory report whose name begins so; a name is a time, e.g.

        `2026-11-21T01-00Z`.

        Nothing but its manifest is read.

        Raises: SettingsError: the source's settings name no folder of reports. UsageError: it is no
            name, nor the beginning of one that has a whole day. ReportRefused: there is none, or it
            cannot be used for this source. What a listing raises.
        """
        ...

    def find_reports(self, since: datetime | None) -> Sequence[str]:
        """Return the names of complete inventory reports that are named after a later minute than
        this, the newest first.

        A name is a label: what a report's time is, `open_report` tells.

        Raises:
            What a listing raises.
        """
        ...

    def read(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart:
        """Read `[start_byte, end_byte)` of exactly this identity, by version id or If-Match.

        `(0, obj.size_bytes)` is a plain GET. The part has `end_byte - start_byte` bytes, or this
        raises. The whole range is held in memory: ask for large objects in ranges.

        Raises: ObjectUnavailable: with the skip reason, where a retry in this run cannot help.
            ObjectReadFailed: after all retries. SourceDenied, BucketMissing: nothing of the source
            can be read.
        """
        ...

    def begin(self, obj: S3Object) -> PendingRead | None:
        """Ask for all of an object, once, and return at once; None where only `read` can.

        Nothing is raised.
        """
        ...

    def full_object_checksum(self, obj: S3Object) -> Checksum | None:
        """Return S3's own checksum of the object where it covers the full object, else None: for
        objects that are read in parts.

        Asks the network only where the listing named a checksum.
        """
        ...

    def read_headers(self, obj: S3Object) -> ObjectHead:
        """Return headers and checksums of exactly this identity, written at `obj.last_modified`, by
        one HEAD.

        Raises:
            As `read`; ObjectUnavailable with `changed` where it was written again since.
        """
        ...

    def clock(self) -> datetime:
        """Return the time by the source's own clock, which its LastModified are of.

        Costs a request.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExistingObject:
    """An object that a bucket has already.

    Attributes:
        size_bytes: None where the server does not say it.
        etag: which content it is; a read of it asks for this one. "" where the server says none.
        sha256: S3's own, where it covers the whole object.
    """

    size_bytes: int | None
    etag: str
    headers: ObjectHeaders
    sha256: bytes | None


class KeyTaken(Exception):
    """A bucket has an object of this key, which was not to be replaced."""


class ObjectUpload(Protocol):
    """An object that is written in parts. It appears with `complete`, and not before."""

    def write(self, piece: bytes) -> None:
        """Take further bytes; raises as `ObjectTarget.put`."""
        ...

    def mark(self) -> object:
        """Return the present position, for `rewind`."""
        ...

    def rewind(self, mark: object) -> None:
        """Drop all bytes that were written since a mark."""
        ...

    def complete(self, *, replace: bool) -> bool:
        """Let the object appear; as `ObjectTarget.put`."""
        ...

    def abort(self) -> None:
        """Remove what was uploaded so far, where the bucket still answers."""
        ...


class ObjectTarget(Protocol):
    """A bucket, and what all keys begin with there, that objects are written to.

    Safe to call from several threads.

    Every call raises SourceDenied, BucketMissing or SourceUnreachable where no other object could
    be written either, and NotRestored where this one cannot be.
    """

    def place(self, key: str) -> str:
        """Return the key's address in the bucket, for people; raises NotRestored where it is too
        long to be one.
        """
        ...

    def keys_between(self, first: str, last: str) -> Collection[str] | None:
        """Return the keys behind the first one up to and including the last that are there, by a
        few pages of a listing.

        None where that does not tell: there are many more, the listing is not in the order of
        bytes, or it is forbidden.
        """
        ...

    def find(self, key: str) -> ExistingObject | None:
        """Return the object that is there; None where none is."""
        ...

    def read(self, key: str, there: ExistingObject) -> Iterator[bytes]:
        """Yield the bytes of what `find` found."""
        ...

    def put(
        self, key: str, body: bytes, sha256: bytes, headers: ObjectHeaders, *, replace: bool
    ) -> bool:
        """Write an object at once; tell whether the bucket compared its SHA-256 before the object
        appeared.

        Raises:
            KeyTaken: another object is there, which is not to be replaced. See the class.
        """
        ...

    def upload(self, key: str, size_bytes: int, headers: ObjectHeaders) -> ObjectUpload:
        """Begin an object that is too large to be held in memory."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """Something happened to a key. What the bucket has of it now, only the bucket says.

    Attributes:
        key: as bytes.
        sequencer: orders the events of one key, upper-case hexadecimal; "" where there is none.
        restored: whether a copy of it has come out of cold storage, for some days.
    """

    key: bytes
    sequencer: str
    restored: bool = False


@dataclass(frozen=True, slots=True)
class QueueMessage:
    """A message that was received and not deleted yet.

    Attributes: message_id: the same each time that it is received. receipt: by which it is deleted.
        body: as it came. events: of the source's keys; none where it is a test, or is about other
        keys of the bucket. wrong: why it, or a part of it, is not an event notification of the
        source's bucket; "" where it is one.
    """

    message_id: str
    receipt: str
    body: bytes
    events: Sequence[ObjectEvent]
    wrong: str


class EventQueue(Protocol):
    """A queue of S3's event notifications: any may come twice, late, and in any order.

    Safe to call from several threads.
    """

    def receive(self) -> Sequence[QueueMessage]:
        """Return some messages, which come again after a minute unless they are deleted; none where
        there are none.

        Raises:
            SourceUnreachable, SourceDenied, SourceError: the queue cannot be asked.
        """
        ...

    def delete(self, messages: Sequence[QueueMessage]) -> None:
        """Delete messages that are durable elsewhere. One that could not be deleted comes again.

        Raises:
            As `receive`.
        """
        ...


class UnavailableSource:
    """The objects of a source that is not asked: S3 need not be there, and every method raises
    SourceError with `why`.
    """

    def __init__(self, why: str, *, hint: str = "") -> None:
        self._why, self._hint = why, hint

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise SourceError(self._why, hint=self._hint)

    list_pages = keeps_versions = open_report = find_reports = _refuse
    read = begin = full_object_checksum = read_headers = clock = _refuse
