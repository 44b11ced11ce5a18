"""Restores a ledger from the store: finds the files that are chunks of ours, and writes their rows.

It needs the source's settings and the owner's address, but no access to S3. Encrypted chunks need
an identity, and are opened only if their header has the hash in the post.

    an archive ─▶ one head names the source ─▶ its posts
    posted by us ─▶ head (all copies agree) ─▶ a name ─▶ index, manifest, samples ─▶ rows

A file whose name is taken is read whole: its Merkle root proves its content. It replaces a chunk
that was never posted, or else is named after its root. A chunk with too few copies is `damaged`.

A chunk of the ledger that lacks locations gets them from its manifest.

The owner of the wallet may not have made a post: its words may be stolen. A post is this ledger's
if its note has the right MAC, or if the ledger packed its root. Others are restored by order only,
are marked, and take no place of content that the ledger packed.

Source: docs/reference/chunk-format.md.
"""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Final

from caf_pipeline.caf.archive import RangeSource
from caf_pipeline.chunk_state import (
    CLAIMING,
    IN_GOOD_STANDING,
    NOT_POSTED,
    ChunkState,
    CopyState,
)
from caf_pipeline.encryption.opened_chunk import OpenedChunk, OpenedSource
from caf_pipeline.errors import (
    ArchiveError,
    CafError,
    ClaimConflict,
    IdentityMissing,
    IllegalMove,
    IntegrityError,
    KeyRefused,
    NoChainAnswer,
    NoMatchingIdentity,
    StagingError,
    StoredChunkMissing,
    StoreUnreachable,
)
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.inventory.manifest import open_manifest
from caf_pipeline.ledger.records import RemoteChunk, chunk_lease, plan_lease
from caf_pipeline.maintenance.unknown_archives import open_archive, possible_archive_ids
from caf_pipeline.packing.staging import remove_all
from caf_pipeline.reading.chunk_reader import SKIP_COLUMNS, skips_of
from caf_pipeline.records import Chunk, Copy, Lease, PostedFile, posting_of
from caf_pipeline.retrieval.remote_chunk import (
    PIECE_BYTES,
    AgreedSource,
    Head,
    OpenedFile,
    fetch_manifest,
    open_file,
    read_chunk,
    read_head,
)
from caf_pipeline.run_context import RunContext
from caf_pipeline.store.protocol import has_right_mac
from caf_pipeline.system.folder_lock import writing_into
from caf_pipeline.system.quantities import counted

_PREFIX: Final = ".restoring-"

ELSEWHERE: Final = (
    "every object of it is located in other chunks, for example because it was withdrawn and they "
    "were archived again"
)

_IGNORED: Final = (
    "other chunks have all of its objects, 'caf run --new-archive' archived them again, or an "
    "operator set it aside"
)


NOT_OWN: Final = (
    "nothing shows that this ledger made the post, neither a transaction nor a MAC by its key"
)


class FileKind(StrEnum):
    """The kind of a listed file.

    UNKNOWN_POST: another program made the post, in an archive to which this ledger has posted.
    """

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
    UNDECIDED = "undecided"
    OTHER_SOURCE = "other_source"
    INCOMPLETE = "incomplete"  # a chunk that lacked rows in the ledger
    ALTERED = "altered"  # a chunk with rows that differ from its manifest
    UNKNOWN_POST = "unknown_post"


_UNPOSTED: Final = frozenset({*NOT_POSTED, ChunkState.PARKED})

NOTHING_MISSING: Final = frozenset(
    {
        FileKind.CHUNK,
        FileKind.KNOWN,
        FileKind.FOREIGN,
        FileKind.DOUBLE,
        FileKind.SUPERSEDED,
        FileKind.OTHER_SOURCE,
        FileKind.INCOMPLETE,
        FileKind.ALTERED,
    }
)


@dataclass(frozen=True, slots=True)
class FileFinding:
    """A file that the store lists.

    `why` explains why it gives no rows. `spool` has the chunk's manifest until the next finding is
    taken. `replaces` is a chunk of this name, which was never posted. `from_unknown_post`: nothing
    shows that this ledger posted it.
    """

    file: PostedFile
    kind: FileKind
    why: str = ""
    name: str = ""
    chunk: RemoteChunk | None = None
    spool: Path | None = None
    replaces: Chunk | None = None
    from_unknown_post: bool = False


@dataclass(frozen=True, slots=True)
class RebuildOutcome:
    """The outcome for a file. `rows` is None if nothing was written."""

    finding: FileFinding
    rows: int | None = None
    fault: str = ""

    @property
    def complete(self) -> bool:
        return self.finding.kind in NOTHING_MISSING


Ask = Callable[[Sequence[PostedFile]], None]
"""Asks whether these posts may be restored. Raises if not."""

# --- files in the store


def find_chunks(
    context: RunContext,
    *,
    owner: str | None = None,
    whole: bool = False,
    ignored: Set[bytes] = frozenset(),
    restored: Set[str] = frozenset(),
    ask: Ask | None = None,
) -> Iterator[FileFinding]:
    """Yield a finding for each file under the source's archives, own chunks first.

    `owner` is the store's owner by default. `whole` trusts copies that differ if they have the
    Merkle root. `restored` are ids of archives that the ledger may not have yet. `ask` gets the
    posts that nothing shows to be this ledger's, and leaves out those of an archive to which the
    ledger has posted. Later posts are not yielded.

    Raises IdentityMissing or KeyRefused if a file is encrypted, before any chunk is yielded.
    """
    owner = owner or context.store.owner()
    archive_of = yield from _posts_of(context, owner, restored)
    chunk_of_post = {
        (chunk.merkle_root, chunk.start): chunk
        for chunk in context.ledger.chunks.list()
        if chunk.source == context.source
    }
    unknown = yield from _without_known(archive_of, chunk_of_post, ignored)
    # A finished chunk that was never posted does not show whether its bytes were posted.
    roots = {
        root: chunk
        for (root, _), chunk in chunk_of_post.items()
        if root and (chunk.start is not None or chunk.state in CLAIMING)
    }
    own_posts = _own_posts(context, archive_of, roots)
    # A second post of the same bytes changes nothing, whoever made it.
    repeated = [file for file in unknown if _is_posted(roots.get(file.posting.merkle_root))]
    if ask:
        others = [file for file in unknown if file not in repeated]
        unknown = yield from _without_foreign(context, others, own_posts, archive_of)
        unknown += repeated
    own_posts.update(repeated)
    if any(file.header_sha256 for file in unknown):
        yield from _require_identities(context, [] if ask else set(unknown) - own_posts)
    if ask and (doubtful := set(unknown) - own_posts):
        ask(sorted(doubtful, key=lambda file: file.posting.start))
        own_posts |= doubtful
    copies = {
        file: list({copy.provider: copy for copy in context.store.copies(file.posting)}.values())
        for file in unknown
    }
    for finding in _open_all(context, copies, archive_of, roots, own_posts, whole=whole):
        is_unknown, remote = finding.file not in own_posts, finding.chunk
        if remote is not None:
            remote = replace(remote, from_unknown_post=is_unknown)
        yield replace(finding, chunk=remote, from_unknown_post=is_unknown)


def _without_known(
    files: Iterable[PostedFile],
    chunk_of_post: Mapping[tuple[bytes | None, int | None], Chunk],
    ignored: Set[bytes],
) -> Generator[FileFinding, None, list[PostedFile]]:
    unknown = []
    for file in files:
        chunk = chunk_of_post.get((file.posting.merkle_root, file.posting.start))
        if chunk is None and file.posting.merkle_root in ignored:
            yield FileFinding(file, FileKind.SUPERSEDED, _IGNORED)
        elif chunk is None:
            unknown.append(file)
        else:
            yield FileFinding(file, FileKind.KNOWN, name=chunk.name)
    return unknown


def _require_identities(
    context: RunContext, unknown_posts: Iterable[PostedFile]
) -> Iterator[FileFinding]:
    """Raise if there are none, after the posts that an operator may set aside unopened."""
    try:
        context.opened.identities()
    except (IdentityMissing, KeyRefused):
        why = "it cannot be opened without an identity"
        for file in sorted(unknown_posts, key=lambda file: file.posting.start):
            yield FileFinding(file, FileKind.UNKNOWN_POST, why, from_unknown_post=True)
        raise


def _is_posted(chunk: Chunk | None) -> bool:
    return chunk is not None and chunk.start is not None


def _posts_of(
    context: RunContext, owner: str, restored: Set[str]
) -> Generator[FileFinding, None, Mapping[PostedFile, str]]:
    """Return the owner's posts, with the archive of each."""
    archive_of = {}
    for archive_id in sorted(context.ledger.sources.archive_ids(context.source) | restored):
        for file in context.store.posted(archive_id):
            if file.posting.owner == owner:
                archive_of[file] = archive_id
            else:
                yield FileFinding(
                    file, FileKind.FOREIGN, f"its owner is {file.posting.owner}, not {owner}"
                )
    return archive_of


def _own_posts(
    context: RunContext,
    archive_of: Mapping[PostedFile, str],
    chunk_of_root: Mapping[bytes, Chunk],
) -> set[PostedFile]:
    """Return the posts with the ledger's MAC, and those of a root that it packed."""
    key = context.ledger.sources.post_key(context.source)
    packed = {root for root, chunk in chunk_of_root.items() if chunk.was_packed_here}
    return {
        file
        for file, archive_id in archive_of.items()
        if file.posting.merkle_root in packed or has_right_mac(key, archive_id, file)
    }


def _without_foreign(
    context: RunContext,
    files: Sequence[PostedFile],
    own_posts: Set[PostedFile],
    archive_of: Mapping[PostedFile, str],
) -> Generator[FileFinding, None, list[PostedFile]]:
    """Leave out posts by others in archives to which this ledger has posted."""
    posted_to = {archive_of[file] for file in own_posts}
    left_posts = context.ledger.rebuilds.left_posts(context.source)
    remaining = []
    for file in files:
        if file in own_posts or archive_of[file] not in posted_to:
            remaining.append(file)
        elif file.posting.merkle_root in left_posts:
            yield FileFinding(file, FileKind.SUPERSEDED, _IGNORED)
        else:
            yield FileFinding(file, FileKind.UNKNOWN_POST, NOT_OWN)
    return remaining


def _open_all(
    context: RunContext,
    copies: Mapping[PostedFile, Sequence[Copy]],
    archive_of: Mapping[PostedFile, str],
    roots: Mapping[bytes, Chunk],
    own_posts: Set[PostedFile],
    *,
    whole: bool,
) -> Iterator[FileFinding]:
    posted_once = yield from _without_duplicates(context, copies, roots, own_posts)
    named = yield from _with_heads(context, posted_once, copies, archive_of, whole=whole)
    chunks = {chunk.name: chunk for chunk in context.ledger.chunks.list()}
    claimants = Counter(head.chunk for _, head in named)
    required, taken = context.store.required_copies, set[str]()
    for opened, head in sorted(
        named,
        key=lambda entry: (
            entry[0].file not in own_posts,
            len(copies[entry[0].file]) < required,
            entry[0].file.posting.start,
        ),
    ):
        other = chunks.get(head.chunk)
        finding = _Named(
            opened,
            copies[opened.file],
            head,
            other=other,
            must_prove=opened.file in own_posts
            and (other is not None or claimants[head.chunk] > 1),
            is_own=opened.file in own_posts,
        )
        yield from _read(context, finding, taken)


def _without_duplicates(
    context: RunContext,
    copies: Mapping[PostedFile, Sequence[Copy]],
    chunk_of_root: Mapping[bytes, Chunk],
    own_posts: Set[PostedFile],
) -> Generator[FileFinding, None, Sequence[PostedFile]]:
    """Return the post of each root with the most copies, an own post first."""
    best: dict[bytes, PostedFile] = {}
    for file in sorted(
        copies,
        key=lambda file: (
            not (copies[file] and file in own_posts),
            -len(copies[file]),
            file.posting.start,
        ),
    ):
        root = file.posting.merkle_root
        if (
            root in chunk_of_root
            and copies[file]
            and is_unposted(context, chunk_of_root[root])
            and root not in best
        ):
            best[root] = file
        elif root in chunk_of_root and chunk_of_root[root].state in CLAIMING:
            chunk = chunk_of_root[root]
            why = f"the ledger has this chunk as '{chunk.state}', and its run continues it"
            yield FileFinding(file, FileKind.KNOWN, why, chunk.name)
        elif root in chunk_of_root:
            name = chunk_of_root[root].name
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


def _with_heads(
    context: RunContext,
    files: Sequence[PostedFile],
    copies: Mapping[PostedFile, Sequence[Copy]],
    archive_of: Mapping[PostedFile, str],
    *,
    whole: bool,
) -> Generator[FileFinding, None, Sequence[tuple[OpenedFile, Head]]]:
    named = []
    for file in files:
        providers = [copy.provider for copy in copies[file]]
        if not providers:
            yield FileFinding(
                file,
                FileKind.NOT_UPLOADED,
                "it was posted, but the chain lists no provider for it",
            )
            continue
        stored = AgreedSource(
            context.store, file.posting, providers, proof_type=file.proof_type if whole else None
        )
        try:
            opened = open_file(file, stored, context.opened.identities)
            head = read_head(opened.caf, opened.size_bytes)
        except (ArchiveError, IntegrityError, StoredChunkMissing, StoreUnreachable) as error:
            yield _refused(file, error)
            continue
        if head.archive_id != archive_of[file]:
            yield FileFinding(
                file,
                FileKind.NO_CHUNK,
                f"its head names the archive {head.archive_id[:40]!r}",
                head.chunk,
            )
        else:
            named.append((opened, head))
    return named


def is_unposted(context: RunContext, chunk: Chunk) -> bool:
    """Return whether a chunk is unfinished, without a post or a transaction that may post it."""
    if chunk.start is not None or chunk.state not in _UNPOSTED:
        return False
    # In a store without transactions, a killed run may have posted it: the next run continues.
    return not context.ledger.rebuilds.has_live_post(chunk.name) and (
        chunk.copy_state is not CopyState.POSTING or context.settings.store.kind == "jackal"
    )


@dataclass(frozen=True, slots=True)
class _Named:
    opened: OpenedFile
    copies: Sequence[Copy]
    head: Head
    other: Chunk | None
    must_prove: bool
    is_own: bool


def _read(context: RunContext, named: _Named, taken: set[str]) -> Iterator[FileFinding]:
    opened, name = named.opened, named.head.chunk
    file = opened.file
    with _spool(context, encrypted=opened.header is not None) as spool:
        try:
            chunk = read_chunk(opened, named.copies, named.head, of=context.source, spool=spool)
            if named.must_prove:
                opened.stored.prove(file.proof_type)
                chunk = replace(chunk, unread=())
        except (ArchiveError, IntegrityError, StoredChunkMissing, StoreUnreachable) as error:
            yield _refused(file, error, name)
            return
        replaces = None
        if (
            named.other
            and named.is_own
            and name not in taken
            and _may_replace(context, named.other, file)
        ):
            replaces = named.other
        is_split = chunk.part is not None
        if name in taken or (named.other and not replaces) or not (named.is_own or is_split):
            # This name looks like other names, and is the same in each rebuild.
            other_id = ChunkId(context.source, file.posting.merkle_root.hex()[:12], 1)
            chunk = replace(
                chunk,
                name=str(other_id),
                plan=other_id.plan,
                number=other_id.number,
                plan_sha256=None,
            )
        taken.add(chunk.name)
        yield FileFinding(
            file, FileKind.CHUNK, name=chunk.name, chunk=chunk, spool=spool, replaces=replaces
        )


def _may_replace(context: RunContext, chunk: Chunk, file: PostedFile) -> bool:
    # An encrypted chunk cannot be packed again to the bytes in staging.
    has_other_bytes = chunk.encrypted and chunk.merkle_root != file.posting.merkle_root
    return is_unposted(context, chunk) and not has_other_bytes


def _refused(file: PostedFile, error: CafError, name: str = "") -> FileFinding:
    """A silent chain is raised instead."""
    if isinstance(error, NoChainAnswer):
        raise error
    kind = FileKind.UNREADABLE
    if isinstance(error, ArchiveError) and not isinstance(error, NoMatchingIdentity):
        kind = FileKind.NO_CHUNK
    elif isinstance(error, IntegrityError):
        kind = FileKind.DIFFERING
    return FileFinding(file, kind, str(error), name)


@contextmanager
def _spool(context: RunContext, *, encrypted: bool) -> Iterator[Path]:
    # Staging never has plaintext of encrypted chunks.
    parent = Path(tempfile.gettempdir()) if encrypted else context.staging()
    with writing_into(context.staging()):  # keeps a concurrent cleanup away from the folder
        try:
            folder = tempfile.TemporaryDirectory(dir=parent, prefix=_PREFIX)
        except OSError as error:
            setting = "TMPDIR" if encrypted else "'staging'"
            raise StagingError(
                f"the folder {parent} has no room for a manifest: {error.strerror}",
                hint=f"make room there, or set {setting} to another folder",
            ) from error
        with folder:
            yield Path(folder.name) / "manifest.parquet"


# --- rows in the ledger


def import_found_chunk(
    context: RunContext, finding: FileFinding, *, unknown_posts: bool = False
) -> int:
    """Write a chunk into the ledger; return the number of location rows.

    It is 0 if other chunks have all its objects. `unknown_posts`: an operator ordered to restore
    posts that are not shown to be this ledger's. Raises ClaimConflict if an unfinished chunk claims
    an object, IntegrityError, or LedgerError.
    """
    chunk, replaces = finding.chunk, finding.replaces
    if chunk is None:
        raise CafError(
            f"file {finding.file.posting.merkle_root.hex()} is not a chunk: {finding.why}"
        )
    if chunk.from_unknown_post and not unknown_posts:
        raise CafError(f"chunk {chunk.name} is not restored: {NOT_OWN}")
    context.store.bind()
    with ExitStack() as stack:
        lease = stack.enter_context(context.lease(chunk_lease(replaces.name))) if replaces else None
        if finding.spool is not None and finding.spool.exists():
            rows = _import_from(context, chunk, finding.spool, lease)
        else:
            with _spool(context, encrypted=chunk.header is not None) as spool:
                caf: RangeSource = AgreedSource(context.store, chunk.file.posting, chunk.read_from)
                if chunk.header:
                    opened = OpenedChunk.open(chunk.header, context.opened.identities())
                    caf = OpenedSource(caf, opened)
                if (
                    chunk.manifest is None
                    or fetch_manifest(caf, chunk.manifest, spool) != chunk.manifest_sha256
                ):
                    raise IntegrityError(f"the manifest of chunk {chunk.name} has changed")
                rows = _import_from(context, chunk, spool, lease)
        if replaces and rows:
            remove_all(context, replaces.name)  # it was packed here and never posted
        if not rows:
            context.ledger.rebuilds.leave_posts(
                context.source, [finding.file.posting.merkle_root], superseded=True
            )
        return rows


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
        raise IntegrityError(f"the manifest of chunk {chunk.name} has changed")
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
    """Explain what a restored chunk lacks."""
    listed = [copy.provider for copy in chunk.copies]
    right, required = len(listed) - len(chunk.wrong), context.store.required_copies
    if right >= required and not chunk.wrong:
        return ""
    faults = "".join(f"; {provider}: {fault}" for provider, fault in chunk.wrong.items())
    return (
        f"{right} of {counted(required, 'copy', 'copies')} right when it was restored (listed: "
        f"{', '.join(listed)}{faults})"
    )


def rebuild(
    context: RunContext,
    *,
    owner: str | None = None,
    whole: bool = False,
    dry_run: bool = False,
    sources: dict[str, str] | None = None,
    ask: Ask = lambda posts: None,
) -> Iterator[RebuildOutcome]:
    """Restore every chunk and location that the ledger lacks, and yield the outcome for each file.

    Archives that no source of the ledger has are the source's if their chunks name it. The newest
    such archive gives a source without chunks its id. `sources` has the source of archives that
    were opened before, by id, and gets those that are opened. `ask` gets the posts that nothing
    shows to be this ledger's, as all are for a new ledger, before anything of them is restored.

    Planning waits for a complete rebuild: missing objects would be paid for again. May be
    interrupted and repeated.

    Raises:
        HeldByOther: another process plans or rebuilds.
        IdentityMissing, KeyRefused: a file is encrypted. No post was restored.
    """
    with context.lease(plan_lease(context.source)) as lease:
        if not dry_run:
            context.ledger.sources.register(context.source, context.address, lease=lease)
        # The ledger remembers no list of an owner that is named.
        listed_owner = owner or context.store.owner() if dry_run else owner
        archive_ids, others = own_archives(
            context, listed_owner, {} if sources is None else sources, whole
        )
        complete = True
        for outcome in _incomplete_chunks(context, whole=whole, dry_run=dry_run):
            lease.check()
            if not outcome.complete and not dry_run:
                context.ledger.rebuilds.begin(context.source)
            complete = complete and outcome.complete
            yield outcome
        findings = find_chunks(
            context, owner=owner, whole=whole, restored=frozenset(archive_ids), ask=ask
        )
        for finding in chain(findings, others):
            lease.check()
            is_missing = finding.kind not in {*NOTHING_MISSING, FileKind.UNKNOWN_POST}
            if not dry_run and (finding.chunk is not None or is_missing):
                if archive_ids:
                    context.ledger.sources.restore_archive_id(context.source, archive_ids[-1])
                context.ledger.rebuilds.begin(context.source)
            fault = "" if finding.chunk is None else fault_of(context, finding.chunk)
            outcome = RebuildOutcome(finding, None, fault)
            if finding.chunk is not None and not dry_run:
                try:
                    rows = import_found_chunk(context, finding, unknown_posts=True)
                    outcome = replace(outcome, rows=rows)
                except (ClaimConflict, IllegalMove, IntegrityError) as error:
                    outcome = RebuildOutcome(
                        FileFinding(finding.file, FileKind.CONFLICTING, str(error), finding.name)
                    )
                else:
                    if not rows:
                        outcome = RebuildOutcome(
                            FileFinding(finding.file, FileKind.SUPERSEDED, ELSEWHERE, finding.name)
                        )
            # An unknown post in an archive of this ledger is for the doctor.
            complete = complete and (outcome.complete or finding.kind is FileKind.UNKNOWN_POST)
            yield outcome
        if complete and not dry_run:
            context.ledger.rebuilds.end(context.source)


def own_archives(
    context: RunContext, owner: str | None, sources: dict[str, str], whole: bool
) -> tuple[Sequence[str], Sequence[FileFinding]]:
    """Return the source's archives in the store, the newest last, and findings for others."""
    archive_ids, others = list[str](), list[FileFinding]()
    sources |= dict.fromkeys(context.ledger.sources.archive_ids(context.source), context.source)
    for archive_id in possible_archive_ids(context, owner):
        archive = None
        if archive_id not in sources:
            archive = open_archive(context, owner or context.store.owner(), archive_id, whole=whole)
            if archive and archive.source:
                sources[archive_id] = archive.source
        source = sources.get(archive_id)
        if source == context.source:
            archive_ids.append(archive_id)
        elif archive and source is None:
            why = f"the source of its archive {archive_id} is not known: {archive.why}"
            others.append(FileFinding(archive.file, FileKind.UNDECIDED, why))
        elif archive and source not in context.settings.sources:
            why = f"its archive {archive_id} belongs to source '{source}'"
            others.append(FileFinding(archive.file, FileKind.OTHER_SOURCE, why))
    return archive_ids, others


# --- single rows


def _incomplete_chunks(
    context: RunContext, *, whole: bool, dry_run: bool
) -> Iterator[RebuildOutcome]:
    for rows in context.ledger.stray_rows.by_chunk(context.source):
        if (
            rows.chunk is not None
            and rows.state in IN_GOOD_STANDING
            and rows.locations < rows.located_count
        ):
            yield _restore_rows(
                context, context.ledger.chunks.get(rows.chunk), whole=whole, dry_run=dry_run
            )


def _restore_rows(
    context: RunContext, chunk: Chunk, *, whole: bool, dry_run: bool
) -> RebuildOutcome:
    posting, root = posting_of(chunk), chunk.merkle_root
    header = context.ledger.lookup.chunk_header(root) if root and chunk.encrypted else None
    file = PostedFile(posting, chunk.proof_type or 0, header.sha256 if header else None)
    if chunk.adopted:
        why = "the ledger lacks rows of it, and another program wrote it: restore a backup"
        return RebuildOutcome(FileFinding(file, FileKind.KNOWN, why, chunk.name))
    copies = list({copy.provider: copy for copy in context.store.copies(posting)}.values())
    with _spool(context, encrypted=chunk.encrypted) as spool:
        try:
            stored = AgreedSource(
                context.store,
                posting,
                [copy.provider for copy in copies],
                proof_type=file.proof_type if whole else None,
            )
            opened = open_file(file, stored, context.opened.identities)
            head = read_head(opened.caf, opened.size_bytes)
            stored_chunk = read_chunk(opened, copies, head, of=context.source, spool=spool)
            if chunk.tail_start is not None:
                _require_sealed_tail(chunk, opened, chunk.tail_start)
                stored_chunk = replace(stored_chunk, unread=())
            stored_chunk = replace(stored_chunk, name=chunk.name)
            finding = FileFinding(file, FileKind.INCOMPLETE, name=chunk.name, chunk=stored_chunk)
            if dry_run:
                return RebuildOutcome(finding)
            with context.lease(chunk_lease(chunk.name)) as lease:
                restored = context.ledger.rebuilds.restore_rows(
                    lease, stored_chunk, open_manifest(spool).locations
                )
        except (ClaimConflict, IllegalMove) as error:
            return RebuildOutcome(FileFinding(file, FileKind.CONFLICTING, str(error), chunk.name))
        except (ArchiveError, IntegrityError, StoredChunkMissing, StoreUnreachable) as error:
            return RebuildOutcome(_refused(file, error, chunk.name))
    if restored.altered:
        why = (
            f"{counted(restored.altered, 'row')} of the ledger, such as that of "
            f"'{restored.altered_key}', differ from its manifest: the ledger was altered, and the "
            "stored chunk is not damaged"
        )
        finding = replace(finding, kind=FileKind.ALTERED, why=why)
    return RebuildOutcome(finding, restored.restored)


def _require_sealed_tail(chunk: Chunk, opened: OpenedFile, tail_start: int) -> None:
    """Raise IntegrityError if manifest and index are not those that were sealed here."""
    digest = hashlib.sha256()
    for begin in range(tail_start, opened.size_bytes, PIECE_BYTES):
        digest.update(opened.caf.read(begin, min(begin + PIECE_BYTES, opened.size_bytes)))
    if digest.digest() != chunk.tail_sha256:
        raise IntegrityError(
            "its manifest differs from the sealed manifest: the copies are damaged"
        )


# --- what is lost with a ledger

NOT_KNOWN: Final[Mapping[str, str]] = {
    "chunks under way": "chunks that were planned, packed or sealed but not posted; their objects "
    "are planned again",
    "objects skipped by plans": "objects too large for a chunk, and chunks of skipped objects "
    "only; plans detect these again",
    "retries": "when a skipped object is retried, and how often it was unreadable; both are "
    "counted from now",
    "transactions": "what was signed and paid: a spend cap counts from zero, and a pending "
    "transaction may still be included",
    "proof windows": "the windows in which each copy was proven; they are observed again",
    "orders": "pauses, limits and measured rates of providers",
    "adopted files": "CAF files of other programs; 'caf adopt SOURCE --from-chain' loads their "
    "rows again",
    "times": "when chunks were sealed, posted and located; all of these count as now",
    "plans": "the complete list of objects of each plan",
}
"""For users who have lost their ledger: no chunk contains this."""
