"""Restores a ledger from what the store lists: which files are chunks of ours, and their rows.

Needs the source's settings (its address makes the archive's id) and the owner's address; no secret,
and nothing of S3. Every file that is listed under the archive's id is reported: as a chunk, or with
the reason why it is none and gives no rows. Of a chunk that the ledger has already, nothing is
read.

    posted once, by us ─▶ head (all copies agree) ─▶ a name ─▶ index, manifest, samples ─▶ rows

A file is read whole if another file or a chunk of the ledger has its name: its Merkle root proves
its content. It takes the place of a chunk that was never posted. Otherwise it gets a name made of
its root, and both files are kept.

With as many copies listed as are required a chunk comes back as `located`; with fewer as `damaged`,
for `repair` to mend.

Source: promise 1 in docs/explanation/design.md, docs/reference/chunk-format.md.
"""

import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Final

from caf_pipeline.chunk_state import CLAIMING, NOT_POSTED, ChunkState, CopyState
from caf_pipeline.errors import (
    ArchiveError,
    CafError,
    ClaimConflict,
    IllegalMove,
    IntegrityError,
    NoChainAnswer,
    StagingError,
    StoredChunkMissing,
    StoreUnreachable,
)
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.inventory.manifest import open_manifest
from caf_pipeline.ledger.records import Chunk, RemoteChunk, chunk_lease, plan_lease
from caf_pipeline.packing.chunk_reader import SKIP_COLUMNS, skips_of
from caf_pipeline.packing.staging import remove_all
from caf_pipeline.retrieval.remote_chunk import (
    AgreedSource,
    Head,
    fetch_manifest,
    read_chunk,
    read_head,
)
from caf_pipeline.run_context import RunContext
from caf_pipeline.store.protocol import Copy, Lease, PostedFile
from caf_pipeline.system.folder_lock import writing_into
from caf_pipeline.system.quantities import counted

_PREFIX: Final = ".restoring-"

ELSEWHERE: Final = (
    "every object of it is located in other chunks, e.g. since it was withdrawn "
    "and "
    "they were archived again"
)
"""Why a chunk that was found is not restored though nothing is wrong with it."""

_LEFT: Final = (
    "other chunks have all of its objects, or 'caf run --new-archive' archived them again"
)
"""Why a file is not read that an earlier rebuild or a first plan left."""


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


_UNPOSTED: Final = frozenset({*NOT_POSTED, ChunkState.PARKED})

NOTHING_MISSING: Final = frozenset(
    {FileKind.CHUNK, FileKind.KNOWN, FileKind.FOREIGN, FileKind.DOUBLE, FileKind.SUPERSEDED}
)
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
        replaces: the ledger's chunk of this name, which was never posted. The file takes its place.
    """

    file: PostedFile
    kind: FileKind
    why: str = ""
    name: str = ""
    chunk: RemoteChunk | None = None
    spool: Path | None = None
    replaces: Chunk | None = None


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


# --- what the store lists
# ------------------------------------------------------------------------------------------


def find_chunks(
    context: RunContext,
    *,
    owner: str | None = None,
    whole: bool = False,
    left: Set[bytes] = frozenset(),
) -> Iterator[FileFinding]:
    """Yield one finding for each file that is listed under the source's archive; chunks with enough
    copies before the others.

    Args: context: the source. Its objects are not asked for. owner: who posted the chunks; the
        store's own owner where None. whole: whether copies that differ are read whole, and those
        believed that have the Merkle root which the store lists. left: Merkle roots of files that
        are not read again: they are superseded, or `--new-archive` left them.

    Raises: StoreUnreachable: the chain does not answer. StagingError: no room for a manifest. A
        file that cannot be read raises nothing; it is reported.
    """
    owner = owner or context.store.owner()
    ours = []
    for file in context.store.posted(context.archive_id):
        if file.posting.owner == owner:
            ours.append(file)
        else:
            yield FileFinding(
                file, FileKind.FOREIGN, f"it is owned by {file.posting.owner}, and not by {owner}"
            )
    known = {
        (chunk.merkle_root, chunk.start): chunk
        for chunk in context.ledger.chunks.list()
        if chunk.source == context.source
    }
    unknown = []
    for file in ours:
        chunk = known.get((file.posting.merkle_root, file.posting.start))
        if chunk is None and file.posting.merkle_root in left:
            yield FileFinding(file, FileKind.SUPERSEDED, _LEFT)
        elif chunk is None:
            unknown.append(file)
        else:
            yield FileFinding(file, FileKind.KNOWN, name=chunk.name)
    copies = {file: _copies(context, file) for file in unknown}
    # A chunk that is not under way and was never posted does not tell whether its bytes were
    # posted.
    roots = {
        root: chunk
        for (root, _), chunk in known.items()
        if root and (chunk.start is not None or chunk.state in CLAIMING)
    }
    posted_once = yield from _without_doubles(context, unknown, copies, roots)
    named = yield from _with_heads(context, posted_once, copies, whole=whole)
    chunks = {chunk.name: chunk for chunk in context.ledger.chunks.list()}
    claimants = Counter(head.chunk for _, _, head in named)
    required, taken = context.store.required_copies, set[str]()
    for file, source, head in sorted(
        named, key=lambda one: (len(copies[one[0]]) < required, one[0].posting.start)
    ):
        other = chunks.get(head.chunk)
        finding = _Named(
            file,
            copies[file],
            source,
            head,
            other=other,
            must_prove=other is not None or claimants[head.chunk] > 1,
        )
        yield from _read(context, finding, taken)


def _copies(context: RunContext, file: PostedFile) -> Sequence[Copy]:
    """Return the listed copies, one a provider."""
    return list({copy.provider: copy for copy in context.store.copies(file.posting)}.values())


def _without_doubles(
    context: RunContext,
    files: Sequence[PostedFile],
    copies: Mapping[PostedFile, Sequence[Copy]],
    known: Mapping[bytes, Chunk],
) -> Generator[FileFinding, None, Sequence[PostedFile]]:
    """Leave one post of each root: that with the most copies, of these the first.

    Yield the others; return what is left.
    """
    best: dict[bytes, PostedFile] = {}
    for file in sorted(files, key=lambda one: (-len(copies[one]), one.posting.start)):
        root = file.posting.merkle_root
        if (
            root in known
            and copies[file]
            and is_unposted(context, known[root])
            and root not in best
        ):
            best[root] = file
        elif root in known and known[root].state in CLAIMING:
            why = f"the ledger has this chunk as '{known[root].state}': its own run goes on with it"
            yield FileFinding(file, FileKind.KNOWN, why, known[root].name)
        elif root in known:
            name = known[root].name
            yield FileFinding(
                file,
                FileKind.DOUBLE,
                f"its bytes are those of chunk {name}, posted once more",
                name,
            )
        elif root in best:
            yield FileFinding(
                file,
                FileKind.DOUBLE,
                f"the same bytes were posted in block {best[root].posting.start}, too",
            )
        else:
            best[root] = file
    return list(best.values())


_Opened = tuple[PostedFile, AgreedSource, Head]


def _with_heads(
    context: RunContext,
    files: Sequence[PostedFile],
    copies: Mapping[PostedFile, Sequence[Copy]],
    *,
    whole: bool,
) -> Generator[FileFinding, None, Sequence[_Opened]]:
    """Read the heads. Yield the files that have none; return the others with theirs."""
    opened: list[_Opened] = []
    for file in files:
        providers = [copy.provider for copy in copies[file]]
        if not providers:
            yield FileFinding(
                file,
                FileKind.NOT_UPLOADED,
                "it was posted, but the chain lists no provider that has it",
            )
            continue
        source = AgreedSource(
            context.store, file.posting, providers, proof_type=file.proof_type if whole else None
        )
        try:
            head = read_head(source, file.posting.stored_size_bytes)
        except (ArchiveError, IntegrityError, StoredChunkMissing, StoreUnreachable) as error:
            yield _refused(file, error)
            continue
        if head.archive_id != context.archive_id:
            yield FileFinding(
                file,
                FileKind.NO_CHUNK,
                f"its head names the archive {head.archive_id[:40]!r}",
                head.chunk,
            )
        else:
            opened.append((file, source, head))
    return opened


def is_unposted(context: RunContext, chunk: Chunk) -> bool:
    """Return whether a chunk is under way, and the ledger knows no post of it and no transaction
    that may still post it.
    """
    if chunk.start is not None or chunk.state not in _UNPOSTED:
        return False
    # In a store that signs nothing, a killed run may have posted it: the next run goes on.
    return not context.ledger.rebuilds.has_live_post(chunk.name) and (
        chunk.copy_state is not CopyState.POSTING or context.settings.store.kind == "jackal"
    )


@dataclass(frozen=True, slots=True)
class _Named:
    """A file with the head of a chunk.

    `other`: the ledger's chunk of this name. `must_prove`: the file's root must be proven.
    """

    file: PostedFile
    copies: Sequence[Copy]
    source: AgreedSource
    head: Head
    other: Chunk | None
    must_prove: bool


def _read(context: RunContext, named: _Named, taken: set[str]) -> Iterator[FileFinding]:
    """Yield what a file with the head of a chunk is; its manifest is there until the next one is
    asked for.
    """
    file, name = named.file, named.head.chunk
    with _spool(context) as spool:
        try:
            chunk = read_chunk(
                file, named.copies, named.source, named.head, of=context.source, spool=spool
            )
            if named.must_prove:
                named.source.prove(file.proof_type)
        except (ArchiveError, IntegrityError, StoredChunkMissing, StoreUnreachable) as error:
            yield _refused(file, error, name)
            return
        replaces = (
            named.other
            if named.other and name not in taken and is_unposted(context, named.other)
            else None
        )
        if name in taken or (named.other and not replaces):
            # This name has the form of other names, and is the same in each rebuild.
            other_id = ChunkId(context.source, file.posting.merkle_root.hex()[:12], 1)
            chunk = replace(
                chunk,
                name=str(other_id),
                plan=other_id.plan,
                number=other_id.number,
                plan_sha256=None,
            )
        taken.add(name)
        yield FileFinding(
            file, FileKind.CHUNK, name=chunk.name, chunk=chunk, spool=spool, replaces=replaces
        )


def _refused(file: PostedFile, error: CafError, name: str = "") -> FileFinding:
    """Return the finding of a file that could not be read as a chunk.

    A chain that is away says nothing of any file.
    """
    if isinstance(error, NoChainAnswer):
        raise error
    kind = FileKind.UNREADABLE
    if isinstance(error, ArchiveError):
        kind = FileKind.NO_CHUNK
    elif isinstance(error, IntegrityError):
        kind = FileKind.DIFFERING
    return FileFinding(file, kind, str(error), name)


@contextmanager
def _spool(context: RunContext) -> Iterator[Path]:
    with writing_into(context.staging()):  # who tidies up there leaves the folder alone meanwhile
        try:
            folder = tempfile.TemporaryDirectory(dir=context.staging(), prefix=_PREFIX)
        except OSError as error:
            raise StagingError(
                f"the folder {context.staging()} cannot take a manifest: {error.strerror}",
                hint="make room there, or set 'staging' elsewhere",
            ) from error
        with folder:
            yield Path(folder.name) / "manifest.parquet"


# --- into the ledger
# ------------------------------------------------------------------------------------------


def import_found_chunk(context: RunContext, finding: FileFinding) -> int:
    """Write a chunk that was found into the ledger; return the location rows written, 0 where other
    chunks have all its objects.

    Raises: ClaimConflict: a chunk under way claims one of its objects. IntegrityError: it says
        another thing of its plan than the
            ledger. LedgerError: the ledger has a chunk of its name by now. And, where its
            manifest is no longer here, what reading it again raises.
    """
    chunk, replaces = finding.chunk, finding.replaces
    if chunk is None:
        raise CafError(
            f"file {finding.file.posting.merkle_root.hex()} is no chunk to be restored: "
            f"{finding.why}"
        )
    context.store.bind()
    with ExitStack() as stack:
        lease = stack.enter_context(context.lease(chunk_lease(replaces.name))) if replaces else None
        rows = _import(context, finding, chunk, lease)
        if replaces and rows:
            remove_all(context, replaces.name)  # what was packed here and never posted
        if not rows:
            context.ledger.rebuilds.leave_posts(
                context.source, [finding.file.posting.merkle_root], superseded=True
            )
        return rows


def _import(
    context: RunContext, finding: FileFinding, chunk: RemoteChunk, lease: Lease | None
) -> int:
    if finding.spool is not None and finding.spool.exists():
        return _import_from(context, chunk, finding.spool, lease)
    with _spool(context) as spool:
        source = AgreedSource(context.store, chunk.file.posting, chunk.read_from)
        if (
            chunk.manifest is None
            or fetch_manifest(source, chunk.manifest, spool) != chunk.manifest_sha256
        ):
            raise IntegrityError(
                f"the manifest of chunk {chunk.name} is not the one that was read before"
            )
        return _import_from(context, chunk, spool, lease)


def _import_from(context: RunContext, chunk: RemoteChunk, spool: Path, lease: Lease | None) -> int:
    manifest = open_manifest(spool)
    skips = (
        chain.from_iterable(map(skips_of, manifest.batches(SKIP_COLUMNS)))
        if chunk.skipped_count
        else ()
    )
    plan_folder = str(context.plans() / chunk.plan)
    fault = fault_of(context, chunk)
    if manifest.part() != chunk.part:
        raise IntegrityError(
            f"the manifest of chunk {chunk.name} is not the one that was read before"
        )
    return context.ledger.rebuilds.restore_chunk(
        chunk,
        manifest.locations,
        skips,
        plan_folder=plan_folder,
        fault=fault,
        logs=manifest.logs(),
        lease=lease,
    )


def fault_of(context: RunContext, chunk: RemoteChunk) -> str:
    """Say what a restored chunk lacks; "" where as many copies as required are listed, and none is
    known to be wrong.
    """
    listed = [copy.provider for copy in chunk.copies]
    right, required = len(listed) - len(chunk.wrong), context.store.required_copies
    if right >= required and not chunk.wrong:
        return ""
    faults = "".join(f"; {provider} {fault}" for provider, fault in chunk.wrong.items())
    return (
        f"{right} of {counted(required, 'copy', 'copies')} right when it was restored (listed: "
        f"{', '.join(listed)}{faults})"
    )


def rebuild(
    context: RunContext, *, owner: str | None = None, whole: bool = False, dry_run: bool = False
) -> Iterator[RebuildOutcome]:
    """Restore every chunk of the source that the ledger does not know; yield what became of each
    file.

    While it goes on nothing is planned, nor after it was ended in its middle or left a file out,
    until one leaves nothing out: what is not restored would be archived and paid for again. It may
    be ended at any moment and begun again: each chunk is written at once. `owner` and `whole` are
    those of `find_chunks`.

    Raises: HeldByOther: a plan of the source is being cut, or another rebuild goes on. And as
        `find_chunks`.
    """
    with context.lease(plan_lease(context.source)) as lease:
        if not dry_run:
            context.ledger.sources.register(
                context.source, context.archive_id, context.address, lease=lease
            )
        complete = True
        for finding in find_chunks(context, owner=owner, whole=whole):
            lease.check()
            if not dry_run and (finding.chunk is not None or finding.kind not in NOTHING_MISSING):
                context.ledger.rebuilds.begin(context.source)
            outcome = _restored(context, finding, dry_run=dry_run)
            complete = complete and outcome.complete
            yield outcome
        if complete and not dry_run:
            context.ledger.rebuilds.end(context.source)


def _restored(context: RunContext, finding: FileFinding, *, dry_run: bool) -> RebuildOutcome:
    if finding.chunk is None:
        return RebuildOutcome(finding)
    fault = fault_of(context, finding.chunk)
    if dry_run:
        return RebuildOutcome(finding, None, fault)
    try:
        rows = import_found_chunk(context, finding)
    except (ClaimConflict, IllegalMove, IntegrityError) as error:
        return RebuildOutcome(
            FileFinding(finding.file, FileKind.CONFLICTING, str(error), finding.name)
        )
    if not rows:
        return RebuildOutcome(
            FileFinding(finding.file, FileKind.SUPERSEDED, ELSEWHERE, finding.name)
        )
    return RebuildOutcome(finding, rows, fault)


# --- what no chunk tells
# ------------------------------------------------------------------------------------------

NOT_KNOWN: Final[Mapping[str, str]] = {
    "chunks under way": "chunks that were planned, packed or sealed and not yet posted; their "
    "objects are planned again",
    "objects skipped by plans": "objects too large for a chunk, chunks whose objects were all "
    "skipped; plans find these again",
    "retries": "when a skipped object is due again, and how often one could not be read; both are "
    "counted from now",
    "transactions": "what was signed and paid for: a spend cap counts from zero, and a transaction "
    "that was sent and not yet"
    " included may still be",
    "proof windows": "in which windows each copy was proven; they are seen again, one after the "
    "other",
    "orders": "pauses, limits and measured rates of providers",
    "adopted files": "CAF files of other programs do not name this archive; 'caf adopt SOURCE "
    "--from-chain' finds them and loads"
    " their rows again",
    "times": "when chunks were sealed, posted and located; all of it counts as now",
    "plans": "a plan's objects as a whole",
}
"""What was in a ledger and is in no chunk, in words for whoever has just lost one."""
