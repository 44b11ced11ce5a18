"""Reads the description of a stored chunk by range reads: head, index, manifest and samples.

A provider may lie. The description is trusted only if every copy that answers has the same bytes,
and if our packing could have written it. The Merkle root is only verified if copies differ and may
be read whole.

Source: docs/reference/chunk-format.md.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow.compute as pc

from caf_pipeline.caf.archive import DEFAULT_LIMITS, SUFFIX_BYTES, Member, RangeSource
from caf_pipeline.caf.index import FOOTER_SIZE_BYTES, parse_footer
from caf_pipeline.caf.merkle import MerkleTree
from caf_pipeline.encryption.identities import Identity
from caf_pipeline.encryption.opened_chunk import OpenedChunk, OpenedSource
from caf_pipeline.errors import (
    DamagedHeader,
    IntegrityError,
    MalformedArchive,
    NoChainAnswer,
    StoredChunkMissing,
    StoreUnreachable,
)
from caf_pipeline.formats import age
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.inventory.cutting import MAX_CHUNKS
from caf_pipeline.inventory.manifest import (
    CHUNK_FORMAT,
    HEAD_SIZE_BYTES,
    PART_COLUMNS,
    OpenedManifest,
    open_manifest,
    refuse_long_texts,
    row_identity,
    unknown_format,
)
from caf_pipeline.inventory.objects import PartRange, SkipReason, can_be_stored
from caf_pipeline.ledger.records import ChunkHeader, RemoteChunk
from caf_pipeline.packing.sink import staging_error
from caf_pipeline.reading.chunk_reader import SKIP_COLUMNS, ChunkFile
from caf_pipeline.reading.samples import SampleCheck, samples_of
from caf_pipeline.records import Copy, PostedFile, PostRecord, Sample
from caf_pipeline.store.protocol import ChunkReader

PIECE_BYTES: Final = 4 << 20

HEADER_BYTES: Final = 16 << 10
"""Bytes that are read first of an encrypted file: a header of 8 hybrid recipients."""

JUDGED_BYTES: Final = 64 << 20
"""Total size of objects read to find which copy is wrong."""

ROOT_SIZE_BYTES: Final[Mapping[int, int]] = {0: 64, 3: 32}
"""Size of a Merkle root by proof type."""

_CHECKED: Final = (*SKIP_COLUMNS, *PART_COLUMNS, "start_byte", "end_byte", "sha256", "member")
"""Reading all columns takes twice as long."""

_REASONS: Final = frozenset(SkipReason)
_LARGEST: Final = 2**63 - 1  # of an integer in the database


class CopiesDiffer(IntegrityError):
    """Copies have different bytes in `[start_byte, end_byte)`."""

    def __init__(self, start_byte: int, end_byte: int, groups: Sequence[Sequence[str]]) -> None:
        names = " differ from ".join(", ".join(providers) for providers in groups)
        super().__init__(
            f"its copies are not the same at bytes {start_byte} to {end_byte}: {names}"
        )
        self.start_byte = start_byte
        self.end_byte = end_byte


class AgreedSource:
    """A `caf.RangeSource` that reads each range from all copies and compares them.

    `providers` answered every read, `silent` ones did not. `wrong` copies are not read again.
    """

    def __init__(
        self,
        store: ChunkReader,
        posting: PostRecord,
        providers: Sequence[str],
        *,
        proof_type: int | None = None,
    ) -> None:
        """Copies that differ are only read whole if there is a `proof_type`."""
        self.providers = list(dict.fromkeys(providers))
        self.silent: dict[str, str] = {}
        self.wrong: dict[str, str] = {}
        self._permanent = True
        self._store = store
        self._posting = posting
        self._proof_type = proof_type if proof_type in ROOT_SIZE_BYTES else None
        self._suffix: tuple[int, bytes] = (0, b"")
        self._read: dict[Sample, None] = {}  # each range read, once

    @property
    def ranges_read(self) -> Sequence[Sample]:
        return tuple(self._read)

    @property
    def may_say_more(self) -> bool:
        return not self._permanent

    def read(self, start_byte: int, end_byte: int) -> bytes:
        """Return the bytes of a range.

        Raises CopiesDiffer, StoreUnreachable, or StoredChunkMissing if no provider has the bytes.
        """
        pieces = (
            self._read_piece(begin, min(begin + PIECE_BYTES, end_byte))
            for begin in range(start_byte, end_byte, PIECE_BYTES)
        )
        return b"".join(pieces)

    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        total = self._posting.stored_size_bytes
        if self._suffix[0] != size_bytes:
            self._suffix = size_bytes, self.read(max(total - size_bytes, 0), total)
        return self._suffix[1], total

    def _read_piece(self, start_byte: int, end_byte: int) -> bytes:
        first = b""
        groups: dict[bytes, list[str]] = {}
        for provider in list(self.providers):
            with self._excluding_failures(provider):
                piece = b"".join(
                    self._store.read(self._posting, start_byte, end_byte, provider=provider)
                )
            if provider in self.silent:
                continue
            digest = hashlib.sha256(piece).digest()
            first = first if groups else piece
            groups.setdefault(digest, []).append(provider)
        if not groups:
            if self._permanent:
                raise StoredChunkMissing(
                    f"no copy has bytes {start_byte} to {end_byte} of it ({self._reasons()})"
                )
            raise StoreUnreachable(
                f"no provider that has it answers ({self._reasons()})", hint="try again later"
            )
        if len(groups) > 1:
            if self._proof_type is not None and self._exclude_wrong_copies(self._proof_type):
                return self._read_piece(start_byte, end_byte)
            raise CopiesDiffer(start_byte, end_byte, list(groups.values()))
        self._read[Sample(start_byte, end_byte - start_byte, next(iter(groups)))] = None
        return first

    def prove(self, proof_type: int) -> None:
        """Verify the Merkle root of one copy, and thereby all earlier ranges."""
        for provider in list(self.providers):
            tree, check = MerkleTree(proof_type), SampleCheck(self.ranges_read)
            with self._excluding_failures(provider):
                for piece in self._store.read(
                    self._posting, 0, self._posting.stored_size_bytes, provider=provider
                ):
                    tree.update(piece)
                    check.update(piece)
            if provider in self.silent:
                continue
            if tree.root() != self._posting.merkle_root:
                self.wrong[provider] = "its bytes do not match its Merkle root"
                self.providers.remove(provider)
            elif not check.matches():
                raise IntegrityError(
                    f"{provider} returns other bytes for ranges than for the whole file, which "
                    "matches its Merkle root"
                )
            else:
                return
        if self.wrong:
            raise IntegrityError(f"no copy matches its Merkle root: {', '.join(self.wrong)}")
        kind = StoredChunkMissing if self._permanent else StoreUnreachable
        raise kind(
            "no copy can be read whole to verify the Merkle root, which alone proves which chunk "
            f"it is ({self._reasons()})"
        )

    def _reasons(self) -> str:
        return (
            "; ".join(f"{provider}: {reason}" for provider, reason in self.silent.items())
            or "no copy is listed"
        )

    @contextmanager
    def _excluding_failures(self, provider: str) -> Iterator[None]:
        try:
            yield
        except NoChainAnswer:
            raise
        except (StoreUnreachable, StoredChunkMissing, IntegrityError) as error:
            self.providers.remove(provider)
            self.silent[provider] = str(error)
            self._permanent = self._permanent and error.permanent

    def _exclude_wrong_copies(self, proof_type: int) -> bool:
        before = len(self.wrong)
        for provider in list(self.providers):
            tree = MerkleTree(proof_type)
            with self._excluding_failures(provider):
                for piece in self._store.read(
                    self._posting, 0, self._posting.stored_size_bytes, provider=provider
                ):
                    tree.update(piece)
            if provider not in self.silent and tree.root() != self._posting.merkle_root:
                self.wrong[provider] = "its bytes do not match its Merkle root"
                self.providers.remove(provider)
        return bool(self.providers) and len(self.wrong) > before

    def judge(
        self,
        start_byte: int,
        end_byte: int,
        parts: Sequence[Mapping[str, Any]],
        chunk: OpenedChunk | None,
    ) -> bool:
        """Exclude copies whose bytes do not match the SHA-256 of these objects.

        The range is of the CAF. Returns whether copies remain and some were excluded.
        """
        before = len(self.wrong)
        for provider in list(self.providers):
            copy = AgreedSource(self._store, self._posting, [provider])
            caf: RangeSource = OpenedSource(copy, chunk) if chunk else copy
            try:
                body = memoryview(caf.read(start_byte, end_byte))
            except IntegrityError as error:
                self.wrong[provider] = str(error)
                self.providers.remove(provider)
                continue
            for part in parts:
                content = body[part["start_byte"] - start_byte : part["end_byte"] - start_byte]
                if hashlib.sha256(content).digest() != part["sha256"]:
                    self.wrong[provider] = (
                        f"its bytes of {part['key'][:60]!r} do not match their SHA-256"
                    )
                    self.providers.remove(provider)
                    break
        return bool(self.providers) and len(self.wrong) > before


# --- encrypted files


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A posted file and the CAF in it. `header` and `chunk` are None if it is not encrypted."""

    file: PostedFile
    stored: AgreedSource
    caf: RangeSource
    size_bytes: int
    header: ChunkHeader | None = None
    chunk: OpenedChunk | None = None


def open_file(
    file: PostedFile, stored: AgreedSource, identities: Callable[[], Sequence[Identity]]
) -> OpenedFile:
    """Open a posted file. The post says if it is encrypted, and has the hash of its header.

    Raises IntegrityError for another header, and as `identities`, `OpenedChunk.open` and
    `AgreedSource.read`.
    """
    if file.header_sha256 is None:
        return OpenedFile(file, stored, stored, file.posting.stored_size_bytes)
    stored_size_bytes = file.posting.stored_size_bytes
    begin = _read_header(stored, stored_size_bytes)
    if hashlib.sha256(begin).digest() != file.header_sha256:
        raise IntegrityError("its header is not the header that was posted")
    header = ChunkHeader(
        begin[: -age.NONCE_BYTES],
        begin[-age.NONCE_BYTES :],
        age.plain_size(stored_size_bytes - len(begin)),
    )
    chunk = OpenedChunk.open(header, identities())
    return OpenedFile(
        file, stored, OpenedSource(stored, chunk), header.caf_size_bytes, header, chunk
    )


def _read_header(stored: RangeSource, size_bytes: int) -> bytes:
    """Return header and nonce, or b""."""
    begin = stored.read(0, min(HEADER_BYTES, size_bytes))
    if not age.is_complete(begin[: -age.NONCE_BYTES]) and age.is_age_file(begin):
        most = min(age.MAX_HEADER_BYTES + age.NONCE_BYTES, size_bytes)
        begin += stored.read(len(begin), most)
    try:
        header = age.parse_header(begin)
    except DamagedHeader:
        return b""
    return begin[: len(header.raw) + age.NONCE_BYTES]


# --- chunks


@dataclass(frozen=True, slots=True)
class Head:
    """The contents of a chunk's first member."""

    archive_id: str
    chunk: str


def read_head(caf: RangeSource, size_bytes: int) -> Head:
    """Read the first member. Raises MalformedArchive."""
    if size_bytes <= HEAD_SIZE_BYTES:
        raise MalformedArchive(f"its {size_bytes} bytes are fewer than those of a chunk's head")
    head = caf.read(0, HEAD_SIZE_BYTES)
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
    opened: OpenedFile, copies: Sequence[Copy], head: Head, *, of: str, spool: Path
) -> RemoteChunk:
    """Read and check index, manifest and samples of a chunk of the source `of`.

    The manifest stays in `spool`. Raises MalformedArchive or ArchiveLimitReached if our packing did
    not write this file.
    """
    file, stored = opened.file, opened.stored
    root_size = ROOT_SIZE_BYTES.get(file.proof_type)
    if root_size != len(file.posting.merkle_root):
        raise MalformedArchive(f"its Merkle root is not of proof type {file.proof_type}")
    chunk_id = ChunkId.parse(head.chunk)
    if chunk_id is None or chunk_id.source != of:
        raise MalformedArchive(
            f"its head names a chunk {head.chunk[:60]!r}, which does not belong to source {of}"
        )
    chunk_file = _open_index(opened.caf, head.chunk)
    member = chunk_file.manifest_member()
    sha256 = fetch_manifest(opened.caf, member, spool)
    manifest = open_manifest(spool)
    manifest.logs()
    described = manifest.described
    expected = {
        "archive": head.archive_id,
        "source": of,
        "chunk": head.chunk,
        "plan": chunk_id.plan,
    }
    for name, value in expected.items():
        if described.get(name) != value:
            raise MalformedArchive(
                f"its manifest names the {name} {str(described.get(name))[:60]!r}, and its head "
                f"{value!r}"
            )
    if not _is_text(described.get("snapshot")):
        raise MalformedArchive("its manifest names no snapshot")
    refuse_long_texts(spool)
    tally = _check_rows(manifest, chunk_file)
    plan_sha256, object_count, object_bytes = _plan_counts(described, chunk_id.plan, tally)
    samples = _samples(opened, manifest)
    return RemoteChunk(
        file=file,
        archive_id=head.archive_id,
        copies=copies,
        read_from=tuple(stored.providers),
        silent=dict(stored.silent),
        wrong=dict(stored.wrong),
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
        header=opened.header,
        unread=stored.ranges_read,
    )


def _samples(opened: OpenedFile, manifest: OpenedManifest) -> Sequence[Sample]:
    stored, chunk, posting = opened.stored, opened.chunk, opened.file.posting
    while True:
        try:
            return samples_of(stored, posting.stored_size_bytes, posting.merkle_root)
        except CopiesDiffer as differ:
            differing = differ.start_byte, differ.end_byte
            first, last = chunk.caf_range(*differing) if chunk else differing
            touched = (pc.field("start_byte") < last) & (pc.field("end_byte") > first)
            parts = [
                row for batch in manifest.members() for row in batch.filter(touched).to_pylist()
            ]
            start_byte = min((part["start_byte"] for part in parts), default=0)
            end_byte = max((part["end_byte"] for part in parts), default=0)
            if end_byte - start_byte > JUDGED_BYTES or not stored.judge(
                start_byte, end_byte, parts, chunk
            ):
                raise


def _open_index(caf: RangeSource, name: str) -> ChunkFile:
    tail, size_bytes = caf.read_suffix(SUFFIX_BYTES)
    if len(tail) >= FOOTER_SIZE_BYTES:
        reason = DEFAULT_LIMITS.reason_against(
            0, parse_footer(tail[-FOOTER_SIZE_BYTES:]), size_bytes
        )
        if reason:
            raise MalformedArchive(f"its footer is not that of a chunk: {reason}")
    chunk_file = ChunkFile(caf, name)
    if reason := DEFAULT_LIMITS.reason_against(len(chunk_file.reader), 0, 0):
        raise MalformedArchive(f"its index is not that of a chunk: {reason}")
    return chunk_file


def fetch_manifest(source: RangeSource, member: Member, spool: Path) -> bytes:
    """Write a chunk's manifest to `spool` and return its SHA-256."""
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


def _plan_counts(
    described: Mapping[str, Any], plan: str, tally: "_Tally"
) -> tuple[bytes | None, int | None, int | None]:
    if "plan_sha256" not in described:
        return None, None, None
    sha256, objects, size_bytes = (
        described.get(name) for name in ("plan_sha256", "planned_objects", "planned_bytes")
    )
    fits = (
        isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256) and sha256.startswith(plan)
    )
    if not fits or type(objects) is not int or type(size_bytes) is not int:
        raise MalformedArchive("its manifest has an invalid description of its plan")
    if (
        not tally.members + tally.skipped <= objects <= DEFAULT_LIMITS.max_members
        or not 0 <= size_bytes <= _LARGEST
    ):
        raise MalformedArchive(
            f"its manifest has {tally.members + tally.skipped} objects, but {objects} were planned"
        )
    return bytes.fromhex(str(sha256)), objects, size_bytes


# --- rows


@dataclass(slots=True)
class _Tally:
    limit: int  # start of the manifest
    members: int = 0
    member_bytes: int = 0
    skipped: int = 0
    position: int = HEAD_SIZE_BYTES
    key: bytes = b""
    versions: set[str] = field(default_factory=set)  # of the current key
    names: set[str] = field(default_factory=set)  # of members that start and end at `position`


def _check_rows(manifest: OpenedManifest, chunk_file: ChunkFile) -> _Tally:
    tally = _Tally(limit=chunk_file.manifest_member().start_byte)
    for row in manifest.rows(_CHECKED):
        _check_identity(row, tally)
        if row["skip_reason"] is None:
            _check_member(row, chunk_file, tally)
        elif (
            row["member"] is not None
            or row["skip_reason"] not in _REASONS
            or not _is_text(row["skip_detail"])
        ):
            raise MalformedArchive(f"its manifest skips {row['key'][:60]!r} for an unknown reason")
        else:
            tally.skipped += 1
    if member_count_fault := chunk_file.member_count_fault(tally.members):
        raise MalformedArchive(member_count_fault)
    if not tally.members:
        raise MalformedArchive("it holds no object, and such a chunk is never posted")
    return tally


def _check_identity(row: Mapping[str, Any], tally: _Tally) -> None:
    key, etag, version_id, size_bytes = (
        row["key"],
        row["etag"],
        row["version_id"],
        row["size_bytes"],
    )
    if not isinstance(key, str) or not can_be_stored(key):
        raise MalformedArchive(f"its manifest has an invalid key: {str(key)[:60]!r}")
    if (
        not _is_text(etag)
        or not (version_id is None or _is_text(version_id))
        or row["last_modified"] is None
    ):
        raise MalformedArchive(f"its manifest does not name the version of {key[:60]!r}")
    if type(size_bytes) is not int or not 0 <= size_bytes <= _LARGEST:
        raise MalformedArchive(f"its manifest gives {key[:60]!r} a size of {size_bytes}")
    if row["rewritten_at"] is not None and (
        version_id is not None or row["rewritten_at"] != row["last_modified"]
    ):
        raise MalformedArchive(
            f"its manifest gives {key[:60]!r} an invalid `rewritten_at`: {row['rewritten_at']}"
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
    size_bytes, part_columns = row["size_bytes"], [row[name] for name in PART_COLUMNS]
    if part_columns != [None] * len(part_columns):
        if None in part_columns:
            raise MalformedArchive(
                f"its manifest does not describe the part of {key[:60]!r} completely"
            )
        part = PartRange(*part_columns)
        is_valid = (
            1 <= part.number <= part.count <= MAX_CHUNKS
            and 0 <= part.start_byte < part.end_byte <= size_bytes
            and (part.number == 1) == (part.start_byte == 0)
            and (part.number == part.count) == (part.end_byte == size_bytes)
        )
        if not is_valid:
            raise MalformedArchive(
                f"its manifest has the impossible part {part.number} of {part.count} of "
                f"{key[:60]!r}"
            )
        size_bytes = part.size_bytes
    if range_fault := chunk_file.range_fault(member, start_byte, end_byte, size_bytes):
        raise MalformedArchive(range_fault)
    if start_byte < tally.position or end_byte > tally.limit:
        raise MalformedArchive(f"the bytes of {key[:60]!r} overlap those of another member")
    if end_byte > tally.position:
        tally.names.clear()
    if member in tally.names:
        raise MalformedArchive(f"its manifest has the member {member[:60]!r} twice")
    tally.names.add(member)
    if not isinstance(row["sha256"], bytes) or len(row["sha256"]) != hashlib.sha256().digest_size:
        raise MalformedArchive(f"its manifest has no SHA-256 for {key[:60]!r}")
    tally.position = end_byte
    tally.members += 1
    tally.member_bytes += end_byte - start_byte


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value
