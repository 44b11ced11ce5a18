"""What the ledger takes and gives: its records, and its protocols.

Ends are exclusive, times are aware and in UTC. Every implementation passes the contract suite
`caf_pipeline_tests/contracts/ledger.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.inventory.snapshot import CurrentException, SkipReason
from caf_pipeline.store.protocol import Copy, Lease, Posting, ProviderRecords, Sample, SignedTransaction, TransactionLog
from caf_pipeline.waits import Wait, Waits


@dataclass(frozen=True, slots=True)
class Orders:
    """What the operator ordered, as it is now. None: nothing ordered, the settings hold.

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


class Switchboard(Protocol):
    """Where an operator's orders stand, for runs that obey within seconds."""

    def orders(self) -> Orders:
        """Return the orders in force."""
        ...

    def order(self, name: str, value: str | None) -> None:
        """Give the order "paused", "bandwidth" or "spend_cap"; None takes it back."""
        ...


@dataclass(frozen=True, slots=True)
class Holder:
    """Who works: the run, and the process by which the ledger on the same machine can tell whether it is alive.

    `boot_id` names the machine and its boot; `process_started` is the process's start time, since pids are reused.
    """

    run: str
    boot_id: str
    pid: int
    process_started: float


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
    last_modified: datetime | None = None


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
    """What is known of a chunk when it is sealed. Sizes in bytes; `samples` in stored coordinates.

    `tail_sha256` is of what begins at `tail_start`, taken while packing: manifest, index and footer.
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
    tail_start: int | None = None
    tail_sha256: bytes | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk's row. Fields of a step that has not happened yet are None (counts and sizes: 0).

    `reason` says why it is parked, damaged or withdrawn; `checked_at` when the proof watch last looked at it; `read_back_at`
    when all of its stored bytes last came back from the store with its Merkle root, from a copy that was right ever since.
    `tail_start` and `tail_sha256` are those of the seal, None where 0.3.0 or earlier sealed it, or it was rebuilt.
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


@dataclass(frozen=True, slots=True)
class RestoredChunk:
    """A chunk as the store alone tells of it, to be written into a ledger that does not know it. Sizes in bytes.

    `plan_sha256`, `object_count` and `object_bytes` (what was planned for it) are None where the chunk's manifest does not
    tell; then nothing counts as released: `object_count` is `member_count + skipped_count`. A `fault` says why the chunk is
    `damaged`; "" where it is `located`.
    """

    name: str
    number: int
    plan: str
    plan_sha256: bytes | None
    snapshot: str
    plan_folder: str
    posting: Posting
    proof_type: int
    caf_size_bytes: int
    member_count: int
    member_bytes: int
    skipped_count: int
    samples: Sequence[Sample]
    copies: Sequence[Copy]
    object_count: int | None = None
    object_bytes: int | None = None
    fault: str = ""


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
    """How many location rows and claims name a chunk. `chunk` and `state` are None where the ledger has no such chunk.

    A restored chunk may have fewer locations than members: others had some of its objects already.
    """

    caf_file_id: int
    chunk: str | None
    state: ChunkState | None
    locations: int
    claims: int
    member_count: int
    restored: bool


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
class Currency:
    """Whether a location is what the bucket has now of its key, as the planned inventories tell.

    Attributes:
        is_current: whether it is.
        chunk: the chunk under way that has the current content; `state` is its state.
        state: where there is no such chunk, the reason for which the current content is skipped; "" where it is not planned.
        gone_at: when the key was found to be gone; None where it is not.
        last_seen: when an inventory last listed a key that is gone; None where that is not known.
    """

    is_current: bool
    chunk: str | None = None
    state: str = ""
    gone_at: datetime | None = None
    last_seen: datetime | None = None


@dataclass(frozen=True, slots=True)
class Location:
    """What a look-up answers: the row and the chunk it is in. Of one version that was asked for, `currency` is None."""

    row: LocationRow
    chunk: str
    posting: Posting
    currency: Currency | None = None


@dataclass(frozen=True, slots=True)
class InventoryRecord:
    """An inventory that is planned: its snapshot's name, S3's time, and the keys it covers (greater, up to and including)."""

    source: str
    name: str
    taken_at: datetime
    after: bytes = b""
    until: bytes | None = None


@dataclass(frozen=True, slots=True)
class ListedIdentity:
    """An object as a listing has it, under the identities that it may be known by."""

    key: str
    object_version: str
    rewritten_version: str
    last_modified: datetime
    has_version_id: bool


@dataclass(frozen=True, slots=True)
class LocatedVersion:
    """A located identity of a key, and the chunk that it is in."""

    key: str
    object_version: str
    etag: str
    size_bytes: int
    chunk: str


@dataclass(frozen=True, slots=True)
class Content:
    """Located objects as of the last whole inventory: current, of older content, and of keys that are gone."""

    inventory: str
    taken_at: datetime
    counted_at: datetime
    current_objects: int
    older_objects: int
    gone_objects: int


WINDOWS_REQUIRED: Final = 2
"""Proof windows that a copy has to be seen proven in. The first proof after joining is of the first leaf; only the next one is of
a leaf that was drawn."""


@dataclass(frozen=True, slots=True)
class KnownCopy:
    """A copy as the ledger keeps it.

    Attributes:
        provider: as in `Copy`.
        proof: as the chain listed it.
        listed: whether it was listed when last looked at.
        last_proven: block height of its last proof, where known.
        windows: proof windows that count, since it was last listed again or found wrong; see `CopyCheck`.
        last_window: the latest of them; None where there is none.
        fault: what was wrong with its bytes when last looked at; "" where nothing was.
        checked_at: when that was.
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
class CopyCheck:
    """What one look at a copy found.

    Attributes:
        copy: as the store lists it.
        window: the number of a proof window that counts: that of its last proof, where it is known to be verified; or the
            present one, where all of a small file was read back. None where the look says nothing of any window.
        fault: what is wrong with it; "" where nothing is.
        apart: whether windows count that do not follow each other. Else one that does not follow the last begins the count
            again: whoever was dropped in between may have joined with a part of the bytes.
    """

    copy: Copy
    window: int | None = None
    fault: str = ""
    apart: bool = False


@dataclass(frozen=True, slots=True)
class SourceAccount:
    """Sums over one source: chunks by state, located objects and bytes, claimed objects, skips by reason.

    `content` is None before a whole inventory was planned and counted.
    """

    source: str
    chunks: Mapping[ChunkState, int]
    located_objects: int
    located_bytes: int
    claimed_objects: int
    skipped: Mapping[SkipReason, int]
    content: Content | None = None


class Ledger(Protocol):
    """What is known, in one database. Each method is one transaction; what it wrote is durable when it returns.

    Raises everywhere: LedgerUnreachable. Methods that take a lease raise LeaseLost, and write nothing, where it was taken
    over, and IllegalMove where the chunk is in no state from which the move is legal.
    """

    # leases
    def lease(self, name: str, holder: Holder, *, waits: Waits | None = None) -> AbstractContextManager[Lease]:
        """Hold `name` while the context lasts; for a chunk, `name` is `chunk/<chunk name>` and sets the chunk's epoch.

        A holder on this machine whose process is dead is replaced at once; any other is waited for until its lease is seen
        renewed or has run out (at most one lease time).

        Args:
            name: of the lease.
            holder: who takes it.
            waits: where it is said while another run's lease is waited for.

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

    def addresses(self) -> Mapping[str, str]:
        """Return the address of each source ever registered, by its archive's id."""
        ...

    def export_standing(self, source: str, path: Path) -> int:
        """Write what is known of the source's objects as Parquet (`inventory.STANDING_SCHEMA`); return the rows written.

        An object may have several rows, e.g. skipped by one chunk and claimed by the next.
        """
        ...

    def export_exceptions(self, source: str, path: Path) -> int:
        """Write the exceptions of the source as Parquet (`inventory.EXCEPTION_SCHEMA`); return the rows written."""
        ...

    def later_inventories(self, inventory: InventoryRecord) -> Sequence[tuple[bytes, bytes | None]]:
        """Return the ranges of keys (greater than, up to and including) of planned inventories that were taken after this one."""
        ...

    def record_exceptions(
        self, inventory: InventoryRecord, exceptions: Iterable[CurrentException], *, planned: bool = True
    ) -> int:
        """Write exceptions that an inventory states, and that it is planned; return how many exceptions they were.

        An exception of the same key and time is replaced.
        """
        ...

    def record_content(self, inventory: InventoryRecord, *, current: int, older: int, gone: int) -> None:
        """Write how many located objects were current, older and gone as of an inventory that is planned."""
        ...

    def located_versions(self, source: str, keys: Sequence[str]) -> Sequence[LocatedVersion]:
        """Return every identity without a version id that is located of these keys, in chunks in good standing."""
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
        claims: Iterable[tuple[int, str, str, datetime | None]],
        skips: Iterable[Skip],
    ) -> None:
        """Write the plan, its chunks as `planned`, its claims as (chunk number, key, object version, last modified), and skips.

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
        """Move a chunk and nothing else.

        Moving to `packing` counts an attempt; `reason` stays with a chunk that is parked, damaged or withdrawn.

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

    def record_samples(self, lease: Lease, chunk: str, samples: Sequence[Sample]) -> None:
        """Replace the samples of a chunk that is posting, posted or uploading: its file was packed again with its root."""
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

    def record_root(self, lease: Lease, chunk: str, merkle_root: bytes, proof_type: int, samples: Sequence[Sample]) -> None:
        """Give a `sealed` chunk, which was never posted, the root and samples of another type of tree over the same bytes."""
        ...

    def record_repost(self, lease: Lease, chunk: str, posting: Posting) -> None:
        """Give a `damaged` chunk the start of its new post, where the chain no longer has the first."""
        ...

    def record_checks(
        self, lease: Lease, chunk: str, checks: Sequence[CopyCheck], *, again_in: float | None = None, enough: int = 0
    ) -> None:
        """Write what a look at a located or damaged chunk's copies found; copies that it did not find are listed no more.

        Args:
            lease: on the chunk.
            chunk: its name.
            checks: one for each copy that is listed.
            again_in: seconds after which a look can see the window after those that count; None where there are no windows.
            enough: no such look is waited for where so many copies have `WINDOWS_REQUIRED` windows.
        """
        ...

    def known_copies(self, chunk: str) -> Sequence[KnownCopy]:
        """Return the copies that were ever recorded of a chunk, by provider."""
        ...

    def chunks_to_prove(self, source: str, limit: int, *, waiting: int = 0) -> Sequence[Chunk]:
        """Return located chunks, those first that were looked at longest ago (or located, where never looked at).

        Before them come up to `waiting` of those that wait for a look in their next proof window, which has begun.
        """
        ...

    def any_object(self, chunk: str, most_bytes: int) -> Sample | None:
        """Return where one of the chunk's objects is, chosen at random from those of 1 to this many bytes; None without any."""
        ...

    def record_read_back(self, lease: Lease, chunk: str, provider: str) -> None:
        """Remember that all stored bytes of a located or damaged chunk came back from this provider just now with its root.

        Forgotten when this copy is found wrong or listed no more.
        """
        ...

    def restore_chunk(self, source: str, chunk: RestoredChunk, rows: Iterable[LocationRow], skips: Iterable[Skip]) -> int:
        """Write a chunk that the ledger does not know, with its plan where that is missing, rows and skips, at once.

        It is `located`, or `damaged` where it has a fault. Objects that are located already in a chunk in good standing keep
        that location, and are skipped no more. Returns the location rows written; 0 where other chunks have all of its objects:
        then nothing at all was written.

        Raises:
            LedgerError: the ledger has a chunk of this name, or the rows and skips are not as many as the chunk says, or name an
                object twice; nothing was written.
            ClaimConflict: a chunk under way claims one of its objects; nothing was written.
            IntegrityError: the plan that it names is another one in the ledger; nothing was written.
        """
        ...

    def transactions(self, holder: Holder) -> TransactionLog:
        """Return the log of what stores signed, for this holder."""
        ...

    def providers(self) -> ProviderRecords:
        """Return what was measured of providers."""
        ...

    def switchboard(self) -> Switchboard:
        """Return the operator's orders."""
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

    # waits
    def record_waits(self, holder: Holder, source: str, waits: Sequence[Wait]) -> None:
        """Put what the run waits for now in place of what it wrote before; to be repeated within 30 s while it waits."""
        ...

    def waits(self) -> Sequence[RunWait]:
        """Return what live runs wait for, by source."""
        ...

    # care
    def leases(self) -> Sequence[LeaseRecord]:
        """Return all leases that were not given back, by name."""
        ...

    def end_lease(self, name: str, epoch: int) -> bool:
        """Give back a lease that its holder left.

        False where it is another holder's by now, was given back, or may still be held: by a live process of this machine, or
        by one that cannot be seen from here and has not let it run out.
        """
        ...

    def reservations(self) -> Sequence[Reservation]:
        """Return all reservations of staging folders, by chunk."""
        ...

    def unsettled(self) -> Sequence[SignedTransaction]:
        """Return the transactions of every account whose fate is not known, by account and sequence."""
        ...

    def rows_by_chunk(self, source: str) -> Sequence[ChunkRows]:
        """Count a source's location rows and claims by chunk, all at one moment; chunks without any are there, too.

        Empty for a source that is not known. Reads both tables once.
        """
        ...

    def drop_stray_rows(self, caf_file_id: int) -> int:
        """Remove claims of a chunk that claims nothing or is unknown, and locations of one that never was located or is unknown.

        What a chunk claims by its state, and locations that it has or had, stay. Returns the rows removed.
        """
        ...

    # questions
    def export_located(self, source: str, path: Path) -> int:
        """Write every location of the source as Parquet (`inventory.LOCATED_SCHEMA`); return the rows written.

        Of chunks in good standing only; constant memory, in no order.
        """
        ...

    def locate(self, source: str, key: str, object_version: str | None = None) -> Location | None:
        """Return the current location of a key, or that of one version.

        Current is what the latest exception names, or the greatest last_modified where that is later. Where the current content
        is not located, or the key is gone, it is the located content of greatest last_modified, and its `currency` says so.
        Only chunks in good standing count.
        """
        ...

    def settled_objects(self, source: str, listed: Sequence[ListedIdentity]) -> set[tuple[str, str]]:
        """Of these, return (key, object version) of those of which a plan has nothing to do.

        They are claimed, skipped and not due, or located and what a look-up of the key gives out, with the listed LastModified
        or headers that were compared.
        """
        ...

    def versions(self, source: str, key: str, limit: int) -> tuple[Sequence[LocationRow], int]:
        """Return the located versions of a key, the latest first and at most `limit`, and how many there are."""
        ...

    def account(self, source: str) -> SourceAccount:
        """Return the sums of a source."""
        ...

    def sources(self) -> Sequence[str]:
        """Return the names of all sources ever registered."""
        ...
