"""Restores a ledger from what the store lists: which files are chunks of ours, and their rows.

Needs the source's settings (its address makes the archive's id) and the owner's address; no secret, and nothing of S3. Every
file that is listed under the archive's id is reported: as a chunk, or with the reason why it is none and gives no rows. Of
a chunk that the ledger has already, nothing is read.

    posted once, by us ─▶ head (all copies agree) ─▶ a name that no other file claims ─▶ index, manifest, samples ─▶ rows

With as many copies listed as are required a chunk comes back as `located`; with fewer as `damaged`, for `repair` to mend.

Source: promise 1 in docs/design.md, docs/format.md.
"""

import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Final

from caf_pipeline.chunk_state import CLAIMING, IN_GOOD_STANDING
from caf_pipeline.context import Workplace
from caf_pipeline.errors import (
    ArchiveError,
    CafError,
    ClaimConflict,
    IntegrityError,
    NoChainAnswer,
    StagingError,
    StoredChunkMissing,
    StoreUnreachable,
)
from caf_pipeline.inventory.manifest import open_manifest
from caf_pipeline.ledger.records import Chunk, RemoteChunk, plan_lease
from caf_pipeline.packing.chunk_reader import SKIP_COLUMNS, skips_of
from caf_pipeline.retrieval.remote_chunk import AgreedSource, Head, fetch_manifest, read_chunk, read_head
from caf_pipeline.store.protocol import Copy, PostedFile
from caf_pipeline.system.folder_lock import writing_into
from caf_pipeline.system.quantities import counted

_PREFIX: Final = ".restoring-"

ELSEWHERE: Final = "every object of it is located in other chunks, e.g. since it was withdrawn and they were archived again"
"""Why a chunk that was found is not restored though nothing is wrong with it."""


class FileKind(StrEnum):
    """What a file turned out to be."""

    CHUNK = "chunk"
    KNOWN = "known"
    FOREIGN = "foreign"
    DOUBLE = "double"
    NOT_UPLOADED = "not_uploaded"
    NO_CHUNK = "no_chunk"
    DIFFERING = "differing"
    UNREADABLE = "unreadable"
    CONFLICTING = "conflicting"
    SUPERSEDED = "superseded"


NOTHING_MISSING: Final = frozenset({FileKind.CHUNK, FileKind.KNOWN, FileKind.FOREIGN, FileKind.DOUBLE, FileKind.SUPERSEDED})
"""Kinds of files that leave no object out of the ledger."""


@dataclass(frozen=True, slots=True)
class FileFinding:
    """A file that the store lists.

    Attributes:
        file: the file.
        kind: what it is.
        why: one sentence on why it gives no rows; "" for a chunk, and for what the ledger knows.
        name: the chunk that it is, or says to be; "" where it says nothing.
        chunk: what it says of itself, of a chunk.
        spool: the chunk's manifest, until the next finding is asked for.
    """

    file: PostedFile
    kind: FileKind
    why: str = ""
    name: str = ""
    chunk: RemoteChunk | None = None
    spool: Path | None = None


@dataclass(frozen=True, slots=True)
class RebuildOutcome:
    """What became of a finding.

    Attributes:
        finding: as it was found, or `conflicting` or `superseded` by what the ledger has.
        rows: location rows that were written; None where nothing was.
        fault: why the chunk is damaged; "" where it is located.
    """

    finding: FileFinding
    rows: int | None = None
    fault: str = ""

    @property
    def complete(self) -> bool:
        """Whether no object of this file is left out of the ledger."""
        return self.finding.kind in NOTHING_MISSING


# --- what the store lists ------------------------------------------------------------------------------------------


def find_chunks(work: Workplace, *, owner: str | None = None, whole: bool = False) -> Iterator[FileFinding]:
    """Yield one finding for each file that is listed under the source's archive; chunks with enough copies before the others.

    Args:
        work: the source. Its objects are not asked for.
        owner: who posted the chunks; the store's own owner where None.
        whole: whether copies that differ are read whole, and those believed that have the Merkle root which the store lists.

    Raises:
        StoreUnreachable: the chain does not answer. StagingError: no room for a manifest. A file that cannot be read raises
        nothing; it is reported.
    """
    owner = owner or work.store.owner()
    ours = []
    for file in work.store.posted(work.archive_id):
        if file.posting.owner == owner:
            ours.append(file)
        else:
            yield FileFinding(file, FileKind.FOREIGN, f"it is owned by {file.posting.owner}, and not by {owner}")
    known = {(chunk.merkle_root, chunk.start): chunk for chunk in work.ledger.chunks() if chunk.source == work.source}
    unknown = []
    for file in ours:
        chunk = known.get((file.posting.merkle_root, file.posting.start))
        if chunk is None:
            unknown.append(file)
        else:
            yield FileFinding(file, FileKind.KNOWN, name=chunk.name)
    copies = {file: _copies(work, file) for file in unknown}
    posted_once = yield from _without_doubles(unknown, copies, {root: chunk for (root, _), chunk in known.items() if root})
    named = yield from _with_heads(work, posted_once, copies, whole=whole)
    wanted = yield from _with_names(work, named)
    required = work.store.required_copies
    for file, source, head in sorted(wanted, key=lambda one: (len(copies[one[0]]) < required, one[0].posting.start)):
        yield from _read(work, file, copies[file], source, head)


def _copies(work: Workplace, file: PostedFile) -> Sequence[Copy]:
    """Return the listed copies, one a provider."""
    return list({copy.provider: copy for copy in work.store.copies(file.posting)}.values())


def _without_doubles(
    files: Sequence[PostedFile], copies: Mapping[PostedFile, Sequence[Copy]], known: Mapping[bytes, Chunk]
) -> Generator[FileFinding, None, Sequence[PostedFile]]:
    """Leave one post of each root: that with the most copies, of these the first. Yield the others; return what is left."""
    best: dict[bytes, PostedFile] = {}
    for file in sorted(files, key=lambda one: (-len(copies[one]), one.posting.start)):
        root = file.posting.merkle_root
        if root in known and known[root].state in CLAIMING:
            yield _of_known_name(file, known[root])
        elif root in known:
            name = known[root].name
            yield FileFinding(file, FileKind.DOUBLE, f"its bytes are those of chunk {name}, posted once more", name)
        elif root in best:
            yield FileFinding(file, FileKind.DOUBLE, f"the same bytes were posted in block {best[root].posting.start}, too")
        else:
            best[root] = file
    return list(best.values())


_Opened = tuple[PostedFile, AgreedSource, Head]


def _with_heads(
    work: Workplace, files: Sequence[PostedFile], copies: Mapping[PostedFile, Sequence[Copy]], *, whole: bool
) -> Generator[FileFinding, None, Sequence[_Opened]]:
    """Read the heads. Yield the files that have none; return the others with theirs."""
    opened: list[_Opened] = []
    for file in files:
        providers = [copy.provider for copy in copies[file]]
        if not providers:
            yield FileFinding(file, FileKind.NOT_UPLOADED, "it was posted, but the chain lists no provider that has it")
            continue
        source = AgreedSource(work.store, file.posting, providers, proof_type=file.proof_type if whole else None)
        try:
            head = read_head(source, file.posting.stored_size_bytes)
        except (ArchiveError, IntegrityError, StoredChunkMissing, StoreUnreachable) as error:
            yield _refused(file, error)
            continue
        if head.archive_id != work.archive_id:
            yield FileFinding(file, FileKind.NO_CHUNK, f"its head names the archive {head.archive_id[:40]!r}", head.chunk)
        else:
            opened.append((file, source, head))
    return opened


def _with_names(work: Workplace, opened: Sequence[_Opened]) -> Generator[FileFinding, None, Sequence[_Opened]]:
    """Yield a finding for each file that has the name of another file, or of a known chunk; return the other files."""
    claimed = defaultdict(list)
    for one in opened:
        claimed[one[2].chunk].append(one)
    chunks = {chunk.name: chunk for chunk in work.ledger.chunks()}
    wanted = []
    for name, claimants in claimed.items():
        if name in chunks:
            for file, _, _ in claimants:
                yield _of_known_name(file, chunks[name])
        elif len(claimants) == 1:
            wanted += claimants
        else:
            roots = ", ".join(file.posting.merkle_root.hex()[:16] + "…" for file, _, _ in claimants)
            for file, _, _ in claimants:
                why = f"{len(claimants)} files with other bytes say to be chunk {name} (roots {roots}), and one of them lies"
                yield FileFinding(file, FileKind.CONFLICTING, why, name)
    return wanted


def _of_known_name(file: PostedFile, chunk: Chunk) -> FileFinding:
    """Return what a file is that says to be a chunk of which the ledger has other bytes, or none yet."""
    if chunk.state in CLAIMING:
        why = f"the ledger has this chunk as '{chunk.state}': its own run goes on with it"
        return FileFinding(file, FileKind.KNOWN, why, chunk.name)
    root = chunk.merkle_root.hex()[:16] if chunk.merkle_root else "none"
    why = f"it says to be chunk {chunk.name}, which the ledger has as '{chunk.state}' with other bytes (root {root}…)"
    # Beside a second copy that was ordered, say: with the ledger's chunk in good standing no object is missing.
    kind = FileKind.SUPERSEDED if chunk.state in IN_GOOD_STANDING else FileKind.CONFLICTING
    return FileFinding(file, kind, why, chunk.name)


def _read(work: Workplace, file: PostedFile, copies: Sequence[Copy], source: AgreedSource, head: Head) -> Iterator[FileFinding]:
    """Yield what a file with the head of a chunk is; its manifest is there until the next one is asked for."""
    with _spool(work) as spool:
        try:
            chunk = read_chunk(file, copies, source, head, of=work.source, spool=spool)
        except (ArchiveError, IntegrityError, StoredChunkMissing, StoreUnreachable) as error:
            yield _refused(file, error, head.chunk)
        else:
            yield FileFinding(file, FileKind.CHUNK, name=chunk.name, chunk=chunk, spool=spool)


def _refused(file: PostedFile, error: CafError, name: str = "") -> FileFinding:
    """Return the finding of a file that could not be read as a chunk. A chain that is away says nothing of any file."""
    if isinstance(error, NoChainAnswer):
        raise error
    kind = FileKind.UNREADABLE
    if isinstance(error, ArchiveError):
        kind = FileKind.NO_CHUNK
    elif isinstance(error, IntegrityError):
        kind = FileKind.DIFFERING
    return FileFinding(file, kind, str(error), name)


@contextmanager
def _spool(work: Workplace) -> Iterator[Path]:
    with writing_into(work.staging()):  # who tidies up there leaves the folder alone meanwhile
        try:
            folder = tempfile.TemporaryDirectory(dir=work.staging(), prefix=_PREFIX)
        except OSError as error:
            raise StagingError(
                f"the folder {work.staging()} cannot take a manifest: {error.strerror}",
                hint="make room there, or set 'staging' elsewhere",
            ) from error
        with folder:
            yield Path(folder.name) / "manifest.parquet"


# --- into the ledger -----------------------------------------------------------------------------------------------


def import_found_chunk(work: Workplace, finding: FileFinding) -> int:
    """Write a chunk that was found into the ledger; return the location rows written, 0 where other chunks have all its objects.

    Raises:
        ClaimConflict: a chunk under way claims one of its objects. IntegrityError: it says another thing of its plan than the
            ledger. LedgerError: the ledger has a chunk of its name by now. And, where its
            manifest is no longer here, what reading it again raises.
    """
    chunk = finding.chunk
    if chunk is None:
        raise CafError(f"file {finding.file.posting.merkle_root.hex()} is no chunk to be restored: {finding.why}")
    if finding.spool is not None and finding.spool.exists():
        return _import_from(work, chunk, finding.spool)
    with _spool(work) as spool:
        source = AgreedSource(work.store, chunk.file.posting, chunk.read_from)
        if chunk.manifest is None or fetch_manifest(source, chunk.manifest, spool) != chunk.manifest_sha256:
            raise IntegrityError(f"the manifest of chunk {chunk.name} is not the one that was read before")
        return _import_from(work, chunk, spool)


def _import_from(work: Workplace, chunk: RemoteChunk, spool: Path) -> int:
    manifest = open_manifest(spool)
    skips = chain.from_iterable(map(skips_of, manifest.batches(SKIP_COLUMNS))) if chunk.skipped_count else ()
    plan_folder = str(work.plans() / chunk.plan)
    fault = fault_of(work, chunk)
    if manifest.part() != chunk.part:
        raise IntegrityError(f"the manifest of chunk {chunk.name} is not the one that was read before")
    return work.ledger.restore_chunk(
        chunk, manifest.locations(), skips, plan_folder=plan_folder, fault=fault, logs=manifest.logs()
    )


def fault_of(work: Workplace, chunk: RemoteChunk) -> str:
    """Say what a restored chunk lacks; "" where as many copies as required are listed, and none is known to be wrong."""
    listed = [copy.provider for copy in chunk.copies]
    right, required = len(listed) - len(chunk.wrong), work.store.required_copies
    if right >= required and not chunk.wrong:
        return ""
    faults = "".join(f"; {provider} {fault}" for provider, fault in chunk.wrong.items())
    return f"{right} of {counted(required, 'copy', 'copies')} right when it was restored (listed: {', '.join(listed)}{faults})"


def rebuild(work: Workplace, *, owner: str | None = None, whole: bool = False, dry_run: bool = False) -> Iterator[RebuildOutcome]:
    """Restore every chunk of the source that the ledger does not know; yield what became of each file.

    While it goes on nothing is planned, nor after it was ended in its middle or left a file out, until one leaves nothing out:
    what is not restored would be archived and paid for again. It may be ended at any moment and begun again: each chunk is
    written at once. `owner` and `whole` are those of `find_chunks`.

    Raises:
        HeldByOther: a plan of the source is being cut, or another rebuild goes on. And as `find_chunks`.
    """
    with work.lease(plan_lease(work.source)) as lease:
        complete = True
        for finding in find_chunks(work, owner=owner, whole=whole):
            lease.check()
            if not dry_run and (finding.chunk is not None or finding.kind not in NOTHING_MISSING):
                work.ledger.begin_rebuild(work.source)
            outcome = _restored(work, finding, dry_run=dry_run)
            complete = complete and outcome.complete
            yield outcome
        if complete and not dry_run:
            work.ledger.end_rebuild(work.source)


def _restored(work: Workplace, finding: FileFinding, *, dry_run: bool) -> RebuildOutcome:
    if finding.chunk is None:
        return RebuildOutcome(finding)
    fault = fault_of(work, finding.chunk)
    if dry_run:
        return RebuildOutcome(finding, None, fault)
    work.store.bind()
    try:
        rows = import_found_chunk(work, finding)
    except (ClaimConflict, IntegrityError) as error:
        return RebuildOutcome(FileFinding(finding.file, FileKind.CONFLICTING, str(error), finding.name))
    if not rows:
        return RebuildOutcome(FileFinding(finding.file, FileKind.SUPERSEDED, ELSEWHERE, finding.name))
    return RebuildOutcome(finding, rows, fault)


# --- what no chunk tells -------------------------------------------------------------------------------------------

NOT_KNOWN: Final[Mapping[str, str]] = {
    "chunks under way": "chunks that were planned, packed or sealed and not yet posted; their objects are planned again",
    "objects skipped by plans": "objects too large for a chunk, chunks whose objects were all skipped; plans find these again",
    "retries": "when a skipped object is due again, and how often one could not be read; both are counted from now",
    "transactions": "what was signed and paid for: a spend cap counts from zero, and a transaction that was sent and not yet"
    " included may still be",
    "proof windows": "in which windows each copy was proven; they are seen again, one after the other",
    "orders": "pauses, limits and measured rates of providers",
    "adopted files": "CAF files of other programs do not name this archive; 'caf adopt SOURCE --from-chain' finds them and loads"
    " their rows again",
    "times": "when chunks were sealed, posted and located; all of it counts as now",
    "plans": "a plan's objects as a whole; of a chunk packed by an earlier version, also what was planned for it and put off",
}
"""What was in a ledger and is in no chunk, in words for whoever has just lost one."""
