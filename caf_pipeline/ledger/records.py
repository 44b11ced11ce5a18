"""What the ledger takes and gives. Ends are exclusive, times are aware and in UTC."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import quote_from_bytes

from caf_pipeline.chunk_state import UNDER_WAY, ChunkState, CopyState
from caf_pipeline.errors import StoredChunkMissing, UsageError
from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.inventory.objects import S3Object, SkipReason, VersionCounts, is_supported
from caf_pipeline.store.protocol import Copy, PostedFile, PostRecord, Sample
from caf_pipeline.waits import Wait

if TYPE_CHECKING:
    from caf_pipeline.caf.archive import Member
    from caf_pipeline.inventory.manifest import PartLocation


@dataclass(frozen=True, slots=True)
class OperatorControls:
    """What the operator has set, as it is now. None: not set, the settings hold.

    Attributes:
        paused: why everything is paused; "" where it is not.
        bandwidth: bytes a second for all uploads together, 0 for no limit.
        spend_cap: ujkl, -1 for no cap.
        uploads: runs that upload at this moment, who share the bandwidth; at least 1.
    """

    paused: str = ""
    bandwidth: int | None = None
    spend_cap: int | None = None
    uploads: int = 1


@dataclass(frozen=True, slots=True)
class Holder:
    """The run that holds a lease, and its process, by which another one on the same machine can
    tell whether it is alive.

    `boot_id` names the machine and its boot; `process_started` is the process's start time, since
    pids are reused.
    """

    run: str
    boot_id: str
    pid: int
    process_started: float


@dataclass(frozen=True, slots=True)
class Skip:
    """An object that was named and not archived.

    `key` is text: percent-encoded where the key is not supported.
    """

    key: str
    object_version: str
    reason: SkipReason
    detail: str
    etag: str
    size_bytes: int
    last_modified: datetime | None = None

    @classmethod
    def of(cls, obj: S3Object, reason: SkipReason, detail: str) -> Self:
        """Return the skip of an object of a snapshot."""
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
    """Return the key of an object as the ledger's tables have it."""
    return obj.key.decode() if is_supported(obj.key) else quote_from_bytes(obj.key)


@dataclass(frozen=True, slots=True)
class ReadFailures:
    """How many runs of a chunk failed on one object, and the last of these runs."""

    times: int
    last_run: str


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A plan as the ledger keeps it.

    `sha256` is the full hash over what it plans; `folder` holds its Parquet files.
    """

    source: str
    sha256: bytes
    name: str
    snapshot: str
    folder: str
    object_count: int
    object_bytes: int


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A plan as the ledger has it, when it was registered, and how many of its chunks are in each
    state.
    """

    record: PlanRecord
    created_at: datetime
    chunks: Mapping[ChunkState, int]


@dataclass(frozen=True, slots=True)
class ArchiveRate:
    """How fast chunks of a source were archived of late: the median over as many of them, from one
    located to the next.

    What passed before a chunk was planned does not count.
    """

    bytes_per_second: float
    chunks: int


@dataclass(frozen=True, slots=True)
class SealRecord:
    """What is known of a chunk when it is sealed. Sizes in bytes; `samples` in stored coordinates.

    `tail_sha256` is of what begins at `tail_start`, taken while packing: manifest, index and
    footer.
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


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk's row. Fields of a step that has not happened yet are None (counts and sizes: 0).

    `reason` says why it is parked, damaged or withdrawn; `checked_at` when the proof watch last
    looked at it; `read_back_at` when all of its stored bytes last came back from the store with its
    Merkle root, from a copy that was right ever since. `unanswered_at` is the time of a look in
    which a copy did not answer, None once a later look had all answers. `tail_start` and
    `tail_sha256` are those of the seal, None where it was rebuilt. A chunk of an object that is
    larger than a chunk has its `part` of `part_count`, from 1, and nothing else; 0 for all others.
    Where `part_abandoned`, another chunk gave up a part of the object, which these parts will never
    make up. An `adopted` one is another program's CAF file: it has no head and no manifest, and
    members that are no objects of the source. `copy_state` is the state of its copy in the store;
    None if it has none.
    """

    caf_file_id: int
    name: str
    source: str
    archive_id: str
    plan: str
    plan_folder: str
    number: int
    state: ChunkState
    epoch: int
    attempts: int
    object_count: int
    object_bytes: int
    expected_size_bytes: int
    caf_size_bytes: int
    stored_size_bytes: int
    member_count: int
    member_bytes: int
    skipped_count: int
    released_count: int
    merkle_root: bytes | None
    proof_type: int | None
    owner: str | None
    start: int | None
    samples: Sequence[Sample]
    reason: str
    updated_at: datetime
    located_at: datetime | None = None
    checked_at: datetime | None = None
    read_back_at: datetime | None = None
    tail_start: int | None = None
    tail_sha256: bytes | None = None
    part: int = 0
    part_count: int = 0
    part_abandoned: bool = False
    adopted: bool = False
    unanswered_at: datetime | None = None
    copy_state: CopyState | None = None

    @property
    def was_sealed(self) -> bool:
        """True if a seal or a rebuild wrote its counts.

        An empty or withdrawn chunk keeps them without a copy.
        """
        return self.merkle_root is not None or self.tail_sha256 is not None


def posting_of(chunk: Chunk) -> PostRecord:
    """Return where the store keeps a posted chunk."""
    if chunk.merkle_root is None or chunk.owner is None or chunk.start is None:
        raise StoredChunkMissing(f"chunk {chunk.name} is '{chunk.state}' and was not posted")
    return PostRecord(chunk.merkle_root, chunk.owner, chunk.start, chunk.stored_size_bytes)


@dataclass(frozen=True, slots=True)
class LaunchableChunk:
    """What is asked of a chunk before a run of it is launched.

    Attributes: address: its source's, as the ledger has it. size_bytes: its stored size, or what is
        expected. held: whether a lease on it has not run out: something works on it, or did within
        the last half minute.
    """

    source: str
    address: str
    caf_file_id: int
    name: str
    state: ChunkState
    size_bytes: int
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteChunk:
    """A posted file that is a chunk of ours and what it says of itself, or another program's that
    is adopted. Sizes in bytes.

    Attributes: file: what the store lists. copies: those that are listed. read_from: the providers
        that gave all that was read, the same. silent: why other listed ones did not, by provider.
        wrong: what is wrong with other ones, by provider: bytes that all copies agree on prove it.
        plan_sha256: of the plan, with the objects and bytes that were planned for this chunk; None
        where it does not tell. Then
            nothing counts as released: `object_count` is `member_count + skipped_count`.
        samples: as a seal would take them.
        manifest: where the manifest is in the file; None where it is adopted.
        manifest_sha256: of its bytes; b"" where it is adopted.
        part: the part of an object that it has, and nothing else; None where its members are whole
        objects.
    """

    file: PostedFile
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


@dataclass(frozen=True, slots=True)
class RemovableSource:
    """A source that may be removed. `plans` and `chunks` are numbers."""

    address: str
    plans: int
    chunks: int


def chunk_lease(chunk: str) -> str:
    """Return the name of the lease under which a chunk is worked on."""
    return f"chunk/{chunk}"


def plan_lease(source: str) -> str:
    """Return the name of the lease under which plans of a source are cut, and what is current is
    stated.
    """
    return f"plan/{source}"


def deletion_lease(source: str) -> str:
    """Return the name of the lease that a run holds while it finds out what of a source is safe to
    delete.
    """
    return f"deletion/{source}"


def account_lease(account: str) -> str:
    """Return the name of the lease under which an account's transactions are signed."""
    return f"account/{account}"


def lists_lease(store: str) -> str:
    """Return the name of the lease under which a store's lists are gone through."""
    return f"lists/{store}"


def chunk_of_lease(name: str) -> str | None:
    """Return the chunk that a lease of this name is on; None where it is on something else."""
    chunk = name.removeprefix(chunk_lease(""))
    return chunk if name == chunk_lease(chunk) else None


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease's row. `live` by the database's clock: whether it has not run out."""

    name: str
    epoch: int
    holder: Holder
    expires_at: datetime
    live: bool


@dataclass(frozen=True, slots=True)
class RunWait:
    """What a live run of a source waits for."""

    source: str
    run: str
    wait: Wait


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes of a staging folder that are reserved for a chunk."""

    chunk: str
    state: ChunkState
    folder: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """How many location rows, pending ones and claims name a chunk.

    `chunk` and `state` are None where the ledger has no such chunk. A restored chunk may have fewer
    locations than members: others had some of its objects already.
    """

    caf_file_id: int
    chunk: str | None
    state: ChunkState | None
    locations: int
    pending: int
    claims: int
    member_count: int
    restored: bool


@dataclass(frozen=True, slots=True)
class NotArchived:
    """What the ledger knows of an identity of a key that is not located in a chunk in good
    standing.

    Attributes: object_version: the identity. chunk: the chunk that claims it, or that had it; None
        where it is skipped. state: of that chunk; the reason of a skip. detail: of a skip; "" else.
        retry_at: when an object that is skipped may be planned again; None where it is not skipped,
        or never may by itself. is_over: whether it was skipped, and is no more: no inventory lists
        it, a filter leaves it out, or a chunk that claimed it
            since was given up.
    """

    object_version: str
    chunk: str | None
    state: str
    detail: str = ""
    retry_at: datetime | None = None
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class LocatedRange:
    """Bytes of a stored chunk, `[start_byte, end_byte)` in CAF coordinates, and their SHA-256."""

    start_byte: int
    end_byte: int
    sha256: bytes
    chunk: str
    posting: PostRecord


@dataclass(frozen=True, slots=True)
class Currency:
    """Whether a location is what the bucket has now of its key, as the planned inventories tell.

    Attributes: is_current: whether it is. chunk: the chunk under way that has the current content;
        `state` is its state. state: where there is no such chunk, the reason for which the current
        content is skipped; "" where it is not planned. gone_at: when the key was found to be gone;
        None where it is not. last_seen: when an inventory last listed a key that is gone; None
        where that is not known. as_of: the time that was asked for; None for now. Then all else is
        what is known up to that time, and what was in the
            bucket and was never planned, and when between two inventories a key was deleted, is not
            known.
    """

    is_current: bool
    chunk: str | None = None
    state: str = ""
    gone_at: datetime | None = None
    last_seen: datetime | None = None
    as_of: datetime | None = None

    @property
    def status(self) -> str:
        """`current`, `gone`, or `older` where the key has other content in the bucket now; of an
        earlier time `archived`, too.

        That says, instead of `current`, that nothing later is known.
        """
        current = "archived" if self.as_of else "current"
        return current if self.is_current else "gone" if self.gone_at else "older"


def require_zone(as_of: datetime | None) -> None:
    """Raise UsageError where a time has no zone, and TypeError where it is none."""
    if as_of is None:
        return
    if not isinstance(as_of, datetime):
        raise TypeError(f"as_of is a datetime that has a zone, and not {as_of!r}")
    if as_of.tzinfo is None:
        raise UsageError(
            f"{as_of.isoformat()} has no time zone", hint="give a datetime with tzinfo"
        )


@dataclass(frozen=True, slots=True)
class Location:
    """The result of a look-up: the row and its chunk.

    `currency` is None where the look-up named a version.

    Of an object in parts, `parts` has them in order, and the chunk is that of the first; of any
    other it is empty. `older_versions` counts the other located versions of its key, if the look-up
    was for a key.
    """

    row: LocationRow
    chunk: str
    posting: PostRecord
    currency: Currency | None = None
    parts: Sequence[LocatedRange] = ()
    older_versions: int = 0

    @property
    def size_bytes(self) -> int:
        """The object's length."""
        return self.row.end_byte - self.row.start_byte

    @property
    def status(self) -> str:
        """See `Currency.status`; "" where the look-up named a version."""
        return self.currency.status if self.currency else ""

    @property
    def ranges(self) -> Sequence[LocatedRange]:
        """The bytes that make up the object, in order."""
        one = self.row
        return self.parts or [
            LocatedRange(one.start_byte, one.end_byte, one.sha256, self.chunk, self.posting)
        ]


@dataclass(frozen=True, slots=True)
class InventoryRecord:
    """An inventory that is planned: its snapshot's name, S3's time, and the keys it covers
    (greater, up to and including).

    `all_versions` and `beside` are those of the snapshot.
    """

    source: str
    name: str
    taken_at: datetime
    after: bytes = b""
    until: bytes | None = None
    all_versions: bool = False
    beside: VersionCounts | None = None


@dataclass(frozen=True, slots=True)
class LocatedVersion:
    """A located identity of a key, and the chunk that it is in, the first one if the object is
    split over chunks.

    `checksums` are of the whole object: the digest by the algorithm ("sha256", "crc64nvme", and
    that of S3's own).
    """

    key: str
    object_version: str
    etag: str
    size_bytes: int
    chunk: str
    checksums: Mapping[str, bytes] = field(hash=False)
    header_set: bytes | None = None


@dataclass(frozen=True, slots=True)
class Content:
    """Located objects as of the last whole inventory: current, of older content, and of keys that
    are gone.

    Attributes: uncounted_objects: those located since, or written since the inventory began (a
        report: shortly before it), of which it is
            not known whether they are current.
        left_out: objects of the inventory by the filter that leaves them out, those located or
            claimed not among them; None where they were not counted.
        all_versions, beside: of the inventory's snapshot.
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
"""Proof windows that a copy has to be seen proven in.

The first proof after joining is of the first leaf; only the next one is of a leaf that was drawn.
"""


@dataclass(frozen=True, slots=True)
class KnownCopy:
    """A copy as the ledger keeps it.

    Attributes: provider: as in `Copy`. proof: as the chain listed it. listed: whether it was listed
        when last looked at. last_proven: block height of its last proof, where known. windows:
        proof windows that count, since it was last listed again or found wrong; see `CopyCheck`.
        last_window: the latest of them; None where there is none. fault: what was wrong with its
        bytes when last looked at; "" where nothing was. checked_at: when that was.
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
    """A located chunk, to be held against the store's lists.

    Attributes: archive_id: under which the store lists it; None for an adopted one, which another
        program posted. place: its Merkle root, owner and start. providers: of its copies, as they
        were listed at the last look.
    """

    caf_file_id: int
    archive_id: str | None
    place: tuple[bytes, str, int]
    providers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """What one look at a copy found.

    Attributes: copy: as the store lists it. window: the number of a proof window that counts: that
        of its last proof, where it is known to be verified; or the
            present one, where all of a small file was read back. None where the look says nothing
            of any window.
        fault: what is wrong with it; "" where nothing is.
        apart: whether windows count that do not follow each other. Else one that does not follow
            the last begins the count again: whoever was dropped in between may have joined with a
            part of the bytes.
        unanswered: why its provider did not answer; "" if it did.
    """

    copy: Copy
    window: int | None = None
    fault: str = ""
    apart: bool = False
    unanswered: str = ""


@dataclass(frozen=True, slots=True)
class WaitingObjects:
    """Objects that wait for more, so that their chunk is not too small.

    The first plan after `until` takes them in any case.
    """

    objects: int
    size_bytes: int
    until: datetime

    def as_json(self) -> dict[str, object]:
        """Return it as a program reads it."""
        return {"objects": self.objects, "bytes": self.size_bytes, "until": self.until.isoformat()}


@dataclass(frozen=True, slots=True)
class SourceAccount:
    """Sums over one source: chunks by state, located objects and bytes, claimed objects, skips by
    reason.

    `content` is None before a whole inventory was planned and counted; `waiting` where no object
    waits, which is no skip here.
    """

    source: str
    chunks: Mapping[ChunkState, int]
    located_objects: int
    located_bytes: int
    claimed_objects: int
    skipped: Mapping[SkipReason, int]
    content: Content | None = None
    waiting: WaitingObjects | None = None


@dataclass(frozen=True, slots=True)
class ChunkSums:
    """Chunks, their objects and the bytes of these.

    An object in several chunks counts with one of them.
    """

    chunks: int = 0
    objects: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProgress:
    """How far a source is, at one moment of the database's clock.

    Attributes: states: sums by state: of what is archived the members, of what is not what was
        planned. States without chunks are absent. window_seconds: from the first chunk that was
        located in the last hour until `at`; 0 where none was. recent: what was located in that
        time, after that first chunk. moved_at: when the state of a chunk last changed, but for
        planning and attempts to pack it; None where none ever did. attempts: how often packing a
        chunk was begun. oldest_planned_at: when the oldest chunk under way was planned; None where
        none is under way. skipped_objects: those that wait for a larger chunk not among them.
        registered_at: when the ledger learnt of the source; None where it does not have it.
        inventory_at: when the latest whole inventory that is planned was taken. queue_read_at: when
        its queue was last read, or was first to be read; None where it was never to be. noticed_at:
        since when the first of `noticed_keys` waits to be listed. unknown_posts: posts of the store
        that the last look found, and the ledger does not know. looked_at: when the proof watch last
        looked at a chunk that is located now; None where it never did. located_at: when the first
        of the chunks was located that are located now; None where none is. suspected_chunks:
        located chunks of which the store's lists say something amiss, and that were not looked at
        since.
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

    def sums(self, states: Iterable[ChunkState]) -> ChunkSums:
        """Return the sums over some states."""
        found = [self.states[state] for state in states if state in self.states]
        return (
            ChunkSums(*(sum(each) for each in zip(*map(astuple, found), strict=True)))
            if found
            else ChunkSums()
        )

    @property
    def bytes_per_second(self) -> float | None:
        """The rate of what was located; None where fewer than two chunks tell, or they have no
        bytes.
        """
        if not self.recent.size_bytes or self.window_seconds <= 0:
            return None
        return self.recent.size_bytes / self.window_seconds

    @property
    def seconds_left(self) -> float | None:
        """How long what is under way, which parked chunks are not, takes at that rate; None where
        no rate is known.
        """
        under_way = self.sums(UNDER_WAY)
        if not under_way.chunks:
            return 0.0
        rate = self.bytes_per_second
        return None if rate is None else under_way.size_bytes / rate


@dataclass(frozen=True, slots=True)
class StoragePlanRow:
    """The last reading of an account's space and coins (ujkl), at the chain's time `read_at`.

    None: there is no plan.

    `latest_end` is the latest end seen since the last purchase of ours, `latest_end_space` the
    space that the plan then had.
    """

    account: str
    read_at: datetime
    balance: int
    space_bytes: int | None
    used_bytes: int | None
    ends_at: datetime | None
    latest_end: datetime | None
    latest_end_space: int | None


@dataclass(frozen=True, slots=True)
class MessageSetApart:
    """A message of a source's queue that is no event of its bucket, or has one beside others, and
    why.
    """

    message_id: str
    body: bytes
    reason: str
    set_apart_at: datetime
