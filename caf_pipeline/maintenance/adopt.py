"""Takes over CAF files that another program posted: they are verified, and their rows loaded,
without uploading anything.

    a file here, or on the chain ─▶ read whole: Merkle root, SHA-256 and MD5 of each member ─▶
        posted by us, and enough copies give samples back ─▶ which members are objects of the newest
        inventory ─▶ rows, in one transaction

Bytes are hashed here, so that no provider is believed. What is taken over is a chunk by then, whose
name follows from its Merkle root; it has no manifest, and nothing is known of its objects' headers.

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
from caf_pipeline.inventory.adoption import MEMBER_SCHEMA, Adoption, RejectReason, decide
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.inventory.ledger_rows import STANDING_SCHEMA
from caf_pipeline.inventory.manifest import HEAD_MEMBER, HEAD_SIZE_BYTES
from caf_pipeline.inventory.objects import is_supported
from caf_pipeline.inventory.snapshot import Snapshot, verify_snapshot
from caf_pipeline.ledger.records import Chunk, RemoteChunk, plan_lease
from caf_pipeline.packing.chunk_reader import RemoteSource
from caf_pipeline.packing.samples import CopyFinding, check_copy, described, samples_of
from caf_pipeline.packing.sink import staging_error
from caf_pipeline.packing.staging import download_from
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.inventories import latest_whole_snapshot
from caf_pipeline.steps.planning import export_standing
from caf_pipeline.store.protocol import Copy, Lease, PostedFile, Sample
from caf_pipeline.system.folder_lock import reading, writing_into
from caf_pipeline.system.hashes import RunningHash
from caf_pipeline.system.parquet import write_whole
from caf_pipeline.system.quantities import counted
from caf_pipeline.system.ranges import LocalFile

TEMPORARY: Final = ".adopting-"
"""Begins the names of folders in staging, each of one adoption."""

PROOF_TYPES: Final = (0, 3)
"""Of which trees a file may have been posted; which one it was, the chain says only once the root
is known.
"""

_READ_BYTES: Final = 4 << 20
_ROWS: Final = 4_096


class AdoptionKind(StrEnum):
    """What became of a file."""

    ADOPTED = "adopted"
    KNOWN = "known"
    NOTHING_NEW = "nothing_new"
    NO_OBJECT = "no_object"
    NOT_CAF = "not_caf"
    OURS = "ours"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FileAdoption:
    """What became of a file.

    Attributes:
        name: its path, or its Merkle root where it was found on the chain.
        kind: what became of it; of a dry run, what would.
        file: what the store lists; None where nothing of it is ours, or it was not asked.
        chunk: the name that it has, or would have, in the ledger; "" where it has none.
        members: of its index, where that was read.
        rows: locations that were written, or would be.
        left_out: members that are no new objects of the source, by reason.
        copies: the providers whose samples were right.
        error: why it is refused, or not read.
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


Tell = Callable[[str, RejectReason], None]
"""Told each member that is left out, as the index has its key, and why."""

Progress = Callable[[int], None]
"""Told bytes that were read, as differences."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How files are adopted.

    Attributes: strip: leading parts of a member's key, each up to a '/', that are not of the
        object's key. dry_run: find out everything, and load nothing. tell: told what is left out.
        progress: told what is read. lenient: read an index as `caf.index.decode_index` does with
        lenience; each member's MD5 is compared either way.
    """

    strip: int = 0
    dry_run: bool = False
    tell: Tell = lambda member, reason: None
    progress: Progress = lambda size_bytes: None
    lenient: bool = False


def chunk_of_root(source: str, merkle_root: bytes) -> tuple[ChunkId, bytes]:
    """Return the chunk that an adopted file is, and the hash of its plan: functions of the source
    and the Merkle root.
    """
    sha256 = hashlib.sha256(
        b"caf-pipeline adopted\0" + source.encode() + b"\0" + merkle_root
    ).digest()
    return ChunkId(source, sha256.hex()[:12], 1), sha256


# --- the files
# ------------------------------------------------------------------------------------------


def adopt_files(context: RunContext, paths: Iterable[Path], terms: Terms) -> Iterator[FileAdoption]:
    """Adopt local files, each at once and in this order; yield what became of each.

    May be ended at any moment.

    Raises: NotLocated: as `latest_whole_snapshot`. HeldByOther: a plan of it is cut, or another
        adoption goes on. StoreUnreachable: the chain does not answer. StagingError: no room.
        IntegrityError: the inventory is damaged.
    """
    with _adopter(context, terms) as adopter:
        for path in paths:
            yield adopter.told(str(path), partial(adopter.local, path))


def adopt_from_chain(context: RunContext, terms: Terms) -> Iterator[FileAdoption]:
    """Adopt what the store lists of the wallet, and of wallets that the ledger's chunks were posted
    by; as `adopt_files`.

    A file is brought to staging, one at a time, where some provider's last bytes are those of a CAF
    file of another program.
    """
    with _adopter(context, terms) as adopter:
        files: dict[bytes, PostedFile] = {}
        for owner in sorted(adopter.owners):
            for file in context.store.posted_by(owner):
                files.setdefault(file.posting.merkle_root, file)
        for root, file in files.items():
            yield adopter.told(root.hex(), partial(adopter.stored, file))


@contextmanager
def _adopter(context: RunContext, terms: Terms) -> Iterator["_Adopter"]:
    takes_one = (
        f"'caf plan {context.source} --dry-run' takes one, which decides which members "
        "are "
        "objects, and plans nothing"
    )
    snapshot = latest_whole_snapshot(context, hint=takes_one)
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
            yield _Adopter(context, terms, lease, snapshot, Path(folder.name))


class _Adopter:
    """Adopts files of one source while nothing of it is planned."""

    def __init__(
        self, context: RunContext, terms: Terms, lease: Lease, snapshot: Snapshot, folder: Path
    ) -> None:
        self._work = context
        self._terms = terms
        self._lease = lease
        self._snapshot = snapshot
        self._folder = folder
        chunks = context.ledger.chunks.list()
        self.owners = {context.store.owner(), *(chunk.owner for chunk in chunks if chunk.owner)}
        self._known = {
            chunk.merkle_root: chunk
            for chunk in chunks
            if chunk.source == context.source and chunk.merkle_root
        }

    def told(self, name: str, adopt: Callable[[], FileAdoption]) -> FileAdoption:
        """Return what became of a file; one that is not as it should be ends nothing but itself."""
        self._lease.check()
        try:
            return adopt()
        except NoChainAnswer:
            raise
        except (ArchiveError, IntegrityError, StoreError) as error:
            return FileAdoption(name, AdoptionKind.REFUSED, error=error)

    def local(self, path: Path) -> FileAdoption:
        """Adopt a file of this machine."""
        with _opened(path) as file:
            return self._adopt(str(path), file, PROOF_TYPES)

    def stored(self, posted: PostedFile) -> FileAdoption:
        """Adopt a file of the store."""
        name = posted.posting.merkle_root.hex()
        if chunk := self._known.get(posted.posting.merkle_root):
            return _known(name, chunk)
        if kind := self._peek(posted):
            return FileAdoption(name, kind, posted)
        path = self._folder / "stored"
        try:
            self._download(posted, path)
            with _opened(path) as file:
                return self._adopt(name, file, [posted.proof_type])
        finally:
            path.unlink(missing_ok=True)

    def _peek(self, posted: PostedFile) -> AdoptionKind | None:
        """Say what a file is that is not worth to be brought here; None where any provider shows
        the index of a CAF file.
        """
        size_bytes, ours, answered = posted.posting.stored_size_bytes, False, False
        said = []
        for provider in self._work.store.holders(posted.posting):
            try:
                # What is read with lenience alone is brought here, too: it is told then what is odd
                # about it.
                reader = CafReader.open(
                    RemoteSource(self._work.store, posted.posting, provider),
                    name="it",
                    lenient=True,
                )
            except NoChainAnswer:
                raise
            except ArchiveError:
                answered = True
            except (StoreError, IntegrityError) as error:
                said.append(f"{provider}: {error}")
            else:
                if not _has_head(reader):
                    return None
                ours = True
        if ours:
            return AdoptionKind.OURS
        if answered:
            return AdoptionKind.NOT_CAF
        reasons = "; ".join(said) or "none is listed"
        raise StoreUnreachable(
            f"no provider gives the last of its {size_bytes} bytes ({reasons})",
            hint="try again later",
        )

    def _download(self, posted: PostedFile, path: Path) -> None:
        """Bring a file here from the first provider whose bytes have its Merkle root."""
        posting, said = posted.posting, []
        if shutil.disk_usage(self._folder).free < posting.stored_size_bytes:
            raise StagingError(
                f"the staging folder {self._work.staging()} has no room for a file of "
                f"{posting.stored_size_bytes} bytes",
                hint="make room there, or set 'staging' to a folder on a larger disk",
            )
        for provider in self._work.store.holders(posting):
            try:
                download_from(
                    self._work,
                    self._lease,
                    posting,
                    posted.proof_type,
                    provider=provider,
                    path=path,
                )
            except NoChainAnswer:
                raise
            except (StoreError, IntegrityError) as error:
                said.append(f"{provider}: {error}")
            except OSError as error:
                raise staging_error(path, error, posting.stored_size_bytes) from error
            else:
                return
        raise IntegrityError(
            f"no provider gives its bytes ({'; '.join(said) or 'none is listed'})",
            hint="try again later",
        )

    # a file that is here

    def _adopt(self, name: str, file: LocalFile, proof_types: Sequence[int]) -> FileAdoption:
        reader = CafReader.open(file, name=name, lenient=self._terms.lenient)
        members, trees = self._folder / "members.parquet", [MerkleTree(one) for one in proof_types]
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
            if chunk := self._known.get(root):
                return _known(name, chunk)
        if _has_head(reader):
            return FileAdoption(name, AdoptionKind.OURS, members=len(reader))
        post = self._verified(name, file, roots, reader.size_bytes)
        found = decide(
            members, self._snapshot.path, self._standing(), self._folder / "decided.parquet"
        )
        for member, reason in found.rejected_members():
            self._terms.tell(member, reason)
        return self._loaded(name, post, len(reader), found)

    def _members(
        self, file: LocalFile, reader: CafReader, trees: Sequence[MerkleTree]
    ) -> Iterator[pa.RecordBatch]:
        """Read the file once, to its end; yield its members, while the trees take all of its
        bytes.
        """
        stream = _HashedStream(
            file.stream(0, reader.size_bytes, _READ_BYTES), trees, self._terms.progress
        )
        rows: list[tuple[str, bytes, int, int, str, bytes, str | None]] = []
        for one in sorted(reader.members, key=lambda member: (member.start_byte, member.end_byte)):
            overlaps = one.start_byte < stream.position and one.size_bytes
            md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
            if one.size_bytes and not overlaps:
                stream.pass_over(one.start_byte)
                stream.pass_over(one.end_byte, md5, sha256)
            key = _object_key(one, self._terms.strip)
            fault = (
                RejectReason.OVERLAPPING
                if overlaps
                else None
                if is_supported(key)
                else RejectReason.UNSUPPORTED_KEY
            )
            rows.append(
                (
                    one.key,
                    key,
                    one.start_byte,
                    one.end_byte,
                    md5.hexdigest(),
                    sha256.digest(),
                    fault,
                )
            )
            if len(rows) == _ROWS:
                yield _batch(rows)
                rows = []
        yield _batch(rows)
        stream.pass_over(reader.size_bytes)

    def _verified(
        self, name: str, file: LocalFile, roots: Mapping[bytes, int], size_bytes: int
    ) -> "_Post":
        """Return the post of these bytes of ours that most copies are right of.

        Raises: StoredChunkMissing: nothing of ours has these bytes. NotProven: fewer copies than
            required are right.
        """
        store = self._work.store
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
                hint=f"'caf run {self._work.source}' archives the objects themselves",
            )
        found = []
        for posted in sorted(posts, key=lambda one: one.posting.start):
            samples = samples_of(file, size_bytes, posted.posting.merkle_root)
            copies = {copy.provider: copy for copy in store.copies(posted.posting)}.values()
            found.append(
                _Post(
                    posted,
                    samples,
                    [check_copy(store, posted.posting, copy, samples) for copy in copies],
                )
            )
        best = max(found, key=lambda one: len(one.right))
        if len(best.right) < store.required_copies:
            raise NotProven(
                f"{name} has {len(best.right)} of "
                f"{counted(store.required_copies, 'copy', 'copies')} listed and read back right"
                f" ({described(best.findings)}); nothing was changed",
                hint="try again later; or let 'caf run' archive the objects themselves",
            )
        return best

    def _standing(self) -> Path:
        """Export what the ledger knows of the source's objects, as it is now."""
        standing, context = self._folder / "standing", self._work
        if context.source in context.ledger.lookup.sources():
            export_standing(context, standing)
        else:
            write_whole((), standing, STANDING_SCHEMA)
        return standing

    def _loaded(self, name: str, post: "_Post", members: int, found: Adoption) -> FileAdoption:
        """Load the rows of a file, where it has any."""
        context, posted = self._work, post.file
        chunk_id, plan_sha256 = chunk_of_root(context.source, posted.posting.merkle_root)
        right = [copy.provider for copy in post.right]
        if not found.objects:
            kind = (
                AdoptionKind.NOTHING_NEW
                if {RejectReason.LOCATED, RejectReason.CLAIMED} & set(found.left_out)
                else AdoptionKind.NO_OBJECT
            )
            return FileAdoption(name, kind, posted, "", members, 0, found.left_out, right)
        chunk = RemoteChunk(
            file=posted,
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
            member_count=found.objects,
            member_bytes=found.object_bytes,
            skipped_count=0,
            samples=post.samples,
            manifest=None,
            manifest_sha256=b"",
        )
        rows = found.objects
        if not self._terms.dry_run:
            self._lease.check()
            context.store.bind()
            rows = context.ledger.rebuilds.restore_chunk(
                chunk, found.locations, (), plan_folder=str(context.plans() / chunk.plan)
            )
            self._known[posted.posting.merkle_root] = context.ledger.chunks.get(chunk.name)
        return FileAdoption(
            name, AdoptionKind.ADOPTED, posted, chunk.name, members, rows, found.left_out, right
        )


@dataclass(frozen=True, slots=True)
class _Post:
    """A file of ours on the chain, and what its copies gave of the samples."""

    file: PostedFile
    samples: Sequence[Sample]
    findings: Sequence[CopyFinding]

    @property
    def right(self) -> Sequence[Copy]:
        return [finding.copy for finding in self.findings if finding.good]


class _HashedStream:
    """A file's bytes in order: all of them go into the trees, and ranges of them into digests."""

    def __init__(
        self, pieces: Iterator[bytes], trees: Sequence[MerkleTree], progress: Progress
    ) -> None:
        self.position = 0
        self._pieces = pieces
        self._trees = trees
        self._progress = progress
        self._rest = memoryview(b"")

    def pass_over(self, end_byte: int, *digests: RunningHash) -> None:
        """Go on to a byte, at or behind the present one; let the digests take what is passed."""
        while self.position < end_byte:
            if not self._rest:
                self._rest = memoryview(next(self._pieces))
                for tree in self._trees:
                    tree.update(self._rest)
                self._progress(len(self._rest))
            taken = self._rest[: end_byte - self.position]
            for digest in digests:
                digest.update(taken)
            self._rest = self._rest[len(taken) :]
            self.position += len(taken)


@contextmanager
def _opened(path: Path) -> Iterator[LocalFile]:
    file = LocalFile(path)
    try:
        yield file
    finally:
        file.close()


def _object_key(member: Member, strip: int) -> bytes:
    """Return the key of the object that a member may be; empty, which no object's is, where it has
    too few parts.
    """
    parts = member.key.split("/", strip)
    return parts[strip].encode() if len(parts) > strip else b""


def _batch(rows: Sequence[tuple[object, ...]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [()] * len(MEMBER_SCHEMA)
    arrays = [
        pa.array(column, one.type) for column, one in zip(columns, MEMBER_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=MEMBER_SCHEMA)


def _has_head(reader: CafReader) -> bool:
    """Tell whether a file begins as our chunks do, which have a manifest that tells more than could
    be adopted.
    """
    return HEAD_MEMBER in reader and reader[HEAD_MEMBER] == Member(HEAD_MEMBER, 0, HEAD_SIZE_BYTES)


def _known(name: str, chunk: Chunk) -> FileAdoption:
    return FileAdoption(name, AdoptionKind.KNOWN, chunk=chunk.name)
