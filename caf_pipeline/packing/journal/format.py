"""The packing journal: which bytes of a staged chunk are safe, and what they are, so that the next run goes on from there.

A ChunkIO log beside the part. An entry's user data are its sequence number and the attempt that wrote it (the lease's
epoch), both u64 LE; its content is MessagePack: the SHA-256 of the entry before, over user data and content, and what the
entry says. Entry 0 is the opening: it says which chunk, plan and version of the software the bytes are a function of. Each
later one is a checkpoint: what became of the plan's next objects, how many bytes were durable before it was written, and
the Merkle tree where the last whole member ends.

What is read is believed up to the first entry that breaks a rule; whether the staged bytes are those that it describes is
for the packer to find out.

Source: docs/decisions/0010-the-packing-journal.md.
"""

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec
import pyarrow as pa
from typing_extensions import Buffer

from caf_pipeline.caf.archive import DEFAULT_LIMITS
from caf_pipeline.formats.chunkio import LogEntry, LogReader, LogWriter
from caf_pipeline.inventory.manifest import CHUNK_FORMAT, HEAD_SIZE_BYTES, ROWS_PER_GROUP, ChunkIdentity
from caf_pipeline.inventory.plan import ChunkPlan, PlannedObject
from caf_pipeline.inventory.snapshot import SkipReason
from caf_pipeline.packing.sink import staging_error, sync_data
from caf_pipeline.source.protocol import ObjectHeaders

JOURNAL_FORMAT: Final = 1
"""Of the entries. It grows with every change of them, and of how a member's bytes come to be."""

MAX_ENTRY_BYTES: Final = 64 << 20
"""A longer entry is not read: four times what a checkpoint gathers before packing waits for it (`writer`)."""

MAX_OUTCOMES: Final = 40_000
"""Of one checkpoint: twice what is gathered before packing waits, with room for what one flush adds."""

MAX_JOURNAL_BYTES: Final = 8 << 30
"""What lies beyond is not read: a million members with 8 KiB of headers each, the most that S3 takes."""

_USER_DATA: Final = struct.Struct("<QQ")
_FIRST_BEFORE: Final = bytes(32)

_Size = Annotated[int, msgspec.Meta(ge=0, le=DEFAULT_LIMITS.max_bytes)]
_Sha256 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_TreeState = Annotated[bytes, msgspec.Meta(max_length=8192)]  # 64 levels of 64 bytes and its head are less
_Name = Annotated[str, msgspec.Meta(max_length=4096)]


class Opening(msgspec.Struct, array_like=True, tag=0, forbid_unknown_fields=True, frozen=True):
    """What a chunk's bytes are a function of, beside its objects. A journal of another opening is not resumed."""

    journal_format: int
    software: _Name
    chunk: _Name
    archive_id: _Name
    source: _Name
    plan: _Name
    snapshot: _Name
    inventory_time: _Name
    identity: _Sha256
    chunk_row: _Sha256
    proof_type: int
    limit_bytes: int
    compare_checksums: bool


class JournaledHeaders(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """An object's headers, for its row of the manifest."""

    content_type: str
    content_encoding: str
    content_language: str
    content_disposition: str
    cache_control: str
    expires: str
    user_metadata: Annotated[dict[str, str], msgspec.Meta(max_length=10_000)]


class PackedMember(msgspec.Struct, array_like=True, tag=0, forbid_unknown_fields=True, frozen=True, gc=False):
    """An object that is in the chunk, at `[start_byte, end_byte)`. No headers: it has none."""

    start_byte: _Size
    end_byte: _Size
    sha256: _Sha256
    headers: JournaledHeaders | None = None


class SkippedObject(msgspec.Struct, array_like=True, tag=1, forbid_unknown_fields=True, frozen=True, gc=False):
    """An object that was left out."""

    reason: SkipReason
    detail: str


class OpenMember(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """A large object of which `size_bytes` are staged, with the SHA-256 of those."""

    size_bytes: _Size
    sha256: _Sha256
    headers: JournaledHeaders | None = None


class Checkpoint(msgspec.Struct, array_like=True, tag=1, forbid_unknown_fields=True, frozen=True):
    """What became of the plan's next objects, and how long the file is then.

    Attributes:
        outcomes: in plan order, from where the checkpoint before ended.
        objects_sha256: over all objects of the plan that are accounted for by now (`ObjectsDigest`).
        boundary: where the last whole member ends, and the open one begins.
        tree: `MerkleTree.state(open_block=False)` at the boundary.
        durable_bytes: so many bytes of the file were fsynced before this was written.
        open: the object in whose middle that is.
    """

    outcomes: Annotated[list[PackedMember | SkippedObject], msgspec.Meta(max_length=MAX_OUTCOMES)]
    objects_sha256: _Sha256
    boundary: _Size
    tree: _TreeState
    durable_bytes: _Size
    open: OpenMember | None = None


class _Entry(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    before: _Sha256
    says: Opening | Checkpoint


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Entry)


def opening_of(
    chunk: ChunkPlan, identity: ChunkIdentity, *, proof_type: int, limit_bytes: int, compare_checksums: bool
) -> Opening:
    """Return the opening of a packing of this chunk by this version of the software."""
    return Opening(
        journal_format=JOURNAL_FORMAT,
        # What the bytes of a chunk depend on, by what each piece is known to change with: releases that change none of it resume.
        software=f"{CHUNK_FORMAT} pyarrow {pa.__version__} row groups of {ROWS_PER_GROUP}",
        chunk=identity.chunk,
        archive_id=identity.archive_id,
        source=identity.source,
        plan=identity.plan,
        snapshot=identity.snapshot,
        inventory_time=identity.inventory_time.isoformat(),
        identity=_sha256_of(identity),
        chunk_row=_sha256_of(chunk),
        proof_type=proof_type,
        limit_bytes=limit_bytes,
        compare_checksums=compare_checksums,
    )


def _sha256_of(record: ChunkIdentity | ChunkPlan) -> bytes:
    return hashlib.sha256(repr(sorted(asdict(record).items())).encode()).digest()


class ObjectsDigest:
    """A running SHA-256 over objects of a plan, so that a journal is not read against others."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, planned: PlannedObject) -> None:
        """Take the next object."""
        obj, member = planned.object, planned.member.encode()
        self._digest.update(
            b"%d %d %b%b%d %b\0" % (len(obj.key), len(member), obj.key, member, obj.size_bytes, obj.object_version.encode())
        )

    def digest(self) -> bytes:
        """Return it as it is now; more may be added."""
        return self._digest.digest()

    def copy(self) -> "ObjectsDigest":
        """Return an independent one that has taken the same objects."""
        copied = ObjectsDigest()
        copied._digest = self._digest.copy()
        return copied


def headers_of(headers: ObjectHeaders) -> JournaledHeaders | None:
    """Return an object's headers as the journal keeps them."""
    kept = JournaledHeaders(
        headers.content_type,
        headers.content_encoding,
        headers.content_language,
        headers.content_disposition,
        headers.cache_control,
        headers.expires,
        dict(headers.user_metadata),
    )
    return None if kept == _NO_HEADERS else kept


def object_headers(headers: JournaledHeaders | None) -> ObjectHeaders:
    """Return the headers that were kept."""
    return ObjectHeaders(**msgspec.structs.asdict(headers)) if headers else ObjectHeaders()


_NO_HEADERS: Final = JournaledHeaders("", "", "", "", "", "", {})


# --- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a journal to go on from: behind an entry.

    Attributes:
        end: the position behind the entry.
        sequence: the next entry's.
        before: SHA-256 of the entry.
        attempt: which wrote it.
    """

    end: int = 0
    sequence: int = 0
    before: bytes = _FIRST_BEFORE
    attempt: int = 0


class JournalReader:
    """Reads the longest unbroken prefix of a journal. Nothing is raised for what is wrong with it; memory is one entry.

    `broken` says, after the reading, why the prefix ended before the file's last entry; "" where it did not.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path
        self.broken = ""

    def checkpoints(self, opening: Opening, *, attempt: int) -> Iterator[tuple[Place, Checkpoint]]:
        """Yield the checkpoints of the prefix, each with the place behind it, if the journal has this opening.

        Entries of attempts later than `attempt` are not believed, since none were made.

        Raises:
            StagingError: the file cannot be read.
        """
        place, before = Place(), None
        for entry, content in self._entries():
            following = self._follow(place, entry, content, attempt)
            if following is None:
                return
            place, says = following
            if place.sequence == 1:
                if says != opening:
                    self.broken = _difference(says, opening)
                    return
                continue
            if not isinstance(says, Checkpoint) or not _is_sound(says, before):
                self.broken = f"its entry {place.sequence - 1} contradicts those before it"
                return
            yield place, says
            before = says
        if place.sequence == 0 and not self.broken:
            self.broken = "its journal has no opening"

    def _entries(self) -> Iterator[tuple[LogEntry, bytes | None]]:
        try:
            size_bytes = min(os.fstat(self._descriptor).st_size, MAX_JOURNAL_BYTES)
            log = LogReader(self._read, size_bytes)
            for entry in log.entries():
                yield entry, log.content(entry) if entry.content_size_bytes <= MAX_ENTRY_BYTES else None
        except OSError as error:
            raise staging_error(self._path, error) from error

    def _read(self, start: int, end: int) -> bytes:
        return os.pread(self._descriptor, end - start, start)

    def _follow(
        self, place: Place, entry: LogEntry, content: bytes | None, attempt: int
    ) -> tuple[Place, Opening | Checkpoint] | None:
        """Return the place behind an entry and what it says, where it is the next of the prefix."""
        sequence, written_by = _USER_DATA.unpack(entry.user_data)
        if sequence != place.sequence:
            self.broken = f"its entry {place.sequence} is missing"
            return None
        if content is None:
            self.broken = f"its entry {sequence} is damaged or was not written to its end"
            return None
        if not place.attempt <= written_by <= attempt:
            self.broken = f"its entry {sequence} is of another attempt"
            return None
        try:
            decoded = _decoder.decode(content)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            self.broken = f"its entry {sequence} is none that this version knows"
            return None
        if decoded.before != place.before:
            self.broken = f"its entry {sequence} does not follow the one before"
            return None
        after = Place(entry.end, sequence + 1, _digest(entry.user_data, content), written_by)
        return after, decoded.says


def _is_sound(said: Checkpoint, before: Checkpoint | None) -> bool:
    """Tell whether a checkpoint agrees with itself and with the one before."""
    position = before.boundary if before else HEAD_SIZE_BYTES
    for outcome in said.outcomes:
        if isinstance(outcome, PackedMember):
            if outcome.start_byte != position or outcome.end_byte < position:
                return False
            position = outcome.end_byte
    inside = said.open.size_bytes if said.open else 0
    if said.boundary != position or said.durable_bytes != position + inside:
        return False
    if before is None or said.outcomes or not before.open:
        return True
    # Nothing was decided meanwhile: the open member has grown, or was begun again and has nothing staged.
    return said.open is None or said.durable_bytes >= before.durable_bytes


def _difference(says: Opening | Checkpoint, opening: Opening) -> str:
    if not isinstance(says, Opening):
        return "its journal has no opening"
    ours, theirs = msgspec.structs.asdict(opening), msgspec.structs.asdict(says)
    return f"its journal is of another {', '.join(name.replace('_', ' ') for name in ours if ours[name] != theirs[name])}"


# --- writing -------------------------------------------------------------------------------------------------------


class Journal:
    """A journal that this process writes. One thread at a time."""

    def __init__(self, path: Path, descriptor: int, *, attempt: int) -> None:
        self.path = path
        self.attempt = attempt
        self._descriptor = descriptor
        self._place = Place()
        self._log = LogWriter()

    @classmethod
    def create(cls, path: Path, *, attempt: int) -> Self:
        """Create a journal, which must not exist. Raises StagingError."""
        return cls._open(path, attempt, os.O_CREAT | os.O_EXCL)

    @classmethod
    def open(cls, path: Path, *, attempt: int) -> Self:
        """Open one that is there: read it, then `go_on`. Raises StagingError."""
        return cls._open(path, attempt, os.O_NOFOLLOW)

    @classmethod
    def _open(cls, path: Path, attempt: int, flags: int) -> Self:
        try:
            return cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600), attempt=attempt)
        except OSError as error:
            raise staging_error(path, error) from error

    def reader(self) -> JournalReader:
        """Return a reader of what is there."""
        return JournalReader(self._descriptor, self.path)

    def found_bytes(self) -> int:
        """Return the file's length, whatever it holds."""
        return os.fstat(self._descriptor).st_size

    def go_on(self, place: Place) -> None:
        """Cut the journal behind a place of its prefix, durably, and append from there on."""
        try:
            os.ftruncate(self._descriptor, place.end)
            os.fsync(self._descriptor)
            os.lseek(self._descriptor, place.end, os.SEEK_SET)
        except OSError as error:
            raise staging_error(self.path, error) from error
        self._place = place
        self._log = LogWriter(place.end)

    def append(self, says: Opening | Checkpoint) -> None:
        """Append an entry; it is durable when this returns. After an error nothing more may be appended.

        Raises:
            StagingError: the disk is full, or the file cannot be written.
        """
        user_data = _USER_DATA.pack(self._place.sequence, self.attempt)
        content = _encoder.encode(_Entry(self._place.before, says))
        data = memoryview(self._log.entry(user_data, content))
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            sync_data(self._descriptor)
        except OSError as error:
            raise staging_error(self.path, error) from error
        self._place = Place(self._log.position, self._place.sequence + 1, _digest(user_data, content), self.attempt)

    def cut(self) -> None:
        """Cut away what an append that failed has left, and give its room back; raises nothing."""
        try:
            os.ftruncate(self._descriptor, self._place.end)
        except OSError:  # a reader stops before what is torn just as well
            return

    @property
    def size_bytes(self) -> int:
        """What was appended."""
        return self._place.end

    def close(self) -> None:
        """Give the file back."""
        os.close(self._descriptor)


def _digest(user_data: Buffer, content: Buffer) -> bytes:
    digest = hashlib.sha256(user_data)
    digest.update(content)
    return digest.digest()
