"""The three doors of the architecture: where objects come from, where chunks go, and what is known of both.

    ObjectSource   lists a source and reads its objects           s3
    ChunkStore     keeps chunks and proves that it has them       directory_store (later: jackal)
    Ledger         chunks, claims, skips, locations, leases       ledger

The steps (`pack`, `archive`, `retrieve`) see these protocols and never an implementation. The records here are those that
cross a door; everything is bytes, ends are exclusive, times are aware and in UTC. Every implementation of a protocol
passes the contract suite of its name in the tests.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Protocol

from typing_extensions import Buffer

from caf_pipeline.inventory import S3Object, SkipReason
from caf_pipeline.lifecycle import ChunkState

# --- objects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObjectHeaders:
    """What S3 keeps beside an object's bytes and the manifest keeps too. Empty strings where S3 has none."""

    content_type: str = ""
    content_encoding: str = ""
    content_language: str = ""
    content_disposition: str = ""
    cache_control: str = ""
    expires: str = ""
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """Some bytes of one object, `len(body)` of them, and the headers that came along."""

    body: Buffer
    headers: ObjectHeaders


@dataclass(frozen=True, slots=True)
class Checksum:
    """S3's own checksum over a full object: "sha256", "sha1", "crc32", "crc32c" or "crc64nvme", and its raw digest."""

    algorithm: str
    digest: bytes


class ObjectSource(Protocol):
    """A bucket and prefix to archive. Safe to call from several threads."""

    def list_pages(self, *, after: bytes = b"", max_pages: int | None = None) -> Iterator[Sequence[S3Object]]:
        """Yield pages of current objects whose key is greater than `after` (bytes), in the order of the listing.

        Delete markers and older versions are left out; keys keep the source's prefix. No page is empty, and `max_pages`
        counts those that are yielded.

        Raises:
            SourceDenied, BucketMissing, SourceUnreachable, ListingRefused: nothing was yielded of the page at fault.
        """
        ...

    def read(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart:
        """Read `[start_byte, end_byte)` of exactly this identity, by version id or If-Match.

        `(0, obj.size_bytes)` is a plain GET. The part has `end_byte - start_byte` bytes, or this raises. The whole range is
        held in memory: ask for large objects in ranges.

        Raises:
            ObjectUnavailable: with the skip reason, where a retry in this run cannot help.
            ObjectReadFailed: after all retries. SourceDenied, BucketMissing: nothing of the source can be read.
        """
        ...

    def full_object_checksum(self, obj: S3Object) -> Checksum | None:
        """Return S3's own checksum of the object where it covers the full object, else None.

        Asks the network only where the listing named a checksum.
        """
        ...


# --- chunks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """A piece of the stored bytes, taken when the chunk was sealed, that a read-back is compared with."""

    offset: int
    length: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class ChunkToStore:
    """A sealed chunk as a store sees it: its stored bytes and what proves them."""

    name: str
    archive_id: str
    public: bool
    stored_size_bytes: int
    proof_type: int
    merkle_root: bytes


@dataclass(frozen=True, slots=True)
class Posting:
    """Where a store keeps a chunk: (merkle root, owner, start) on Jackal. `start` is the block height of the post."""

    merkle_root: bytes
    owner: str
    start: int
    stored_size_bytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """One provider's copy, listed by the chain with its proof."""

    provider: str
    proof: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What storing would take. `free_bytes` and `price` are None where the store has no such limit or price.

    `charged_bytes` counts every copy; `price` is in the store's own coin, as text, e.g. "1200ujkl".
    """

    charged_bytes: int
    free_bytes: int | None
    price: str | None


@dataclass(frozen=True, slots=True)
class SignedTransaction:
    """A transaction as it was signed: what a retry sends again, byte for byte. `hash` is known before it is sent."""

    hash: str
    body: bytes
    account: str
    sequence: int
    timeout_height: int


class TransactionLog(Protocol):
    """Where a store commits what it signed before it sends it, by chunk."""

    def pending(self) -> Sequence[SignedTransaction]:
        """Return the chunk's transactions that are neither included nor given up, oldest first."""
        ...

    def commit(self, transaction: SignedTransaction) -> None:
        """Write a transaction; it is durable when this returns. A second one of the same account and sequence is refused."""
        ...

    def settle(self, hash: str, outcome: str) -> None:
        """Close a transaction: "included", "expired" or "superseded"."""
        ...


class ChunkStore(Protocol):
    """Keeps chunks by their Merkle root. Every call may be repeated: the second does nothing that the first did."""

    name: str
    required_copies: int
    proof_type: int

    def cost(self, stored_size_bytes: int) -> Cost:
        """Return what storing this many bytes would take, all copies counted."""
        ...

    def post(self, chunk: ChunkToStore, log: TransactionLog) -> Posting:
        """Announce the chunk; a root that the store already has from us is reused and costs nothing.

        Raises:
            NotPublic, StoreUnreachable, StoreError.
        """
        ...

    def put(self, posting: Posting, staged: Path, progress: Callable[[int], None]) -> None:
        """Upload the staged file to as many providers as copies are asked. `progress` is told bytes sent, as differences."""
        ...

    def copies(self, posting: Posting) -> Sequence[Copy]:
        """Return the copies that the store proves now; an empty sequence for an unknown chunk."""
        ...

    def read(self, posting: Posting, start_byte: int, end_byte: int, *, provider: str | None = None) -> Iterator[bytes]:
        """Yield `[start_byte, end_byte)` of the stored bytes in pieces of at most 1 MiB, from any or one provider.

        Raises:
            StoredChunkMissing: no provider has it. StoreUnreachable. IntegrityError: fewer bytes than asked for.
        """
        ...


# --- the ledger ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """Who works: the run, and the process by which the ledger on the same machine can tell whether it is alive.

    `boot_id` names the machine and its boot; `process_started` is the process's start time, since pids are reused.
    """

    run: str
    boot_id: str
    pid: int
    process_started: float


class Lease(Protocol):
    """The right to move one thing; renewed in the background until released. `epoch` grows with each new holder."""

    name: str
    epoch: int

    def check(self) -> None:
        """Raise LeaseLost where the lease is known to have been taken over or could not be renewed in time."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A chunk as the plan describes it; `expected_size_bytes` includes index, footer and our own members' upper bound."""

    name: str
    number: int
    object_count: int
    object_bytes: int
    expected_size_bytes: int


@dataclass(frozen=True, slots=True)
class Skip:
    """An object that was named and not archived. `key` is text: percent-encoded where the key is not supported."""

    key: str
    object_version: str
    reason: SkipReason
    detail: str
    etag: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A plan as the ledger keeps it. `sha256` is the full hash over what it plans; `folder` holds its Parquet files."""

    source: str
    sha256: bytes
    name: str
    snapshot: str
    folder: str
    object_count: int
    object_bytes: int


@dataclass(frozen=True, slots=True)
class Seal:
    """What is known of a chunk when it is sealed. Sizes in bytes; `samples` in stored coordinates."""

    caf_size_bytes: int
    stored_size_bytes: int
    member_count: int
    member_bytes: int
    skipped_count: int
    released_count: int
    merkle_root: bytes
    proof_type: int
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk's row. Fields of a step that has not happened yet are None (counts and sizes: 0)."""

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
    parked_reason: str
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class LocationRow:
    """One object's place, as it is loaded. `[start_byte, end_byte)` in CAF coordinates."""

    key: str
    object_version: str
    version_id: str | None
    start_byte: int
    end_byte: int
    etag: str
    last_modified: datetime
    sha256: bytes
    part: int = 0


@dataclass(frozen=True, slots=True)
class Location:
    """What a look-up answers: the row and the chunk it is in."""

    row: LocationRow
    chunk: str
    posting: Posting


@dataclass(frozen=True, slots=True)
class SourceAccount:
    """Sums over one source: chunks by state, located objects and bytes, claimed objects, skips by reason."""

    source: str
    chunks: Mapping[ChunkState, int]
    located_objects: int
    located_bytes: int
    claimed_objects: int
    skipped: Mapping[SkipReason, int]


class Ledger(Protocol):
    """What is known, in one database. Each method is one transaction; what it wrote is durable when it returns.

    Raises everywhere: LedgerUnreachable. Methods that take a lease raise LeaseLost, and write nothing, where it was taken
    over, and IllegalMove where the chunk is in no state from which the move is legal.
    """

    # leases
    def lease(self, name: str, holder: Holder) -> AbstractContextManager[Lease]:
        """Hold `name` while the context lasts; for a chunk, `name` is `chunk/<chunk name>` and sets the chunk's epoch.

        A holder on this machine whose process is dead is replaced at once; any other is waited for until its lease is seen
        renewed or has run out (at most one lease time).

        Raises:
            HeldByOther: a live run has it.
        """
        ...

    # plans
    def register_source(self, name: str, archive_id: str, address: str) -> None:
        """Make the source known. `address` says which bucket and prefix it is; another one under the same name is refused.

        Raises:
            LedgerError: the name stands for another address.
        """
        ...

    def export_standing(self, source: str, path: Path) -> int:
        """Write what is known of the source's objects as Parquet (`inventory.STANDING_SCHEMA`); return the rows written.

        An object may have several rows, e.g. skipped by one chunk and claimed by the next.
        """
        ...

    def find_plan(self, sha256: bytes) -> PlanRecord | None:
        """Return the plan of this full hash."""
        ...

    def plan_name_taken(self, source: str, short: str) -> bool:
        """Tell whether another plan of the source already has this short name."""
        ...

    def register_plan(
        self,
        plan: PlanRecord,
        chunks: Sequence[PlannedChunk],
        claims: Iterable[tuple[int, str, str]],
        skips: Iterable[Skip],
    ) -> None:
        """Write the plan, its chunks as `planned`, its claims as (chunk number, key, object version), and skips, at once.

        A plan of the same hash that is registered already changes nothing.

        Raises:
            ClaimConflict: an object is claimed or located already; nothing was written.
        """
        ...

    def record_skips(self, source: str, skips: Iterable[Skip]) -> None:
        """Write skips that belong to no chunk; a skip of the same object replaces the older one."""
        ...

    # chunks
    def chunk(self, name: str) -> Chunk:
        """Return the chunk's row, or raise NotLocated."""
        ...

    def chunks(self, source: str | None = None, states: Iterable[ChunkState] | None = None) -> Sequence[Chunk]:
        """Return chunks by name, without their samples."""
        ...

    def move(self, lease: Lease, chunk: str, before: ChunkState, after: ChunkState, *, reason: str = "") -> None:
        """Move a chunk and nothing else. Moving to `packing` counts an attempt, to `parked` keeps `reason`.

        Moving to a state that claims nothing (`withdrawn`, `abandoned`) ends the chunk's claims; moving back from `sealed` to
        `packing` claims again what the seal skipped, where nobody else has taken it. Moves that have a method of their own
        below are illegal here.
        """
        ...

    def seal(self, lease: Lease, chunk: str, seal: Seal, skips: Iterable[Skip], released: Iterable[tuple[str, str]]) -> None:
        """packing → sealed, or → empty where the seal counts no member, with the facts and the skips.

        Ends the claims of the skipped objects and of those released (key, object version) to be planned again.

        Raises:
            LedgerError: the claims that are left are not as many as the members; nothing was written.
        """
        ...

    def record_posting(self, lease: Lease, chunk: str, posting: Posting) -> None:
        """posting → posted."""
        ...

    def record_copies(self, lease: Lease, chunk: str, copies: Sequence[Copy]) -> None:
        """uploading → verified, with the copies that proved it."""
        ...

    def load_locations(self, lease: Lease, chunk: str, rows: Iterable[LocationRow]) -> int:
        """verified → located: write the rows and end the chunk's claims, at once. Returns the rows written.

        Raises:
            LedgerError: the rows are not as many as the chunk's members; nothing was written.
        """
        ...

    def transactions(self, chunk: str) -> TransactionLog:
        """Return the chunk's transaction log."""
        ...

    def count_read_failure(self, chunk: str, key: str, object_version: str, run: str) -> int:
        """Count a run of the chunk that failed on this object, once; return how many runs there were."""
        ...

    def read_failures(self, chunk: str) -> Mapping[tuple[str, str], int]:
        """Return the counted failures of a chunk by (key, object version)."""
        ...

    # staging
    def reserve_staging(self, lease: Lease, chunk: str, folder: str, size_bytes: int, limit_bytes: int) -> None:
        """Reserve bytes of a staging folder for a chunk, replacing its earlier reservation. `limit_bytes` 0: no limit.

        Raises:
            StagingError: with those of other chunks it would pass the limit.
        """
        ...

    def release_staging(self, chunk: str) -> None:
        """Give the chunk's reservation back; does nothing where there is none."""
        ...

    # questions
    def locate(self, source: str, key: str, object_version: str | None = None) -> Location | None:
        """Return the current location of a key (the greatest last_modified), or that of one version.

        Only chunks in good standing count.
        """
        ...

    def known_objects(self, source: str, keys: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
        """Of these (key, object version), return those that are not to be planned: located, claimed, or skipped and not due."""
        ...

    def account(self, source: str) -> SourceAccount:
        """Return the sums of a source."""
        ...

    def sources(self) -> Sequence[str]:
        """Return the names of all sources ever registered."""
        ...
