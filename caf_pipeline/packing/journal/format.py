"""The format of the packing journal: which bytes of a staged chunk are safe, and what they are.

The journal is a ChunkIO log of MessagePack beside the part, whose hashes show damaged entries. User
data are the entry's number (u64 LE) and 8 bytes of the SHA-256 of the opening, which rule out
entries of another journal. Entry 0 is the opening; later ones are checkpoints. A reader stops at
the first invalid one.

The journal of a private packing has the same entries, each sealed (`encryption.entry_cipher`). Its
user data are the salt. Each run writes its own journal.

Source: docs/decisions/0010-the-packing-journal.md.
"""

import contextlib
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
from caf_pipeline.encryption.entry_cipher import EntryCipher
from caf_pipeline.formats import age
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
from caf_pipeline.packing.sink import staging_errors, sync_data
from caf_pipeline.system.hashes import RunningHash

JOURNAL_FORMAT: Final = 5
"""Grows with every change of the entries, and of how a member's bytes are made."""

MAX_ENTRY_BYTES: Final = 64 << 20
"""Longer entries are not read. Packing waits at an eighth of this size."""

MAX_OUTCOMES: Final = 40_000
"""Outcomes of one checkpoint: twice the number at which packing waits, plus one flush."""

MAX_JOURNAL_BYTES: Final = 8 << 30
"""Limit of a reader: a million members with S3's most headers, 8 KiB."""

_USER_DATA: Final = struct.Struct("<Q8s")

_Size = Annotated[int, msgspec.Meta(ge=0, le=DEFAULT_LIMITS.max_bytes)]
_Sha256 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Crc64 = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
_TreeState = Annotated[bytes, msgspec.Meta(max_length=8192)]  # 64 levels of 64 bytes and a head
_Name = Annotated[str, msgspec.Meta(max_length=4096)]


class Opening(msgspec.Struct, array_like=True, tag=0, forbid_unknown_fields=True, frozen=True):
    """The first entry: everything but the objects that determines a chunk's bytes."""

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
    """An object in the chunk at `[start_byte, end_byte)`. `headers` is None if it has none."""

    start_byte: _Size
    end_byte: _Size
    sha256: _Sha256
    crc64nvme: _Crc64
    s3_checksum: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    headers: ObjectHeaders | None = None


class SkippedObject(
    msgspec.Struct, array_like=True, tag=1, forbid_unknown_fields=True, frozen=True, gc=False
):
    """A left-out object."""

    reason: SkipReason
    detail: str


class OpenMember(
    msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False
):
    """A large object staged in part: `size_bytes` of it, with their SHA-256."""

    size_bytes: _Size
    sha256: _Sha256
    headers: ObjectHeaders | None = None


class SealedPart(
    msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False
):
    """How to read an encrypted part: its whole segments, then the open one, which is here.

    `nonce` ties the checkpoint to the part. `payload_start` is the byte after it.
    """

    file_key: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    payload_start: _Size
    open_segment: Annotated[bytes, msgspec.Meta(max_length=age.SEGMENT_BYTES)]


class Checkpoint(msgspec.Struct, array_like=True, tag=1, forbid_unknown_fields=True, frozen=True):
    """The outcomes of the plan's next objects, and the state of the file after them.

    Attributes:
        outcomes: in plan order, continuing the previous checkpoint.
        objects_sha256: over all objects so far.
        boundary: end of the last whole member, and start of the open one.
        tree: `MerkleTree.state(open_block=False)` at the boundary. Empty if the part is encrypted:
            its segments are authenticated, and resuming makes another file.
        durable_bytes: fsynced before this entry, or in its open segment.
        sealed: None if the part is plain. Also None in entries that a resuming run copied: the
            checkpoint after them is of its part.
    """

    outcomes: Annotated[list[PackedMember | SkippedObject], msgspec.Meta(max_length=MAX_OUTCOMES)]
    objects_sha256: _Sha256
    boundary: _Size
    tree: _TreeState
    durable_bytes: _Size
    open: OpenMember | None = None
    sealed: SealedPart | None = None


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
    """Return the opening for packing this chunk."""
    return Opening(
        journal_format=JOURNAL_FORMAT,
        # Everything in the software that the bytes depend on. Releases that keep it can resume.
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
    """Add an object to the SHA-256 that ties a journal to its objects."""
    obj, member = planned.object, planned.member.encode()
    digest.update(
        b"%d %d %b%b%d %b\0"
        % (len(obj.key), len(member), obj.key, member, obj.size_bytes, obj.object_version.encode())
    )
    if planned.part:
        digest.update(b"%d %d\0" % (planned.part.start_byte, planned.part.end_byte))


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """An entry's end, and the next one's number."""

    end: int = 0
    number: int = 0


class Journal:
    """The journal of a packing: read first, then cut behind its valid prefix and appended to.

    Not thread-safe. Raises StagingError for errors of the operating system. After reading, `broken`
    is why the valid prefix ended early, or "". With a `cipher`, the entries are sealed.
    """

    def __init__(
        self, path: Path, descriptor: int, opening: Opening, cipher: EntryCipher | None = None
    ) -> None:
        self.path = path
        self.broken = ""
        self._descriptor = descriptor
        self._opening = opening
        self._cipher = cipher
        self._read_end = MAX_JOURNAL_BYTES
        self._mark = hashlib.sha256(_encoder.encode(opening)).digest()[:8]
        self._position = JournalPosition()
        self._log = LogWriter()

    @classmethod
    def open(cls, path: Path, opening: Opening, cipher: EntryCipher | None = None) -> Self:
        with staging_errors(path):
            return cls(
                path,
                os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600),
                opening,
                cipher,
            )

    def file_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        os.close(self._descriptor)

    # --- reading ----------------------------------------------------------------------------------

    def checkpoints(self) -> Iterator[tuple[JournalPosition, Checkpoint]]:
        """Yield the checkpoints of the valid prefix, each with the position behind it.

        An invalid entry raises nothing, but sets `broken`. Memory is one entry.
        """
        self.broken = "its journal has no opening"
        previous: Checkpoint | None = None
        with staging_errors(self.path):
            log = LogReader(
                lambda start, end: os.pread(self._descriptor, end - start, start),
                min(self.file_bytes(), self._read_end),
            )
            for number, entry in enumerate(log.entries()):
                content = self._content(log, number, entry)
                record: Opening | Checkpoint | None = None
                with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                    record = None if content is None else _decoder.decode(content)
                self.broken = self._fault_of(number, entry, record, previous)
                if self.broken:
                    return
                if isinstance(record, Checkpoint):
                    yield JournalPosition(entry.end, number + 1), record
                    previous = record

    def read_until(self, position: JournalPosition) -> None:
        """Ignore later entries, also those that another run may still append."""
        self._read_end = position.end

    def _content(self, log: LogReader, number: int, entry: LogEntry) -> bytes | None:
        is_short = entry.content_size_bytes <= MAX_ENTRY_BYTES
        content = log.content(entry) if is_short else None
        if content is None or self._cipher is None:
            return content
        if number == 0:
            self._cipher = self._cipher.with_salt(entry.user_data)
        return self._cipher.open(number, content)

    def _user_data(self, number: int) -> bytes:
        return self._cipher.salt if self._cipher else _USER_DATA.pack(number, self._mark)

    def _fault_of(
        self,
        number: int,
        entry: LogEntry,
        record: Opening | Checkpoint | None,
        previous: Checkpoint | None,
    ) -> str:
        if record is None:
            key = "" if self._cipher is None else ", or under another key"
            return f"its entry {number} is damaged, incomplete or of another version{key}"
        if number == 0:
            if not isinstance(record, Opening):
                return "its journal has no opening"
            expected, actual = map(msgspec.structs.asdict, (self._opening, record))
            fields = [field for field in expected if expected[field] != actual[field]]
            names = ", ".join(fields).replace("_", " ")
            return f"its journal is of another {names}" if fields else ""
        if entry.user_data != self._user_data(number):
            return f"its entry {number} is missing or of another journal"
        if not isinstance(record, Checkpoint) or not _is_consistent(record, previous):
            return f"its entry {number} contradicts earlier entries"
        return ""

    # --- writing ----------------------------------------------------------------------------------

    def continue_at(self, position: JournalPosition) -> None:
        with staging_errors(self.path):
            os.ftruncate(self._descriptor, position.end)
            os.fsync(self._descriptor)
            os.lseek(self._descriptor, position.end, os.SEEK_SET)
        self._position = position
        self._log = LogWriter(position.end)

    def append(self, entry: Opening | Checkpoint) -> None:
        """Append an entry, durably. After an error, append no more."""
        number, content = self._position.number, _encoder.encode(entry)
        if self._cipher:
            content = self._cipher.seal(number, content)
        data = memoryview(self._log.entry(self._user_data(number), content))
        with staging_errors(self.path):
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            sync_data(self._descriptor)
        self._position = JournalPosition(self._log.position, number + 1)

    def cut(self) -> None:
        """Cut the remains of a failed append. Raises nothing."""
        try:
            os.ftruncate(self._descriptor, self._position.end)
        except OSError:  # a reader stops before a torn entry anyway
            return

    @property
    def size_bytes(self) -> int:
        return self._position.end


def _is_consistent(checkpoint: Checkpoint, previous: Checkpoint | None) -> bool:
    position = previous.boundary if previous else HEAD_SIZE_BYTES
    for outcome in checkpoint.outcomes:
        if isinstance(outcome, PackedMember):
            if outcome.start_byte != position or outcome.end_byte < position:
                return False
            position = outcome.end_byte
    inside = checkpoint.open.size_bytes if checkpoint.open else 0
    if checkpoint.boundary != position or checkpoint.durable_bytes != position + inside:
        return False
    if previous is None or checkpoint.outcomes or not previous.open:
        return True
    # If there are no outcomes, the open member has grown, or was started again and is not staged.
    return checkpoint.open is None or checkpoint.durable_bytes >= previous.durable_bytes
