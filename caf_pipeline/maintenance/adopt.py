"""Adopts CAF files that another program posted: verifies them and loads their rows, without upload.

    a file ─▶ read whole: Merkle root, SHA-256 and MD5 of each member ─▶ posted by us, and enough
        copies return samples ─▶ members that are objects of the newest inventory ─▶ rows

An adopted chunk is named after its Merkle root. It has no manifest and no headers of objects.

Source: docs/decisions/0022-adopted-files.md.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa

from caf_pipeline.caf.archive import CafReader, Member
from caf_pipeline.caf.merkle import MerkleTree
from caf_pipeline.errors import (
    ArchiveError,
    CafError,
    IntegrityError,
    NoChainAnswer,
    NotProven,
    StagingError,
    StoredChunkMissing,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.formats import age
from caf_pipeline.inventory.adoption import MEMBER_SCHEMA, Adoption, RejectReason, decide
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.inventory.ledger_rows import STANDING_SCHEMA
from caf_pipeline.inventory.manifest import HEAD_MEMBER, HEAD_SIZE_BYTES
from caf_pipeline.inventory.objects import is_supported
from caf_pipeline.inventory.snapshot import Snapshot, verify_snapshot
from caf_pipeline.ledger.records import RemoteChunk, plan_lease
from caf_pipeline.packing.sink import staging_error
from caf_pipeline.packing.staging import download_from
from caf_pipeline.reading.chunk_reader import RemoteSource
from caf_pipeline.reading.samples import CopyFinding, check_copy, described, samples_of
from caf_pipeline.records import Copy, Lease, PostedFile, Sample
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.inventories import latest_whole_snapshot
from caf_pipeline.steps.planning import export_standing
from caf_pipeline.system.folder_lock import reading, writing_into
from caf_pipeline.system.hashes import RunningHash
from caf_pipeline.system.parquet import write_whole
from caf_pipeline.system.quantities import counted, show_size
from caf_pipeline.system.ranges import LocalFile

TEMPORARY: Final = ".adopting-"

PROOF_TYPES: Final = (0, 3)
"""The Merkle root depends on the proof type, which a local file does not have."""

_BEGIN_BYTES: Final = 64
_READ_BYTES: Final = 4 << 20
_ROWS: Final = 4_096


class AdoptionKind(StrEnum):
    """The outcome for a file."""

    ADOPTED = "adopted"
    WOULD_ADOPT = "would_adopt"
    KNOWN = "known"
    NOTHING_NEW = "nothing_new"
    NO_OBJECT = "no_object"
    NOT_CAF = "not_caf"
    OURS = "ours"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FileAdoption:
    """The outcome for a file.

    `name` is its path, or its Merkle root if it was found on the chain. `file` is None if the store
    has none of ours, or was not asked. `left_out` members, by reason, are not new objects of the
    source. `copies` returned the samples correctly.
    """

    name: str
    kind: AdoptionKind
    file: PostedFile | None = None
    chunk: str = ""
    members: int = 0
    rows: int = 0
    left_out: Mapping[RejectReason, int] = field(default_factory=dict)
    copies: Sequence[str] = ()
    error: CafError | None = None


Progress = Callable[[int], None]
"""Receives the number of further bytes read."""


@dataclass(frozen=True, slots=True)
class AdoptionOptions:
    """How files are adopted.

    `strip` counts leading parts of a member's key, each up to a '/', that the object's key lacks.
    `on_left_out` receives keys and reasons. `lenient` is that of `caf.index.decode_index`.
    """

    strip: int = 0
    dry_run: bool = False
    on_left_out: Callable[[str, RejectReason], None] = lambda member, reason: None
    progress: Progress = lambda size_bytes: None
    lenient: bool = False


def chunk_of_root(source: str, merkle_root: bytes) -> tuple[ChunkId, bytes]:
    """Return the chunk of an adopted file and the hash of its plan."""
    sha256 = hashlib.sha256(
        b"caf-pipeline adopted\0" + source.encode() + b"\0" + merkle_root
    ).digest()
    return ChunkId(source, sha256.hex()[:12], 1), sha256


# --- the files


def adopt_files(
    context: RunContext, paths: Iterable[Path], options: AdoptionOptions
) -> Iterator[FileAdoption]:
    """Adopt local files in turn, and yield the outcomes. May be interrupted anytime.

    Raises NotLocated without a whole inventory, HeldByOther beside a plan or another adoption.
    """
    with _adopter(context, options) as adopter:
        for path in paths:
            yield adopter.outcome(str(path), partial(adopter.adopt_local, path))


def adopt_from_chain(context: RunContext, options: AdoptionOptions) -> Iterator[FileAdoption]:
    """Adopt files of the wallet, and of the wallets that posted the ledger's chunks.

    Only CAF files of other programs are downloaded, one at a time.
    """
    with _adopter(context, options) as adopter:
        files: dict[bytes, PostedFile] = {}
        for owner in sorted(adopter.owners):
            for file in context.store.posted_by(owner):
                files.setdefault(file.posting.merkle_root, file)
        for root, file in files.items():
            yield adopter.outcome(root.hex(), partial(adopter.adopt_posted, file))


@contextmanager
def _adopter(context: RunContext, options: AdoptionOptions) -> Iterator["_Adopter"]:
    hint = (
        f"'caf plan {context.source} --dry-run' takes an inventory, which decides which members "
        "are objects, without planning"
    )
    snapshot = latest_whole_snapshot(context, hint=hint)
    staging = context.staging()
    with (
        context.lease(plan_lease(context.source)) as lease,
        writing_into(staging),
        reading(snapshot.path),
    ):
        verify_snapshot(snapshot.path)
        try:
            folder = tempfile.TemporaryDirectory(dir=staging, prefix=TEMPORARY)
        except OSError as error:
            raise staging_error(staging / TEMPORARY, error) from error
        with folder:
            yield _Adopter(context, options, lease, snapshot, Path(folder.name))


class _Adopter:
    def __init__(
        self,
        context: RunContext,
        options: AdoptionOptions,
        lease: Lease,
        snapshot: Snapshot,
        folder: Path,
    ) -> None:
        self._context = context
        self._options = options
        self._lease = lease
        self._snapshot = snapshot
        self._folder = folder
        chunks = context.ledger.chunks.list()
        self.owners = {context.store.owner(), *(chunk.owner for chunk in chunks if chunk.owner)}
        self._chunks = {
            chunk.merkle_root: chunk
            for chunk in chunks
            if chunk.source == context.source and chunk.merkle_root
        }

    def outcome(self, name: str, adopt: Callable[[], FileAdoption]) -> FileAdoption:
        self._lease.check()
        try:
            return adopt()
        except NoChainAnswer:
            raise
        except (ArchiveError, IntegrityError, StoreError) as error:
            return FileAdoption(name, AdoptionKind.REFUSED, error=error)

    def adopt_local(self, path: Path) -> FileAdoption:
        with _opened(path) as file:
            return self._adopt(str(path), file, PROOF_TYPES)

    def adopt_posted(self, posted: PostedFile) -> FileAdoption:
        name = posted.posting.merkle_root.hex()
        if chunk := self._chunks.get(posted.posting.merkle_root):
            return FileAdoption(name, AdoptionKind.KNOWN, chunk=chunk.name)
        if posted.header_sha256:
            return FileAdoption(name, AdoptionKind.OURS, posted)
        if kind := self._excluded_kind(posted):
            return FileAdoption(name, kind, posted)
        path = self._folder / "stored"
        try:
            self._download(posted, path)
            with _opened(path) as file:
                return self._adopt(name, file, [posted.proof_type])
        finally:
            path.unlink(missing_ok=True)

    def _excluded_kind(self, posted: PostedFile) -> AdoptionKind | None:
        size_bytes, is_own, answered = posted.posting.stored_size_bytes, False, False
        failures = []
        for provider in self._context.store.holders(posted.posting):
            try:
                # A file that only lenience can read is downloaded, so that its faults are reported.
                reader = CafReader.open(
                    RemoteSource(self._context.store, posted.posting, provider),
                    name="it",
                    lenient=True,
                )
            except NoChainAnswer:
                raise
            except ArchiveError:
                answered = True
            except (StoreError, IntegrityError) as error:
                failures.append(f"{provider}: {error}")
            else:
                if not _has_head(reader):
                    return None
                is_own = True
        if is_own:
            return AdoptionKind.OURS
        if answered:
            return AdoptionKind.NOT_CAF
        reasons = "; ".join(failures) or "none is listed"
        raise StoreUnreachable(
            f"no provider returns the last of its {size_bytes} bytes ({reasons})",
            hint="try again later",
        )

    def _download(self, posted: PostedFile, path: Path) -> None:
        posting, failures = posted.posting, []
        if shutil.disk_usage(self._folder).free < posting.stored_size_bytes:
            raise StagingError(
                f"the staging folder {self._context.staging()} has no room for a file of "
                f"{show_size(posting.stored_size_bytes)}",
                hint="make room there, or set 'staging' to a folder on a larger disk",
            )
        for provider in self._context.store.holders(posting):
            try:
                download_from(
                    self._context,
                    self._lease,
                    posting,
                    posted.proof_type,
                    provider=provider,
                    path=path,
                )
            except NoChainAnswer:
                raise
            except (StoreError, IntegrityError) as error:
                failures.append(f"{provider}: {error}")
            except OSError as error:
                raise staging_error(path, error, posting.stored_size_bytes) from error
            else:
                return
        raise IntegrityError(
            f"no provider returns its bytes ({'; '.join(failures) or 'none is listed'})",
            hint="try again later",
        )

    def _adopt(self, name: str, file: LocalFile, proof_types: Sequence[int]) -> FileAdoption:
        if age.is_age_file(file.read_prefix(_BEGIN_BYTES)[0]):
            raise ArchiveError(
                f"{name} is encrypted", hint="'age -d' opens it; only plain CAF files are adopted"
            )
        reader = CafReader.open(file, name=name, lenient=self._options.lenient)
        members = self._folder / "members.parquet"
        trees = [MerkleTree(proof_type) for proof_type in proof_types]
        before = os.fstat(file.descriptor)
        write_whole(self._members(file, reader, trees), members, MEMBER_SCHEMA)
        now = os.fstat(file.descriptor)
        if (before.st_size, before.st_mtime_ns, before.st_ctime_ns) != (
            now.st_size,
            now.st_mtime_ns,
            now.st_ctime_ns,
        ):
            raise ArchiveError(f"{name} changed while it was read.", hint="Run the command again.")
        roots = {tree.root(): tree.proof_type for tree in trees}
        for root in roots:
            if chunk := self._chunks.get(root):
                return FileAdoption(name, AdoptionKind.KNOWN, chunk=chunk.name)
        if _has_head(reader):
            return FileAdoption(name, AdoptionKind.OURS, members=len(reader))
        post = self._best_post(name, file, roots, reader.size_bytes)
        standing, context = self._folder / "standing", self._context
        if context.source in context.ledger.lookup.sources():
            export_standing(context, standing)
        else:
            write_whole((), standing, STANDING_SCHEMA)
        adoption = decide(members, self._snapshot.path, standing, self._folder / "decided.parquet")
        for member, reason in adoption.rejected_members():
            self._options.on_left_out(member, reason)
        return self._load(name, post, len(reader), adoption)

    def _members(
        self, file: LocalFile, reader: CafReader, trees: Sequence[MerkleTree]
    ) -> Iterator[pa.RecordBatch]:
        stream = _HashedStream(
            file.stream(0, reader.size_bytes, _READ_BYTES), trees, self._options.progress
        )
        rows: list[tuple[str, bytes, int, int, str, bytes, str | None]] = []
        for member in sorted(reader.members, key=lambda entry: (entry.start_byte, entry.end_byte)):
            overlaps = member.start_byte < stream.position and member.size_bytes
            md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
            if member.size_bytes and not overlaps:
                stream.advance(member.start_byte)
                stream.advance(member.end_byte, md5, sha256)
            parts = member.key.split("/", self._options.strip)
            # A member with too few parts has the empty key, which no object has.
            key = parts[-1].encode() if len(parts) > self._options.strip else b""
            fault = None
            if overlaps:
                fault = RejectReason.OVERLAPPING
            elif not is_supported(key):
                fault = RejectReason.UNSUPPORTED_KEY
            rows.append(
                (
                    member.key,
                    key,
                    member.start_byte,
                    member.end_byte,
                    md5.hexdigest(),
                    sha256.digest(),
                    fault,
                )
            )
            if len(rows) == _ROWS:
                yield _batch(rows)
                rows = []
        yield _batch(rows)
        stream.advance(reader.size_bytes)

    def _best_post(
        self, name: str, file: LocalFile, roots: Mapping[bytes, int], size_bytes: int
    ) -> "_Post":
        store = self._context.store
        posts = [
            posted
            for root, proof_type in roots.items()
            for posted in store.posted_as(root)
            if posted.posting.owner in self.owners
            and (posted.posting.stored_size_bytes, posted.proof_type) == (size_bytes, proof_type)
        ]
        if not posts:
            raise StoredChunkMissing(
                f"{name} is not on the chain: no file of {' or '.join(sorted(self.owners))} has "
                "these bytes; nothing was changed",
                hint=f"'caf run {self._context.source}' archives the objects themselves",
            )
        candidates = []
        for posted in sorted(posts, key=lambda post: post.posting.start):
            samples = samples_of(file, size_bytes, posted.posting.merkle_root)
            copies = {copy.provider: copy for copy in store.copies(posted.posting)}.values()
            findings = [check_copy(store, posted.posting, copy, samples) for copy in copies]
            candidates.append(_Post(posted, samples, findings))
        best = max(candidates, key=lambda post: len(post.right))
        if len(best.right) < store.required_copies:
            raise NotProven(
                f"{name} has {len(best.right)} of "
                f"{counted(store.required_copies, 'copy', 'copies')} listed and read back "
                f"correctly ({described(best.findings)}); nothing was changed",
                hint="try again later; or let 'caf run' archive the objects themselves",
            )
        return best

    def _load(self, name: str, post: "_Post", members: int, adoption: Adoption) -> FileAdoption:
        context, posted = self._context, post.file
        chunk_id, plan_sha256 = chunk_of_root(context.source, posted.posting.merkle_root)
        right = [copy.provider for copy in post.right]
        if not adoption.objects:
            kind = (
                AdoptionKind.NOTHING_NEW
                if {RejectReason.LOCATED, RejectReason.CLAIMED} & set(adoption.left_out)
                else AdoptionKind.NO_OBJECT
            )
            return FileAdoption(name, kind, posted, "", members, 0, adoption.left_out, right)
        chunk = RemoteChunk(
            file=posted,
            archive_id=None,
            copies=post.right,
            read_from=right,
            silent={},
            wrong={},
            name=str(chunk_id),
            source=context.source,
            plan=chunk_id.plan,
            number=chunk_id.number,
            snapshot=self._snapshot.name,
            plan_sha256=plan_sha256,
            object_count=None,
            object_bytes=None,
            member_count=adoption.objects,
            member_bytes=adoption.object_bytes,
            skipped_count=0,
            samples=post.samples,
            manifest=None,
            manifest_sha256=b"",
        )
        kind, rows = AdoptionKind.WOULD_ADOPT, adoption.objects
        if not self._options.dry_run:
            self._lease.check()
            context.store.bind()
            kind = AdoptionKind.ADOPTED
            rows = context.ledger.rebuilds.restore_chunk(
                chunk, adoption.locations, (), plan_folder=str(context.plans() / chunk.plan)
            )
            self._chunks[posted.posting.merkle_root] = context.ledger.chunks.get(chunk.name)
        return FileAdoption(name, kind, posted, chunk.name, members, rows, adoption.left_out, right)


@dataclass(frozen=True, slots=True)
class _Post:
    file: PostedFile
    samples: Sequence[Sample]
    findings: Sequence[CopyFinding]

    @property
    def right(self) -> Sequence[Copy]:
        return [finding.copy for finding in self.findings if finding.good]


class _HashedStream:
    def __init__(
        self, pieces: Iterator[bytes], trees: Sequence[MerkleTree], progress: Progress
    ) -> None:
        self.position = 0
        self._pieces = pieces
        self._trees = trees
        self._progress = progress
        self._rest = memoryview(b"")

    def advance(self, end_byte: int, *digests: RunningHash) -> None:
        while self.position < end_byte:
            if not self._rest:
                self._rest = memoryview(next(self._pieces))
                for tree in self._trees:
                    tree.update(self._rest)
                self._progress(len(self._rest))
            piece = self._rest[: end_byte - self.position]
            for digest in digests:
                digest.update(piece)
            self._rest = self._rest[len(piece) :]
            self.position += len(piece)


@contextmanager
def _opened(path: Path) -> Iterator[LocalFile]:
    file = LocalFile(path)
    try:
        yield file
    finally:
        file.close()


def _batch(rows: Sequence[tuple[object, ...]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [()] * len(MEMBER_SCHEMA)
    arrays = [
        pa.array(column, schema_field.type)
        for column, schema_field in zip(columns, MEMBER_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=MEMBER_SCHEMA)


def _has_head(reader: CafReader) -> bool:
    return HEAD_MEMBER in reader and reader[HEAD_MEMBER] == Member(HEAD_MEMBER, 0, HEAD_SIZE_BYTES)
