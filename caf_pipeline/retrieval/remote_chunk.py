"""What a stored file says of itself as a chunk, by range reads: head, index, manifest, samples.

Nothing of it is believed before every copy that answers gave the same bytes and all of it fits
together: a provider may lie, and what no packing of ours could have written is not a chunk. The
Merkle root, which only whole reading proves, is not proven, unless that is asked for where copies
differ.

Source: docs/reference/chunk-format.md.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow.compute as pc

from caf_pipeline.caf.archive import DEFAULT_LIMITS, SUFFIX_BYTES, Member, RangeSource
from caf_pipeline.caf.index import FOOTER_SIZE_BYTES, parse_footer
from caf_pipeline.caf.merkle import MerkleTree
from caf_pipeline.errors import (
    IntegrityError,
    MalformedArchive,
    NoChainAnswer,
    StoredChunkMissing,
    StoreUnreachable,
)
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.inventory.cutting import MAX_CHUNKS
from caf_pipeline.inventory.manifest import (
    CHUNK_FORMAT,
    HEAD_SIZE_BYTES,
    PART_COLUMNS,
    OpenedManifest,
    open_manifest,
    refuse_bloated,
    row_identity,
    unknown_format,
)
from caf_pipeline.inventory.objects import PartRange, SkipReason, can_be_stored
from caf_pipeline.ledger.records import RemoteChunk
from caf_pipeline.packing.chunk_reader import SKIP_COLUMNS, ChunkFile
from caf_pipeline.packing.samples import samples_of
from caf_pipeline.packing.sink import staging_error
from caf_pipeline.store.protocol import ChunkReader, Copy, PostedFile, PostRecord, Sample

PIECE_BYTES: Final = 4 << 20
"""What is read from each copy before the next piece: two of them are in memory at once."""

JUDGED_BYTES: Final = 64 << 20
"""Objects up to this size are read whole, into memory, to find which of two copies is wrong; it is
an eighth of a percent of a chunk. Copies that differ in a larger one are not told apart.
"""

ROOT_SIZE_BYTES: Final[Mapping[int, int]] = {0: 64, 3: 32}
"""Of a Merkle root, by proof type."""

_CHECKED: Final = (*SKIP_COLUMNS, *PART_COLUMNS, "start_byte", "end_byte", "sha256", "member")
"""Columns of the manifest that rows are made of, and those that are held against the index: reading
all takes twice as long.
"""

_REASONS: Final = frozenset(SkipReason)
_LARGEST: Final = 2**63 - 1  # of a number that the database holds


class CopiesDiffer(IntegrityError):
    """Copies gave different bytes of `[start_byte, end_byte)`."""

    def __init__(self, start_byte: int, end_byte: int, said: Sequence[Sequence[str]]) -> None:
        groups = " differ from ".join(", ".join(providers) for providers in said)
        super().__init__(
            f"its copies are not the same at bytes {start_byte} to {end_byte}: {groups}"
        )
        self.start_byte = start_byte
        self.end_byte = end_byte


class AgreedSource:
    """A stored file as a `caf.RangeSource`: each range is read from all copies, and has to be the
    same from all that answer.

    Attributes:
        providers: those that answered every read so far.
        silent: why the others did not, by provider.
        wrong: what was found to be wrong with a copy, by provider; it is asked no more.
    """

    def __init__(
        self,
        store: ChunkReader,
        posting: PostRecord,
        providers: Sequence[str],
        *,
        proof_type: int | None = None,
    ) -> None:
        """Take the copies to read; with the file's `proof_type`, those that differ are read whole
        to find which are wrong.
        """
        self.providers = list(dict.fromkeys(providers))
        self.silent: dict[str, str] = {}
        self.wrong: dict[str, str] = {}
        self._permanent = True
        self._store = store
        self._posting = posting
        self._proof_type = proof_type if proof_type in ROOT_SIZE_BYTES else None
        self._suffix: tuple[int, bytes] = (0, b"")
        self._read: list[tuple[int, int, bytes]] = []  # what was returned: start, end and SHA-256

    @property
    def may_say_more(self) -> bool:
        """Whether one that did not answer may answer later."""
        return not self._permanent

    def read(self, start_byte: int, end_byte: int) -> bytes:
        """Return the bytes of the range.

        Raises:
            CopiesDiffer: the message names them. StoreUnreachable: none answers any more.
            StoredChunkMissing: none has these bytes.
        """
        pieces = (
            self._read_piece(begin, min(begin + PIECE_BYTES, end_byte))
            for begin in range(start_byte, end_byte, PIECE_BYTES)
        )
        return b"".join(pieces)

    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        """Return the last bytes and the file's size."""
        total = self._posting.stored_size_bytes
        if self._suffix[0] != size_bytes:
            self._suffix = size_bytes, self.read(max(total - size_bytes, 0), total)
        return self._suffix[1], total

    def _read_piece(self, start_byte: int, end_byte: int) -> bytes:
        first = b""
        said: dict[bytes, list[str]] = {}
        for provider in list(self.providers):
            with self._passed_over(provider):
                piece = b"".join(
                    self._store.read(self._posting, start_byte, end_byte, provider=provider)
                )
            if provider in self.silent:
                continue
            digest = hashlib.sha256(piece).digest()
            first = first if said else piece
            said.setdefault(digest, []).append(provider)
        if not said:
            reasons = (
                "; ".join(f"{provider}: {reason}" for provider, reason in self.silent.items())
                or "no copy is listed"
            )
            if self._permanent:
                raise StoredChunkMissing(
                    f"no provider gives bytes {start_byte} to {end_byte} of it ({reasons})"
                )
            raise StoreUnreachable(
                f"no provider that has it answers ({reasons})", hint="try again later"
            )
        if len(said) > 1:
            if self._proof_type is not None and self._judge_whole(self._proof_type):
                return self._read_piece(start_byte, end_byte)
            raise CopiesDiffer(start_byte, end_byte, list(said.values()))
        self._read.append((start_byte, end_byte, next(iter(said))))
        return first

    def prove(self, proof_type: int) -> None:
        """Read one copy whole. Its Merkle root proves everything that was read before.

        Raises: IntegrityError: no copy has the root, or the pieces that were read before differ
            from it. StoreUnreachable,
                StoredChunkMissing: no copy can be read whole.
        """
        for provider in list(self.providers):
            tree, position = MerkleTree(proof_type), 0
            digests = [hashlib.sha256() for _ in self._read]
            with self._passed_over(provider):
                for piece in self._store.read(
                    self._posting, 0, self._posting.stored_size_bytes, provider=provider
                ):
                    tree.update(piece)
                    for (start_byte, end_byte, _), digest in zip(self._read, digests, strict=True):
                        digest.update(
                            piece[max(start_byte - position, 0) : max(end_byte - position, 0)]
                        )
                    position += len(piece)
            if provider in self.silent:
                continue
            if tree.root() != self._posting.merkle_root:
                self.wrong[provider] = "gives other bytes than its Merkle root says"
                self.providers.remove(provider)
            elif [digest.digest() for digest in digests] != [sha256 for _, _, sha256 in self._read]:
                raise IntegrityError(
                    f"{provider} gives other bytes alone than those of the whole file, which has "
                    "its Merkle root"
                )
            else:
                return
        if self.wrong:
            raise IntegrityError(f"no copy has its Merkle root: {', '.join(self.wrong)}")
        reasons = (
            "; ".join(f"{provider}: {reason}" for provider, reason in self.silent.items())
            or "no copy is listed"
        )
        kind = StoredChunkMissing if self._permanent else StoreUnreachable
        raise kind(
            "no copy can be read whole, and only its Merkle root proves which chunk it is "
            f"({reasons})"
        )

    @contextmanager
    def _passed_over(self, provider: str) -> Iterator[None]:
        """Record that a provider failed: it is not asked again. An error of the chain is raised."""
        try:
            yield
        except NoChainAnswer:
            raise
        except (StoreUnreachable, StoredChunkMissing, IntegrityError) as error:
            self.providers.remove(provider)
            self.silent[provider] = str(error)
            self._permanent = self._permanent and error.permanent

    def _judge_whole(self, proof_type: int) -> bool:
        """Read each copy whole; one without the Merkle root of the chain is wrong, and is not read
        again.

        Returns whether some copies are left and some were found wrong.
        """
        before = len(self.wrong)
        for provider in list(self.providers):
            tree = MerkleTree(proof_type)
            with self._passed_over(provider):
                for piece in self._store.read(
                    self._posting, 0, self._posting.stored_size_bytes, provider=provider
                ):
                    tree.update(piece)
            if provider not in self.silent and tree.root() != self._posting.merkle_root:
                self.wrong[provider] = "gives other bytes than its Merkle root says"
                self.providers.remove(provider)
        return bool(self.providers) and len(self.wrong) > before

    def judge(self, start_byte: int, end_byte: int, parts: Sequence[Mapping[str, Any]]) -> bool:
        """Ask each copy for a range that holds these objects whole; whose SHA-256 do not fit is
        wrong, and asked no more.

        The objects are rows of LOCATION_SCHEMA.

        Returns whether some copies are left and some were found wrong.
        """
        before = len(self.wrong)
        for provider in list(self.providers):
            one = AgreedSource(self._store, self._posting, [provider])
            body = memoryview(one.read(start_byte, end_byte))
            for part in parts:
                found = body[part["start_byte"] - start_byte : part["end_byte"] - start_byte]
                if hashlib.sha256(found).digest() != part["sha256"]:
                    self.wrong[provider] = (
                        f"gives other bytes of {part['key'][:60]!r} than its SHA-256 says"
                    )
                    self.providers.remove(provider)
                    break
        return bool(self.providers) and len(self.wrong) > before


@dataclass(frozen=True, slots=True)
class Head:
    """What a chunk's first member says."""

    archive_id: str
    chunk: str


def read_head(source: AgreedSource, size_bytes: int) -> Head:
    """Read the first member of what may be a chunk.

    Raises:
        MalformedArchive: it is none. What `AgreedSource.read` raises.
    """
    if size_bytes <= HEAD_SIZE_BYTES:
        raise MalformedArchive(f"its {size_bytes} bytes are fewer than the head of a chunk has")
    head = source.read(0, HEAD_SIZE_BYTES)
    try:
        described = json.loads(head)
        if described["format"] != CHUNK_FORMAT:
            raise unknown_format("head", described["format"])
        archive_id, chunk = described["archive"], described["chunk"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise MalformedArchive("it does not begin with the head of a chunk") from error
    if not isinstance(archive_id, str) or not isinstance(chunk, str):
        raise MalformedArchive("it does not begin with the head of a chunk")
    return Head(archive_id, chunk)


def read_chunk(
    file: PostedFile,
    copies: Sequence[Copy],
    source: AgreedSource,
    head: Head,
    *,
    of: str,
    spool: Path,
) -> RemoteChunk:
    """Read index, manifest and samples of a chunk with this head, and hold all of it against each
    other.

    Args:
        file: what the store lists.
        copies: those that are listed.
        source: its bytes.
        head: as it was read.
        of: the name of the source that it should be of.
        spool: a file for the manifest, which stays.

    Raises: MalformedArchive, ArchiveLimitReached: it is no chunk that a packing of ours writes; the
        message says why. What `AgreedSource.read` raises. StagingError: the spool cannot be
        written.
    """
    root_size = ROOT_SIZE_BYTES.get(file.proof_type)
    if root_size != len(file.posting.merkle_root):
        raise MalformedArchive(f"its Merkle root is not of proof type {file.proof_type}")
    chunk_id = ChunkId.parse(head.chunk)
    if chunk_id is None or chunk_id.source != of:
        raise MalformedArchive(
            f"its head names a chunk {head.chunk[:60]!r}, which does not belong to source {of}"
        )
    chunk_file = _open(source, head.chunk)
    chunk_file.head_member()
    member = chunk_file.manifest_member()
    sha256 = fetch_manifest(source, member, spool)
    manifest = open_manifest(spool)
    manifest.logs()
    described = _described(manifest, head, of, chunk_id.plan)
    refuse_bloated(spool)
    tally = _check_rows(manifest, chunk_file)
    plan_sha256, object_count, object_bytes = _planned(described, chunk_id.plan, tally)
    samples = _samples(source, file.posting, manifest)
    return RemoteChunk(
        file=file,
        copies=copies,
        read_from=tuple(source.providers),
        silent=dict(source.silent),
        wrong=dict(source.wrong),
        name=head.chunk,
        source=of,
        plan=chunk_id.plan,
        number=chunk_id.number,
        snapshot=described["snapshot"],
        plan_sha256=plan_sha256,
        object_count=object_count,
        object_bytes=object_bytes,
        member_count=tally.members,
        member_bytes=tally.member_bytes,
        skipped_count=tally.skipped,
        samples=samples,
        manifest=member,
        manifest_sha256=sha256,
        part=manifest.part(),
    )


def _samples(
    source: AgreedSource, posting: PostRecord, manifest: OpenedManifest
) -> Sequence[Sample]:
    """Take the samples.

    Where copies differ in an object, the SHA-256 that all of them have of it tells which are wrong.
    """
    while True:
        try:
            return samples_of(source, posting.stored_size_bytes, posting.merkle_root)
        except CopiesDiffer as differ:
            touched = (pc.field("start_byte") < differ.end_byte) & (
                pc.field("end_byte") > differ.start_byte
            )
            parts = [
                row for batch in manifest.members() for row in batch.filter(touched).to_pylist()
            ]
            start_byte = min((part["start_byte"] for part in parts), default=0)
            end_byte = max((part["end_byte"] for part in parts), default=0)
            if end_byte - start_byte > JUDGED_BYTES or not source.judge(
                start_byte, end_byte, parts
            ):
                raise


def _open(source: AgreedSource, name: str) -> ChunkFile:
    """Open the index, where it is no larger than any that was ever written."""
    tail, size_bytes = source.read_suffix(SUFFIX_BYTES)
    if len(tail) >= FOOTER_SIZE_BYTES:
        reason = DEFAULT_LIMITS.reason_against(
            0, parse_footer(tail[-FOOTER_SIZE_BYTES:]), size_bytes
        )
        if reason:
            raise MalformedArchive(f"its footer is not that of a chunk: {reason}")
    chunk_file = ChunkFile(source, name)
    if reason := DEFAULT_LIMITS.reason_against(len(chunk_file.reader), 0, 0):
        raise MalformedArchive(f"its index is not that of a chunk: {reason}")
    return chunk_file


def fetch_manifest(source: RangeSource, member: Member, spool: Path) -> bytes:
    """Bring a chunk's manifest into a file; return its SHA-256."""
    digest = hashlib.sha256()
    try:
        with spool.open("wb") as file:
            for begin in range(member.start_byte, member.end_byte, PIECE_BYTES):
                piece = source.read(begin, min(begin + PIECE_BYTES, member.end_byte))
                digest.update(piece)
                file.write(piece)
    except OSError as error:
        raise staging_error(spool, error) from error
    return digest.digest()


def _described(manifest: OpenedManifest, head: Head, source: str, plan: str) -> Mapping[str, Any]:
    """Return the manifest's description, which says the same as the head."""
    described = manifest.described
    expected = {"archive": head.archive_id, "source": source, "chunk": head.chunk, "plan": plan}
    for name, value in expected.items():
        if described.get(name) != value:
            raise MalformedArchive(
                f"its manifest names the {name} {str(described.get(name))[:60]!r}, and its head "
                f"{value!r}"
            )
    if not _is_text(described.get("snapshot")):
        raise MalformedArchive("its manifest names no snapshot")
    return described


def _planned(
    described: Mapping[str, Any], plan: str, tally: "_Tally"
) -> tuple[bytes | None, int | None, int | None]:
    """Return what the manifest says of the plan: its full hash, and the objects and bytes that were
    planned for the chunk.
    """
    if "plan_sha256" not in described:
        return None, None, None
    sha256, objects, size_bytes = (
        described.get(name) for name in ("plan_sha256", "planned_objects", "planned_bytes")
    )
    fits = (
        isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256) and sha256.startswith(plan)
    )
    if not fits or type(objects) is not int or type(size_bytes) is not int:
        raise MalformedArchive("its manifest describes its plan as no packing writes it")
    if (
        not tally.members + tally.skipped <= objects <= DEFAULT_LIMITS.max_members
        or not 0 <= size_bytes <= _LARGEST
    ):
        raise MalformedArchive(
            f"its manifest has {tally.members + tally.skipped} objects, of {objects} that were "
            "planned"
        )
    return bytes.fromhex(str(sha256)), objects, size_bytes


# --- rows
# ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tally:
    """What the rows come to, and where they are; rows are in the order of keys, and of bytes."""

    limit: int  # where the manifest begins
    members: int = 0
    member_bytes: int = 0
    skipped: int = 0
    position: int = HEAD_SIZE_BYTES
    key: bytes = b""
    versions: set[str] = field(default_factory=set)  # of this key
    names: set[str] = field(default_factory=set)  # of members that begin and end here


def _check_rows(manifest: OpenedManifest, chunk_file: ChunkFile) -> _Tally:
    """Hold each row of a manifest against the index and the rows before it; return what they come
    to.

    Raises:
        MalformedArchive: a row is none that a packing writes, or the index has another member.
    """
    tally = _Tally(limit=chunk_file.manifest_member().start_byte)
    for row in manifest.rows(_CHECKED):
        _check_identity(row, tally)
        if row["skip_reason"] is None:
            _check_member(row, chunk_file, tally)
        else:
            _check_skip(row, tally)
    if miscounted := chunk_file.miscounted(tally.members):
        raise MalformedArchive(miscounted)
    if not tally.members:
        raise MalformedArchive("it holds no object, and such a chunk is never posted")
    return tally


def _check_identity(row: Mapping[str, Any], tally: _Tally) -> None:
    """Let a row pass that names an object that none before it named."""
    key, etag, version_id, size_bytes = (
        row["key"],
        row["etag"],
        row["version_id"],
        row["size_bytes"],
    )
    if not isinstance(key, str) or not can_be_stored(key):
        raise MalformedArchive(f"its manifest has a key that no chunk can hold: {str(key)[:60]!r}")
    if (
        not _is_text(etag)
        or not (version_id is None or _is_text(version_id))
        or row["last_modified"] is None
    ):
        raise MalformedArchive(f"its manifest does not say which version of {key[:60]!r} it has")
    if type(size_bytes) is not int or not 0 <= size_bytes <= _LARGEST:
        raise MalformedArchive(f"its manifest gives {key[:60]!r} a size of {size_bytes}")
    if row["rewritten_at"] is not None and (
        version_id is not None or row["rewritten_at"] != row["last_modified"]
    ):
        raise MalformedArchive(
            f"its manifest gives {key[:60]!r} a `rewritten_at` that no packing writes: "
            f"{row['rewritten_at']}"
        )
    version = row_identity(row)
    encoded = key.encode()
    if encoded != tally.key:
        if encoded < tally.key:
            raise MalformedArchive(f"its manifest is not in the order of keys at {key[:60]!r}")
        tally.key = encoded
        tally.versions.clear()
    if version in tally.versions:
        raise MalformedArchive(f"its manifest names {key[:60]!r} twice")
    tally.versions.add(version)


def _check_member(row: Mapping[str, Any], chunk_file: ChunkFile, tally: _Tally) -> None:
    key, member, start_byte, end_byte = (
        row["key"],
        row["member"],
        row["start_byte"],
        row["end_byte"],
    )
    if not isinstance(member, str):
        raise MalformedArchive(f"its manifest names no member for {key[:60]!r}")
    if misplaced := chunk_file.misplaced(member, start_byte, end_byte, _member_bytes(row)):
        raise MalformedArchive(misplaced)
    if start_byte < tally.position or end_byte > tally.limit:
        raise MalformedArchive(f"the bytes of {key[:60]!r} are those of another member, too")
    if end_byte > tally.position:
        tally.names.clear()
    if member in tally.names:
        raise MalformedArchive(f"its manifest has the member {member[:60]!r} twice")
    tally.names.add(member)
    if not isinstance(row["sha256"], bytes) or len(row["sha256"]) != hashlib.sha256().digest_size:
        raise MalformedArchive(f"its manifest has no SHA-256 of {key[:60]!r}")
    tally.position = end_byte
    tally.members += 1
    tally.member_bytes += end_byte - start_byte


def _member_bytes(row: Mapping[str, Any]) -> int:
    """Return the size of the member that a row tells of: of a part, where the row describes one
    that can be.
    """
    size_bytes: int = row["size_bytes"]
    numbers = [row[name] for name in PART_COLUMNS]
    if numbers == [None] * len(numbers):
        return size_bytes
    if None in numbers:
        raise MalformedArchive(
            f"its manifest does not say which part of {row['key'][:60]!r} it has"
        )
    part = PartRange(*numbers)
    in_order = 1 <= part.number <= part.count and 0 <= part.start_byte < part.end_byte <= size_bytes
    ends = (part.number == 1, part.number == part.count) == (
        part.start_byte == 0,
        part.end_byte == size_bytes,
    )
    if not in_order or not ends or part.count > MAX_CHUNKS:
        raise MalformedArchive(
            f"its manifest has part {part.number} of {part.count} of {row['key'][:60]!r}, which "
            "cannot be"
        )
    return part.size_bytes


def _check_skip(row: Mapping[str, Any], tally: _Tally) -> None:
    if (
        row["member"] is not None
        or row["skip_reason"] not in _REASONS
        or not _is_text(row["skip_detail"])
    ):
        raise MalformedArchive(f"its manifest skips {row['key'][:60]!r} for an unknown reason")
    tally.skipped += 1


def _is_text(value: object) -> bool:
    """Tell whether a value is text that the database holds."""
    return isinstance(value, str) and "\0" not in value
