"""The packing journal: which bytes of a staged chunk are safe, and what they are, so that the next
run goes on from there.

A ChunkIO log beside the part, whose hashes tell which entries were written whole and are undamaged.
An entry's content is MessagePack; its user data are its number, u64 LE, and 8 bytes of the SHA-256
of the journal's opening, so that no entry of another journal is taken for one of this. Entry 0 is
the opening: it says which chunk, plan and version of the software the bytes are a function of. Each
later one is a checkpoint: what became of the plan's next objects, how many bytes were durable
before it was written, and the Merkle tree where the last whole member ends.

What is read is believed up to the first entry that breaks a rule; whether the staged bytes are
those that it describes is for the packer to find out.

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

from caf_pipeline.caf.archive import DEFAULT_LIMITS
from caf_pipeline.formats.chunkio import LogEntry, LogReader, LogWriter
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.manifest import (
    CHUNK_FORMAT,
    HEAD_SIZE_BYTES,
    MANIFEST_GROUP_ROWS,
    ChunkIdentity,
)
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.inventory.plan import ChunkPlan, PlannedObject
from caf_pipeline.packing.sink import staging_error, sync_data
from caf_pipeline.system.hashes import RunningHash

JOURNAL_FORMAT: Final = 4
"""Of the entries. It grows with every change of them, and of how a member's bytes come to be."""

MAX_ENTRY_BYTES: Final = 64 << 20
"""A longer entry is not read: eight times what a checkpoint gathers before packing waits for it
(`writer`).
"""

MAX_OUTCOMES: Final = 40_000
"""Of one checkpoint: twice what is gathered before packing waits, with room for what one flush
adds.
"""

MAX_JOURNAL_BYTES: Final = 8 << 30
"""What lies beyond is not read: a million members with 8 KiB of headers each, the most that S3
takes.
"""

_USER_DATA: Final = struct.Struct("<Q8s")

_Size = Annotated[int, msgspec.Meta(ge=0, le=DEFAULT_LIMITS.max_bytes)]
_Sha256 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Crc64 = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
_TreeState = Annotated[
    bytes, msgspec.Meta(max_length=8192)
]  # 64 levels of 64 bytes and its head are less
_Name = Annotated[str, msgspec.Meta(max_length=4096)]


class Opening(msgspec.Struct, array_like=True, tag=0, forbid_unknown_fields=True, frozen=True):
    """What a chunk's bytes are a function of, beside its objects.

    A journal of another opening is not resumed.
    """

    journal_format: int
    software: _Name
    identity: _Sha256
    chunk_row: _Sha256
    proof_type: int
    limit_bytes: int
    compare_checksums: bool


class PackedMember(
    msgspec.Struct, array_like=True, tag=0, forbid_unknown_fields=True, frozen=True, gc=False
):
    """An object that is in the chunk, at `[start_byte, end_byte)`, with the checksums that the
    manifest records.

    No headers: it has none.
    """

    start_byte: _Size
    end_byte: _Size
    sha256: _Sha256
    crc64nvme: _Crc64
    s3_checksum: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    headers: ObjectHeaders | None = None


class SkippedObject(
    msgspec.Struct, array_like=True, tag=1, forbid_unknown_fields=True, frozen=True, gc=False
):
    """An object that was left out."""

    reason: SkipReason
    detail: str


class OpenMember(
    msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False
):
    """A large object of which `size_bytes` are staged, with the SHA-256 of those."""

    size_bytes: _Size
    sha256: _Sha256
    headers: ObjectHeaders | None = None


class Checkpoint(msgspec.Struct, array_like=True, tag=1, forbid_unknown_fields=True, frozen=True):
    """What became of the plan's next objects, and how long the file is then.

    Attributes: outcomes: in plan order, from where the checkpoint before ended. objects_sha256:
        over all objects of the plan that are accounted for by now (`add_to_digest`). boundary:
        where the last whole member ends, and the open one begins. tree:
        `MerkleTree.state(open_block=False)` at the boundary. durable_bytes: so many bytes of the
        file were fsynced before this was written. open: the object in whose middle that is.
    """

    outcomes: Annotated[list[PackedMember | SkippedObject], msgspec.Meta(max_length=MAX_OUTCOMES)]
    objects_sha256: _Sha256
    boundary: _Size
    tree: _TreeState
    durable_bytes: _Size
    open: OpenMember | None = None


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Opening | Checkpoint)


def opening_of(
    chunk: ChunkPlan,
    identity: ChunkIdentity,
    *,
    proof_type: int,
    limit_bytes: int,
    compare_checksums: bool,
) -> Opening:
    """Return the opening of a packing of this chunk by this version of the software."""
    return Opening(
        journal_format=JOURNAL_FORMAT,
        # What the bytes of a chunk depend on, by what each piece is known to change with: releases
        # that change none of it resume.
        software=f"{CHUNK_FORMAT} pyarrow {pa.__version__} row groups of {MANIFEST_GROUP_ROWS}",
        identity=_sha256_of(identity),
        chunk_row=_sha256_of(chunk),
        proof_type=proof_type,
        limit_bytes=limit_bytes,
        compare_checksums=compare_checksums,
    )


def _sha256_of(record: ChunkIdentity | ChunkPlan) -> bytes:
    return hashlib.sha256(repr(sorted(asdict(record).items())).encode()).digest()


def add_to_digest(digest: RunningHash, planned: PlannedObject) -> None:
    """Add a plan's next object to a running SHA-256, by which a journal is not read against other
    objects.
    """
    obj, member = planned.object, planned.member.encode()
    digest.update(
        b"%d %d %b%b%d %b\0"
        % (len(obj.key), len(member), obj.key, member, obj.size_bytes, obj.object_version.encode())
    )
    if planned.part:
        digest.update(b"%d %d\0" % (planned.part.start_byte, planned.part.end_byte))


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a journal to go on from: the position behind an entry, and the number of the
    next.
    """

    end: int = 0
    number: int = 0


class Journal:
    """The journal of a packing: read, then cut where it is right no more, and appended to.

    One thread at a time.

    Attributes:
        path: of its file.
        broken: after a reading, why it ended before the file's last entry; "" where it did not.
    """

    def __init__(self, path: Path, descriptor: int, opening: Opening) -> None:
        self.path = path
        self.broken = ""
        self._descriptor = descriptor
        self._opening = opening
        self._mark = hashlib.sha256(_encoder.encode(opening)).digest()[:8]
        self._place = Place()
        self._log = LogWriter()

    @classmethod
    def open(cls, path: Path, opening: Opening) -> Self:
        """Open a journal, or make an empty one: read it, then `go_on`. Raises StagingError."""
        try:
            return cls(
                path,
                os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600),
                opening,
            )
        except OSError as error:
            raise staging_error(path, error) from error

    def found_bytes(self) -> int:
        """Return the file's length, whatever it holds."""
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Give the file back."""
        os.close(self._descriptor)

    # --- reading
    # --------------------------------------------------------------------------------

    def checkpoints(self) -> Iterator[tuple[Place, Checkpoint]]:
        """Yield the checkpoints of the file's longest unbroken prefix, each with the place behind
        it.

        Nothing is raised for what is wrong with the file; `broken` says it. Memory is one entry.

        Raises:
            StagingError: the file cannot be read.
        """
        self.broken = "its journal has no opening"
        before: Checkpoint | None = None
        for number, (entry, content) in enumerate(self._entries()):
            says = _decoded(content)
            self.broken = self._fault_of(number, entry, content, says, before)
            if self.broken:
                return
            if isinstance(says, Checkpoint):
                yield Place(entry.end, number + 1), says
                before = says

    def _entries(self) -> Iterator[tuple[LogEntry, bytes | None]]:
        try:
            log = LogReader(self._read, min(self.found_bytes(), MAX_JOURNAL_BYTES))
            for entry in log.entries():
                yield (
                    entry,
                    log.content(entry) if entry.content_size_bytes <= MAX_ENTRY_BYTES else None,
                )
        except OSError as error:
            raise staging_error(self.path, error) from error

    def _read(self, start: int, end: int) -> bytes:
        return os.pread(self._descriptor, end - start, start)

    def _fault_of(
        self,
        number: int,
        entry: LogEntry,
        content: bytes | None,
        says: Opening | Checkpoint | None,
        before: Checkpoint | None,
    ) -> str:
        """Say why an entry is not the next of the prefix; "" where it is."""
        if content is None:
            return f"its entry {number} is damaged or was not written to its end"
        if says is None:
            return f"its entry {number} is none that this version knows"
        if number == 0:
            return _difference(says, self._opening)
        if entry.user_data != _USER_DATA.pack(number, self._mark):
            return f"its entry {number} is missing, or of another journal"
        if not isinstance(says, Checkpoint) or not _is_sound(says, before):
            return f"its entry {number} contradicts those before it"
        return ""

    # --- writing
    # --------------------------------------------------------------------------------

    def go_on(self, place: Place) -> None:
        """Cut the journal behind a place of its prefix, durably, and append from there on.

        Raises:
            StagingError: the disk is full, or the file cannot be written.
        """
        try:
            os.ftruncate(self._descriptor, place.end)
            os.fsync(self._descriptor)
            os.lseek(self._descriptor, place.end, os.SEEK_SET)
        except OSError as error:
            raise staging_error(self.path, error) from error
        self._place = place
        self._log = LogWriter(place.end)

    def append(self, says: Opening | Checkpoint) -> None:
        """Append an entry; it is durable when this returns.

        After an error nothing more may be appended.

        Raises:
            StagingError: the disk is full, or the file cannot be written.
        """
        user_data = _USER_DATA.pack(self._place.number, self._mark)
        data = memoryview(self._log.entry(user_data, _encoder.encode(says)))
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            sync_data(self._descriptor)
        except OSError as error:
            raise staging_error(self.path, error) from error
        self._place = Place(self._log.position, self._place.number + 1)

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


def _decoded(content: bytes | None) -> Opening | Checkpoint | None:
    """Return what an entry says; None where it is damaged, or says nothing that this version
    knows.
    """
    try:
        return _decoder.decode(content) if content is not None else None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


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
    # Nothing was decided meanwhile: the open member has grown, or was begun again and has nothing
    # staged.
    return said.open is None or said.durable_bytes >= before.durable_bytes


def _difference(says: Opening | Checkpoint, opening: Opening) -> str:
    """Say what a journal's first entry has other than this opening; "" where nothing is."""
    if not isinstance(says, Opening):
        return "its journal has no opening"
    ours, theirs = msgspec.structs.asdict(opening), msgspec.structs.asdict(says)
    differing = [name.replace("_", " ") for name in ours if ours[name] != theirs[name]]
    return f"its journal is of another {', '.join(differing)}" if differing else ""
