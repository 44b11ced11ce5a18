"""The ledger's records, and the lookups that retrieval needs.

Ends are exclusive; times are aware and in UTC.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self
from urllib.parse import quote_from_bytes

from caf_pipeline.chunk_state import UNDER_WAY, ChunkState
from caf_pipeline.errors import UsageError
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.inventory.objects import S3Object, SkipReason, VersionCounts, is_supported
from caf_pipeline.records import Copy, PostedFile, PostRecord, Sample
from caf_pipeline.system.processes import Holder
from caf_pipeline.system.quantities import counted
from caf_pipeline.waits import Work

if TYPE_CHECKING:
    from caf_pipeline.caf.archive import Member
    from caf_pipeline.inventory.manifest import PartLocation


@dataclass(frozen=True, slots=True)
class OperatorControls:
    """The operator's orders. None: the settings apply.

    `paused` is the reason, or "". `bandwidth` is in bytes a second for all uploads (0: no limit),
    `spend_cap` in ujkl (-1: no cap). `uploads`: runs that upload now, at least 1.
    """

    paused: str = ""
    bandwidth: int | None = None
    spend_cap: int | None = None
    uploads: int = 1


@dataclass(frozen=True, slots=True)
class Skip:
    """A listed object that is not archived. An unsupported `key` is percent-encoded."""

    key: str
    object_version: str
    reason: SkipReason
    detail: str
    etag: str
    size_bytes: int
    last_modified: datetime | None = None

    @classmethod
    def of(cls, obj: S3Object, reason: SkipReason, detail: str) -> Self:
        return cls(
            recorded_key(obj),
            obj.object_version,
            reason,
            detail,
            obj.etag,
            obj.size_bytes,
            obj.last_modified,
        )


def recorded_key(obj: S3Object) -> str:
    """Return the key as the ledger stores it."""
    return obj.key.decode() if is_supported(obj.key) else quote_from_bytes(obj.key)


@dataclass(frozen=True, slots=True)
class ReadFailures:
    """Runs of a chunk that failed on an object."""

    times: int
    last_run: str


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A plan."""

    source: str
    sha256: bytes
    name: str
    snapshot: str
    folder: str
    object_count: int
    object_bytes: int


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A plan and its chunks by state."""

    record: PlanRecord
    created_at: datetime
    chunks: Mapping[ChunkState, int]


@dataclass(frozen=True, slots=True)
class ArchiveRate:
    """The median rate from one located chunk of a source to the next."""

    bytes_per_second: float
    chunks: int


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The header of an encrypted chunk: with an identity, it opens any range.

    `recipients` are those of the seal; empty if unknown. The header does not have them.
    """

    header: bytes
    nonce: bytes
    caf_size_bytes: int
    recipients: Sequence[str] = field(default=(), compare=False)

    @property
    def sha256(self) -> bytes:
        """SHA-256 of header and nonce, which the note of the post has, too."""
        return hashlib.sha256(self.header + self.nonce).digest()

    @property
    def payload_start(self) -> int:
        return len(self.header) + len(self.nonce)


@dataclass(frozen=True, slots=True)
class EncryptedChunk:
    """A sealed chunk with its header. `posting` is None before it is located."""

    name: str
    header: ChunkHeader
    posting: PostRecord | None


@dataclass(frozen=True, slots=True)
class SealRecord:
    """A chunk at its seal.

    `samples` have offsets in the stored bytes. `tail_sha256` covers `tail_start` to the end, in the
    CAF. `header` is None for a plain chunk.
    """

    caf_size_bytes: int
    stored_size_bytes: int
    member_count: int
    member_bytes: int
    skipped_count: int
    released_count: int
    merkle_root: bytes
    proof_type: int
    samples: Sequence[Sample]
    tail_start: int
    tail_sha256: bytes
    header: ChunkHeader | None = None
    recipients: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ForeignUse:
    """The use of an account by other programs since its last whole look, at `looked_at`.

    `transactions` are not of this ledger. `archives` were listed then; no source has them.
    """

    account: str
    looked_at: datetime | None
    transactions: int
    archives: Sequence[str]

    @property
    def sentence(self) -> str:
        """Empty without any."""
        parts = []
        if self.transactions:
            since = f" since {self.looked_at:%Y-%m-%d %H:%M} UTC" if self.looked_at else ""
            parts.append(f"{counted(self.transactions, 'transaction')}{since} not of this ledger")
        if self.archives:
            parts.append(
                f"{counted(len(self.archives), 'archive')} that no source of this ledger has "
                f"({', '.join(self.archives)})"
            )
        return (
            f"{' and '.join(parts)}; if another ledger archives the same objects with this wallet, "
            "both pay"
            if parts
            else ""
        )


@dataclass(frozen=True, slots=True)
class LaunchableChunk:
    """A chunk that needs a run; see `Chunk` for `failures`."""

    source: str
    address: str
    caf_file_id: int
    name: str
    state: ChunkState
    failures: Sequence[str]
    updated_at: datetime
    size_bytes: int
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteChunk:
    """A posted file that is a chunk of ours, or another program's file to adopt.

    Attributes:
        read_from: providers that returned the same bytes, all that were read.
        silent: why other listed providers did not answer.
        archive_id: id in its head and in the note of its post; None for a file to adopt.
        plan_sha256: None if not known. Then nothing counts as released.
        header: None if the file is not encrypted.
        unread: stored bytes that were read, unless the Merkle root of all bytes was compared.
        from_unknown_post: nothing shows that this ledger posted it.
    """

    file: PostedFile
    archive_id: str | None
    copies: Sequence[Copy]
    read_from: Sequence[str]
    silent: Mapping[str, str]
    wrong: Mapping[str, str]
    name: str
    source: str
    plan: str
    number: int
    snapshot: str
    plan_sha256: bytes | None
    object_count: int | None
    object_bytes: int | None
    member_count: int
    member_bytes: int
    skipped_count: int
    samples: Sequence[Sample]
    manifest: "Member | None"
    manifest_sha256: bytes
    part: "PartLocation | None" = None
    header: ChunkHeader | None = None
    unread: Sequence[Sample] = ()
    from_unknown_post: bool = False


@dataclass(frozen=True, slots=True)
class KnownArchive:
    """An archive in the store, and the source that it belongs to."""

    archive_id: str
    source: str
    address: str


@dataclass(frozen=True, slots=True)
class RemovableSource:
    """A source that may be removed.

    `intended` are the chunks that a run wanted to post. They are withdrawn first.
    """

    address: str
    plans: int
    chunks: int
    intended: Sequence[str] = ()


def chunk_lease(chunk: str) -> str:
    """The lease for working on a chunk."""
    return f"chunk/{chunk}"


def plan_lease(source: str) -> str:
    """The lease for planning a source and stating its current content."""
    return f"plan/{source}"


def deletion_lease(source: str) -> str:
    """The lease for finding what is safe to delete."""
    return f"deletion/{source}"


def account_lease(account: str) -> str:
    """The lease for signing an account's transactions."""
    return f"account/{account}"


def lists_lease(store: str) -> str:
    """The lease for reading a store's lists."""
    return f"lists/{store}"


def chunk_of_lease(name: str) -> str | None:
    """Return the chunk of a chunk's lease, if it is one."""
    chunk = name.removeprefix(chunk_lease(""))
    return chunk if name == chunk_lease(chunk) else None


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease. `live`: not expired by the database's clock."""

    name: str
    epoch: int
    holder: Holder
    expires_at: datetime
    live: bool


@dataclass(frozen=True, slots=True)
class LiveWork:
    """The work of a live process in a run."""

    source: str
    holder: Holder
    work: Work


@dataclass(frozen=True, slots=True)
class Reservation:
    """Staging room that is reserved for a chunk."""

    chunk: str
    state: ChunkState
    folder: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Numbers of a chunk's rows. `located_count` is how many locations it had when located."""

    caf_file_id: int
    chunk: str | None
    state: ChunkState | None
    locations: int
    pending: int
    claims: int
    member_count: int
    located_count: int
    adopted: bool


@dataclass(frozen=True, slots=True)
class NotArchived:
    """An identity of a key that is not located in a chunk in good standing.

    `chunk` claims it or had it; None if it is skipped. `state` is the chunk's, or the skip's
    reason. A plan may take a skipped object again at `retry_at`; None: not by itself. `is_over`:
    the skip no longer counts.
    """

    object_version: str
    chunk: str | None
    state: str
    detail: str = ""
    retry_at: datetime | None = None
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class LocatedRange:
    """Bytes `[start_byte, end_byte)` of a chunk, in CAF coordinates, and their SHA-256."""

    start_byte: int
    end_byte: int
    sha256: bytes
    chunk: str
    posting: PostRecord


@dataclass(frozen=True, slots=True)
class Currency:
    """How a location relates to the bucket's current content, by planned inventories.

    Attributes:
        chunk: the chunk under way that has the current content.
        state: that chunk's, or why the content is skipped; "" if it is not planned.
        gone_at: when the key was found to be gone.
        as_of: the time of the question; None: now. Unknown are content that was never planned, and
            when between two inventories a key was deleted.
    """

    is_current: bool
    chunk: str | None = None
    state: str = ""
    gone_at: datetime | None = None
    last_seen: datetime | None = None
    as_of: datetime | None = None

    @property
    def status(self) -> str:
        """`archived` replaces `current` for an earlier time: nothing later is known."""
        current = "archived" if self.as_of else "current"
        return current if self.is_current else "gone" if self.gone_at else "older"


def require_zone(as_of: datetime | None) -> None:
    """Raise UsageError if a time has no time zone."""
    if as_of is None:
        return
    if not isinstance(as_of, datetime):
        raise TypeError(f"as_of must be a datetime, not {as_of!r}")
    if as_of.tzinfo is None:
        raise UsageError(
            f"as_of {as_of.isoformat()} has no time zone", hint="pass a datetime with tzinfo"
        )


UNKNOWN_POST: Final = "unknown_post"
"""The status of a location if nothing shows that this ledger posted its chunk."""


@dataclass(frozen=True, slots=True)
class Location:
    """A location row and its chunk.

    `currency` is None if the lookup named a version, else `older_versions` counts the key's other
    located versions. `parts` are in order. `from_unknown_post`: see `Chunk`.
    """

    row: LocationRow
    chunk: str
    posting: PostRecord
    currency: Currency | None = None
    parts: Sequence[LocatedRange] = ()
    older_versions: int = 0
    from_unknown_post: bool = False

    @property
    def size_bytes(self) -> int:
        return self.row.end_byte - self.row.start_byte

    @property
    def status(self) -> str:
        if self.from_unknown_post:
            return UNKNOWN_POST
        return self.currency.status if self.currency else ""

    @property
    def ranges(self) -> Sequence[LocatedRange]:
        row = self.row
        return self.parts or [
            LocatedRange(row.start_byte, row.end_byte, row.sha256, self.chunk, self.posting)
        ]


class ListedObject(NamedTuple):
    """The part of a key's `Location` that a listing shows. A tuple: a listing has millions."""

    key: str
    size_bytes: int
    last_modified: datetime
    status: str
    etag: str
    object_version: str
    version_id: str | None
    sha256: bytes
    chunks: Sequence[str]
    older_versions: int = 0
    from_unknown_post: bool = False

    @classmethod
    def of(cls, location: Location) -> "ListedObject":
        row = location.row
        return cls(
            row.key,
            location.size_bytes,
            row.last_modified,
            location.status,
            row.etag,
            row.object_version,
            row.version_id,
            row.sha256,
            [part.chunk for part in location.ranges],
            location.older_versions,
            location.from_unknown_post,
        )


@dataclass(frozen=True, slots=True)
class InventoryRecord:
    """A planned inventory of keys greater than `after`, up to and including `until`."""

    source: str
    name: str
    taken_at: datetime
    after: bytes = b""
    until: bytes | None = None
    all_versions: bool = False
    beside: VersionCounts | None = None


@dataclass(frozen=True, slots=True)
class LocatedVersion:
    """A located identity, its first chunk, and the whole object's digests by algorithm."""

    key: str
    object_version: str
    etag: str
    size_bytes: int
    chunk: str
    checksums: Mapping[str, bytes] = field(hash=False)
    header_set: bytes | None = None


@dataclass(frozen=True, slots=True)
class Content:
    """Located objects by the last whole inventory: current, older, and gone from the bucket.

    `uncounted_objects` were located later, or written since shortly before it began. `left_out` is
    by filter.
    """

    inventory: str
    taken_at: datetime
    counted_at: datetime
    current_objects: int
    older_objects: int
    gone_objects: int
    uncounted_objects: int = 0
    left_out: Mapping[str, int] | None = None
    all_versions: bool = False
    beside: VersionCounts | None = None


WINDOWS_REQUIRED: Final = 2
"""A provider's first proof is of the first leaf, the next of a randomly drawn leaf."""


RowSet = tuple[str, int]
"""A name that each INSERT or DELETE of a chunk's rows changes, and the number of the rows."""


@dataclass(frozen=True, slots=True)
class KnownCopy:
    """A copy as the last check found it. `fault` is "" if its bytes were right.

    `windows` counts proof windows since it was last listed again or wrong.
    """

    provider: str
    proof: str
    listed: bool
    last_proven: int | None
    windows: int
    fault: str
    checked_at: datetime
    last_window: int | None = None


@dataclass(frozen=True, slots=True)
class LocatedCopies:
    """A located chunk, for comparison with the store's lists.

    `archive_id` is None if another program posted it. `place`: Merkle root, owner, start.
    """

    caf_file_id: int
    archive_id: str | None
    place: tuple[bytes, str, int]
    providers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """The result of one check of a copy. Texts are "" if all is well.

    Attributes:
        window: proof window that counts: that of a verified last proof, or the present window if
            all of a small file was read back; else None.
        apart: windows count despite a gap. Otherwise a gap restarts the count: a dropped provider
            may have joined again with a part of the bytes.
    """

    copy: Copy
    window: int | None = None
    fault: str = ""
    apart: bool = False
    unanswered: str = ""


@dataclass(frozen=True, slots=True)
class WaitingObjects:
    """Objects that wait for a larger chunk, at most until the first plan after `until`."""

    objects: int
    size_bytes: int
    until: datetime

    def as_json(self) -> dict[str, object]:
        return {"objects": self.objects, "bytes": self.size_bytes, "until": self.until.isoformat()}


@dataclass(frozen=True, slots=True)
class SourceAccount:
    """Sums over one source. `content` is None until a whole inventory was counted.

    `retried_at`: when the first skipped object may be planned again; None: never by itself.
    """

    source: str
    chunks: Mapping[ChunkState, int]
    located_objects: int
    located_bytes: int
    claimed_objects: int
    skipped: Mapping[SkipReason, int]
    content: Content | None = None
    waiting: WaitingObjects | None = None
    retried_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ChunkSums:
    """Sums over chunks. An object in several chunks counts once."""

    chunks: int = 0
    objects: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProgress:
    """How far a source is, at one moment of the database's clock. Times are None if never.

    Attributes:
        states: sums by state: of members if archived, else of planned objects.
        window_seconds: from the first chunk located in the last hour until `at`; 0 without any.
        recent: chunks located in that window, without the first.
        moved_at: when a chunk last changed its state, not counting plans and attempts to pack.
        oldest_planned_at: only chunks under way count.
        skipped_objects: without objects that wait for a larger chunk.
        noticed_at: of the oldest of `noticed_keys`.
        live: work of live processes, in all.
    """

    source: str
    at: datetime
    states: Mapping[ChunkState, ChunkSums]
    window_seconds: float
    recent: ChunkSums
    moved_at: datetime | None
    attempts: int
    oldest_planned_at: datetime | None
    skipped_objects: int
    registered_at: datetime | None
    inventory_at: datetime | None
    queue_read_at: datetime | None
    noticed_at: datetime | None
    noticed_keys: int
    messages_set_apart: int
    suspected_chunks: int
    looked_at: datetime | None
    located_at: datetime | None
    unknown_posts: int = 0
    live: Work = field(default_factory=Work)

    def sums(self, states: Iterable[ChunkState]) -> ChunkSums:
        sums = [self.states[state] for state in states if state in self.states]
        return ChunkSums(*map(sum, zip(*map(astuple, sums), strict=True)))

    @property
    def bytes_per_second(self) -> float | None:
        """None without two located chunks or without bytes."""
        if not self.recent.size_bytes or self.window_seconds <= 0:
            return None
        return self.recent.size_bytes / self.window_seconds

    @property
    def seconds_left(self) -> float | None:
        under_way = self.sums(UNDER_WAY)
        if not under_way.chunks:
            return 0.0
        rate = self.bytes_per_second
        return None if rate is None else under_way.size_bytes / rate


@dataclass(frozen=True, slots=True)
class MessageSetApart:
    """A message that is not only events of the source's bucket."""

    message_id: str
    body: bytes
    reason: str
    set_apart_at: datetime


class LocationLookups(Protocol):
    """Finds archived objects by source and key.

    `Lookup` implements and documents it.
    """

    def sources(self) -> Sequence[str]: ...

    def locate(
        self,
        source: str,
        key: str,
        object_version: str | None = None,
        *,
        as_of: datetime | None = None,
    ) -> Location | None: ...

    def locate_many(
        self,
        source: str,
        keys: Iterable[str],
        *,
        last_seen: bool = False,
        as_of: datetime | None = None,
    ) -> Mapping[str, Location]: ...

    def locate_versions(
        self, source: str, keys: Iterable[str]
    ) -> Mapping[str, Sequence[Location]]: ...

    def versions(self, source: str, key: str, limit: int) -> tuple[Sequence[LocationRow], int]: ...

    def not_archived(self, source: str, key: str) -> Sequence[NotArchived]: ...

    def archived_keys(self, source: str, start: str, end: str, limit: int) -> Sequence[str]: ...

    def spelled_in_any_case(self, source: str, key: str) -> Sequence[str]: ...

    def list_page(
        self, source: str, start: str, end: str, limit: int
    ) -> tuple[Sequence[ListedObject], str | None]: ...

    def count_not_archived(
        self, source: str, plain: tuple[str, str | None], encoded: tuple[str, str | None]
    ) -> tuple[int, int]: ...

    def header_sets(self, names: Collection[bytes]) -> Mapping[bytes, ObjectHeaders]: ...

    def chunk_header(self, merkle_root: bytes) -> ChunkHeader | None: ...

    def encrypted_chunk(self, source: str) -> str | None: ...

    def chunks_with_log_times(self, chunks: Collection[str]) -> Collection[str]: ...

    def log_times(
        self, locations: Sequence[Location]
    ) -> Mapping[int, tuple[int | None, int | None]]: ...
