"""Assesses the chunks of a source before their objects may be deleted.

Chunks in good standing are read back, proven, and compared with their manifests.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from caf_pipeline.caf.archive import Member, RangeSource
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.encryption.opened_chunk import OpenedChunk, OpenedSource
from caf_pipeline.errors import (
    ArchiveError,
    HeldByOther,
    IdentityMissing,
    IntegrityError,
    KeyRefused,
    NoChainAnswer,
    StagingError,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.ledger.records import WINDOWS_REQUIRED, KnownCopy, RowSet
from caf_pipeline.maintenance.deletion.deletable import ChunkAssessment, LocatedRows, Unsafe
from caf_pipeline.maintenance.full_read import Range, read_back, unreadable_copy
from caf_pipeline.maintenance.scrub import (
    CHUNKS_AT_ONCE,
    OneRequestEach,
    is_small,
    mark_wrong,
    prove_chunk,
)
from caf_pipeline.reading.chunk_reader import ChunkFile, RemoteSource
from caf_pipeline.reading.samples import CopyFinding, described
from caf_pipeline.records import Chunk, Copy, Lease, posting_of
from caf_pipeline.retrieval.remote_chunk import fetch_manifest
from caf_pipeline.retrieval.side_by_side import side_by_side
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.chunk_steps import lease_chunk
from caf_pipeline.system.quantities import counted

_Result = TypeVar("_Result")

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows a title and a bar of so many bytes. Call the result with further bytes."""


@dataclass(frozen=True, slots=True)
class ProgressReporter:
    """Reports progress in sentences, and with a bar."""

    note: Callable[[str], None] = lambda sentence: None
    progress: Progress = lambda title, total_bytes: nullcontext(lambda size_bytes: None)


@dataclass
class ChunkAssessor:
    """Assesses the chunks of a source; `folder` takes temporary files."""

    context: RunContext
    lease: Lease
    folder: Path
    reporter: ProgressReporter
    located: Path = field(init=False)
    rows: LocatedRows = field(init=False)
    row_sets: Mapping[int, RowSet] = field(init=False)
    unread: dict[str, str] = field(default_factory=dict)
    unopened: dict[str, str] = field(default_factory=dict)
    differing: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.located = self.folder / "located.parquet"

    def _export(self) -> None:
        """The chunks are listed first, so that each has its rows, and row sets before the rows."""
        self.row_sets = self.context.ledger.exports.row_sets(self.context.source)
        self.context.ledger.exports.located(self.context.source, self.located)
        self.rows = LocatedRows(self.located)

    def _chunks(self) -> Sequence[Chunk]:
        states = [ChunkState.LOCATED, ChunkState.DAMAGED]
        chunks = self.context.ledger.chunks.list(self.context.source, states)
        return [chunk for chunk in chunks if not chunk.from_unknown_post]

    def read_back_all(self) -> tuple[int, int]:
        """Return the number of chunks and bytes read back for the first time.

        An encrypted chunk that no identity opened is read again when an identity opens it.
        """
        unread = [
            chunk
            for chunk in self._chunks()
            if chunk.state is ChunkState.LOCATED
            and not chunk.adopted
            and not chunk.was_read_back
            and (self._open(chunk) or not chunk.read_back_at)
        ]
        if not unread:
            return 0, 0
        self._export()
        total = sum(chunk.stored_size_bytes for chunk in unread)
        self.reporter.note(
            f"reading back {counted(len(unread), 'chunk')}, {total} bytes; each is read once, and "
            "a later run continues"
        )
        if closed := sum(chunk.name in self.unopened for chunk in unread):
            self.reporter.note(
                f"no identity opens {counted(closed, 'chunk')} of these: only the Merkle root is "
                "compared, and a machine with the identity must read them again"
            )
        done = [0, 0]
        with self.reporter.progress("reading back", total) as advance:
            for chunk in unread:
                self.lease.check()
                try:
                    self.unread[chunk.name] = self._read_back(chunk.name, advance)
                except HeldByOther as error:
                    self.unread[chunk.name] = str(error)
                if not self.unread[chunk.name]:
                    done = [done[0] + 1, done[1] + chunk.stored_size_bytes]
        return done[0], done[1]

    def _read_back(self, name: str, advance: Callable[[int], None]) -> str:
        with lease_chunk(self.context, name) as lease:
            chunk = self.context.ledger.chunks.get(name)
            if chunk.state is not ChunkState.LOCATED or chunk.was_read_back:
                return "" if chunk.was_read_back else f"it is {chunk.state}"
            posting, findings, opened = posting_of(chunk), [], self._open(chunk)
            differing, tail = "", None
            for provider in self.context.store.holders(posting):
                finding, differing, tail = self._read_from(provider, lease, chunk, opened, advance)
                findings.append(finding)
                if finding.good:
                    break
            wrong = [finding for finding in findings if finding.fault]
            if wrong:
                explanation = mark_wrong(self.context, lease, chunk, findings)
                self.reporter.note(f"chunk {name} is damaged: {explanation}")
                return explanation
            if not findings or not findings[-1].good:
                return f"no provider returns it: {described(findings)}"
            if differing:
                self.differing[name] = differing
                return differing
            self.context.ledger.replicas.record_full_read(
                lease,
                name,
                findings[-1].copy.provider,
                opened_with=opened.opened_with if opened else None,
                tail_sha256=tail,
            )
            return ""

    def _open(self, chunk: Chunk) -> OpenedChunk | None:
        """Return None if the chunk is plain, or if it does not open here: see `unopened`."""
        try:
            return self.context.opened.open(posting_of(chunk))
        except (IdentityMissing, KeyRefused, ArchiveError) as error:
            self.unopened[chunk.name] = f"chunk {chunk.name} does not open here: {error}"
            return None

    def _read_from(
        self,
        provider: str,
        lease: Lease,
        chunk: Chunk,
        opened: OpenedChunk | None,
        advance: Callable[[int], None],
    ) -> tuple[CopyFinding, str, bytes | None]:
        """Return also how the chunk contradicts the ledger, and the SHA-256 of its tail."""
        copy, bytes_read, tail, unreadable = Copy(provider, ""), 0, None, ""

        def progress(size_bytes: int) -> None:
            nonlocal bytes_read
            bytes_read += size_bytes
            advance(size_bytes)

        try:
            ranges = _own_ranges(self.rows.ranges(chunk.caf_file_id))
            if opened or not chunk.encrypted:
                # The Merkle root of all bytes shows whether this tail is the chunk's.
                try:
                    with self._tail(chunk, provider, opened) as (tail, _):
                        ranges = chain(ranges, [tail])
                except (ArchiveError, IntegrityError) as error:
                    unreadable = f"its manifest cannot be read: {error}"
            differing = read_back(
                self.context,
                lease,
                chunk,
                posting_of(chunk),
                provider,
                opened=opened,
                ranges=ranges,
                progress=progress,
            )
        except NoChainAnswer:
            raise
        except (StoreError, IntegrityError) as error:
            advance(-bytes_read)
            return unreadable_copy(copy, error), "", None
        sha256 = tail[2] if tail else None
        return CopyFinding(copy, whole=True), differing or unreadable, sha256

    @contextmanager
    def _tail(
        self, chunk: Chunk, provider: str, opened: OpenedChunk | None
    ) -> Iterator[tuple[Range, Path]]:
        """Yield the range from the manifest to the end of the CAF, and the manifest as a file."""
        stored = RemoteSource(self.context.store, posting_of(chunk), provider)
        source: RangeSource = OpenedSource(stored, opened) if opened else stored
        member = ChunkFile(source, chunk.name).manifest_member()
        tail = Member(member.key, member.start_byte, chunk.caf_size_bytes)
        with TemporaryDirectory(dir=self.folder) as folder:
            file = Path(folder) / "manifest.parquet"
            sha256 = fetch_manifest(source, tail, file)
            os.truncate(file, member.size_bytes)
            yield (tail.start_byte, tail.end_byte, sha256), file

    def assess(self) -> Mapping[str, tuple[Chunk, ChunkAssessment]]:
        chunks = self._chunks()
        self._export()
        self.reporter.note(
            f"checking {counted(len(chunks), 'chunk')}: the chain's lists, samples of each copy, "
            "manifests"
        )
        problems = self._prove(chunks)

        def assess_chunk(before: Chunk) -> tuple[Chunk, ChunkAssessment]:
            self.lease.check()
            chunk = self.context.ledger.chunks.get(before.name)
            problem = problems.get(chunk.name, "its copies were not checked")
            reason, detail = self._unsafe_reason(chunk, problem)
            return chunk, ChunkAssessment(chunk.caf_file_id, chunk.name, reason, detail)

        return {
            chunk.name: (chunk, assessment)
            for chunk, assessment in self._side_by_side("comparing", chunks, assess_chunk)
        }

    def _side_by_side(
        self, title: str, chunks: Sequence[Chunk], work: Callable[[Chunk], _Result]
    ) -> Iterator[_Result]:
        total = sum(chunk.stored_size_bytes for chunk in chunks)
        # The caller removes the folder into which `work` writes.
        threads = side_by_side(chunks, work, CHUNKS_AT_ONCE, drains=True, waits=True)
        with self.reporter.progress(title, total) as advance, closing(threads) as results:
            for chunk, result in zip(chunks, results, strict=True):
                advance(chunk.stored_size_bytes)
                yield result

    def _prove(self, chunks: Sequence[Chunk], *, retries_held: bool = True) -> dict[str, str]:
        """Return why a chunk was not proven, or "", for each chunk. Held chunks are tried twice."""
        requests = OneRequestEach()

        def look(chunk: Chunk) -> tuple[str, bool]:
            self.lease.check()
            try:
                prove_chunk(self.context, chunk.name, requests=requests)
            except NoChainAnswer:
                raise
            except (HeldByOther, StoreUnreachable) as error:
                return str(error), isinstance(error, HeldByOther)
            return "", False

        looks = list(zip(chunks, self._side_by_side("proving", chunks, look), strict=True))
        problems = {chunk.name: problem for chunk, (problem, _) in looks}
        held = [chunk for chunk, (_, is_held) in looks if is_held]
        if held and retries_held:
            problems |= self._prove(held, retries_held=False)
        return problems

    def _unsafe_reason(self, chunk: Chunk, problem: str) -> tuple[Unsafe | None, str]:
        if chunk.adopted:
            return (
                Unsafe.ADOPTED,
                f"chunk {chunk.name} is a file of another program, without headers and user "
                "metadata",
            )
        copies = self.context.ledger.replicas.list(chunk.name)
        if unsafe := self._unsafe_copies(chunk, problem, copies):
            return unsafe
        if chunk.name in self.differing:
            return Unsafe.DISAGREES, self.differing[chunk.name]
        if chunk.was_read_back:
            return self._compare_manifest(chunk)
        problem = self.unread.get(chunk.name, "")
        if chunk.encrypted:
            return Unsafe.NOT_OPENED, problem or self.unopened.get(chunk.name, "")
        return Unsafe.NOT_READ_BACK, problem

    def _unsafe_copies(
        self, chunk: Chunk, problem: str, known: Sequence[KnownCopy], height: int | None = None
    ) -> tuple[Unsafe, str] | None:
        """Judge by the chain's `height`; None: by its present one."""
        required = self.context.store.required_copies
        copies = [copy for copy in known if copy.listed]
        right = [copy for copy in copies if not copy.fault]
        if len(right) == len(copies) < required:
            return (
                Unsafe.TOO_FEW_COPIES,
                f"{len(copies)} of {required} copies of chunk {chunk.name} are listed",
            )
        if chunk.state is not ChunkState.LOCATED:
            return Unsafe.DAMAGED, f"chunk {chunk.name} is {chunk.state}: {chunk.reason}"
        if problem:
            return Unsafe.NOT_LOOKED_AT, problem
        if len(right) < required:
            return (
                Unsafe.TOO_FEW_COPIES,
                f"{len(right)} of {required} copies of chunk {chunk.name} are right",
            )
        return self._missing_windows(chunk, right, height)

    def _missing_windows(
        self, chunk: Chunk, right: Sequence[KnownCopy], height: int | None
    ) -> tuple[Unsafe, str] | None:
        store, posting = self.context.store, posting_of(chunk)
        now = store.current_window(posting, height)
        if now is None:
            return Unsafe.ONE_WINDOW, "the store has no proof windows"
        # After a window without a valid proof, the chain may have dropped the provider and let it
        # join again, unseen.
        counts = sorted(
            copy.windows if copy.last_window is not None and copy.last_window >= now - 1 else 0
            for copy in right
        )
        windows = counts[-store.required_copies]
        if windows >= WINDOWS_REQUIRED:
            return None
        progress = f"{windows} of {WINDOWS_REQUIRED} proof windows"
        problem = (
            f"read back as a whole in {progress}"
            if is_small(chunk)
            else f"proven in {progress} in a row"
        )
        seconds = store.window_ends_in(posting, height)
        if seconds is None:
            return Unsafe.ONE_WINDOW, problem
        if any(copy.last_window == now - 1 for copy in right):
            return (
                Unsafe.ONE_WINDOW,
                f"{problem}; run again before this window ends in about {_duration(seconds)}",
            )
        when = f"the next window begins in about {_duration(seconds)}: run again while it lasts"
        return Unsafe.ONE_WINDOW, f"{problem}; {when}"

    def _compare_manifest(self, chunk: Chunk) -> tuple[Unsafe | None, str]:
        opened = self._open(chunk)
        if chunk.encrypted and opened is None:
            return Unsafe.NOT_OPENED, self.unopened.get(chunk.name, "")
        # Another header may also open here, and would give other bytes.
        root = posting_of(chunk).merkle_root
        header = self.context.ledger.lookup.chunk_header(root) if chunk.encrypted else None
        rows = self.rows.digest(chunk.caf_file_id)
        facts = repr((rows, chunk.caf_size_bytes, chunk.stored_size_bytes, header))
        agreed_sha256 = hashlib.sha256(facts.encode()).digest()
        if agreed_sha256 == chunk.agreed_sha256:
            return None, ""
        problems, unanswered = list[str](), True
        for provider in self.context.store.holders(posting_of(chunk)):
            try:
                with self._tail(chunk, provider, opened) as ((*_, tail_sha256), manifest):
                    if tail_sha256 != chunk.read_tail_sha256:
                        raise IntegrityError(
                            "its manifest is not among the bytes that were read back"
                        )
                    differing = self.rows.differing(chunk.caf_file_id, manifest)
            except NoChainAnswer:
                raise
            except (StoreError, ArchiveError, IntegrityError) as error:
                unanswered = unanswered and not error.permanent
                problems.append(f"{provider}: {error}")
                continue
            if not differing:
                self.context.ledger.replicas.record_agreement(chunk, agreed_sha256)
                return None, ""
            unanswered = False
            problems.append(
                f"{provider}: {differing} objects' rows differ from the chunk's manifest"
            )
        if unanswered:
            return Unsafe.NOT_LOOKED_AT, "; ".join(problems) or "no provider is listed"
        return Unsafe.DISAGREES, "; ".join(problems)

    def recheck(
        self, assessments: Mapping[str, tuple[Chunk, ChunkAssessment]]
    ) -> Mapping[str, ChunkAssessment]:
        """Return the assessments as of now.

        A chunk is unsafe if it changed, or its row set. So it is if its copies or their windows do
        not suffice any more.
        """
        context = self.context
        height = context.store.listed_at()
        row_sets = context.ledger.exports.row_sets(context.source)
        copies = context.ledger.replicas.of_source(context.source)
        chunks = {
            chunk.name: chunk
            for chunk in context.ledger.chunks.list(context.source, [ChunkState.LOCATED])
        }

        def judge(before: Chunk, entry: ChunkAssessment) -> ChunkAssessment:
            chunk, number = chunks.get(before.name), before.caf_file_id
            if (
                chunk is None
                or not chunk.was_read_back
                or (chunk.merkle_root, chunk.owner, chunk.start)
                != (before.merkle_root, before.owner, before.start)
                or row_sets.get(number) != self.row_sets.get(number)
            ):
                detail = f"chunk {before.name} changed while this command ran: run it again"
                return replace(entry, reason=Unsafe.NOT_LOOKED_AT, detail=detail)
            unsafe = self._unsafe_copies(chunk, "", copies.get(chunk.name, ()), height)
            return replace(entry, reason=unsafe[0], detail=unsafe[1]) if unsafe else entry

        return {
            name: entry if entry.reason else judge(before, entry)
            for name, (before, entry) in assessments.items()
        }


def _own_ranges(ranges: Iterator[Range]) -> Iterator[Range]:
    try:
        yield from ranges
    except IntegrityError as error:
        raise StagingError(
            f"a temporary file of this command was damaged: {error}", hint="run the command again"
        ) from error


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} s"
