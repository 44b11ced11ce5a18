"""Assesses each chunk of a source before its objects may be deleted: read back, proven, and
compared with its manifest.

Looks at every chunk in good standing, and records what is found as the proof watch does. What takes
longest comes first. Source: promises 1 and 5 in docs/explanation/design.md.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    ArchiveError,
    HeldByOther,
    IntegrityError,
    NoChainAnswer,
    StagingError,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.ledger.records import WINDOWS_REQUIRED, Chunk, KnownCopy, posting_of
from caf_pipeline.maintenance.deletion.deletable import ChunkAssessment, LocatedRows, Unsafe
from caf_pipeline.maintenance.full_read import Range, read_back, unread_copy
from caf_pipeline.maintenance.scrub import is_small, mark_wrong, prove_chunk
from caf_pipeline.packing.chunk_reader import ChunkFile, RemoteSource
from caf_pipeline.packing.samples import CopyFinding, described
from caf_pipeline.retrieval.remote_chunk import fetch_manifest
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.chunk_steps import lease_chunk
from caf_pipeline.store.protocol import ChunkStore, Copy, Lease, PostRecord
from caf_pipeline.system.quantities import counted

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows a title and a bar of so many bytes while its context lasts; the function is told bytes
done, as differences.
"""


def _show_nothing(title: str, total_bytes: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show no progress."""
    return nullcontext(lambda size_bytes: None)


def _ignore(sentence: str) -> None:
    """Ignore the sentence."""


@dataclass(frozen=True, slots=True)
class ProgressReporter:
    """Reports progress: in sentences, and by a bar while chunks are read."""

    tell: Callable[[str], None] = _ignore
    progress: Progress = _show_nothing


@dataclass
class ChunkAssessor:
    """A source's chunks, and what was found out about them.

    `lease` is what keeps a second such command away; `folder` takes the ledger's export and a
    manifest at a time.
    """

    context: RunContext
    lease: Lease
    folder: Path
    reporter: ProgressReporter
    located: Path = field(init=False)
    rows: LocatedRows = field(init=False)
    unread: dict[str, str] = field(default_factory=dict)
    differing: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.located = self.folder / "located.parquet"
        self.rows = LocatedRows(self.located)

    def _export(self) -> None:
        """Export the rows; always after chunks were listed, so that none of them is looked at
        without its rows.
        """
        self.context.ledger.exports.located(self.context.source, self.located)

    def _chunks(self) -> Sequence[Chunk]:
        return self.context.ledger.chunks.list(
            self.context.source, [ChunkState.LOCATED, ChunkState.DAMAGED]
        )

    # reading back

    def read_back_all(self) -> tuple[int, int]:
        """Read every located chunk back that was not read back yet; return how many were, and their
        bytes.
        """
        located = [chunk for chunk in self._chunks() if chunk.state is ChunkState.LOCATED]
        unread = [chunk for chunk in located if not chunk.read_back_at and not chunk.adopted]
        if not unread:
            return 0, 0
        self._export()
        total = sum(chunk.stored_size_bytes for chunk in unread)
        self.reporter.tell(
            f"reading back {counted(len(unread), 'chunk')}, {total} bytes; each is read once, and "
            "a later run goes on"
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
        """Read one chunk, from the next provider where one fails; return "" once it is recorded,
        else why it is not.
        """
        with lease_chunk(self.context, name) as lease:
            chunk = self.context.ledger.chunks.get(name)
            if chunk.state is not ChunkState.LOCATED or chunk.read_back_at:
                return "" if chunk.read_back_at else f"it is {chunk.state}"
            posting, findings = posting_of(chunk), []
            for provider in self.context.store.holders(posting):
                finding, differing = self._from(provider, lease, chunk, posting, advance)
                findings.append(finding)
                if finding.good:
                    break
            wrong = [finding for finding in findings if finding.fault]
            if wrong:
                said = mark_wrong(self.context, lease, chunk, findings)
                self.reporter.tell(f"chunk {name} is damaged: {said}")
                return said
            if not findings or not findings[-1].good:
                return f"no provider gives it back: {described(findings)}"
            if differing:
                self.differing[name] = (
                    f"{differing} of its objects' rows have another SHA-256 than the bytes that "
                    "are stored"
                )
                return self.differing[name]
            self.context.ledger.replicas.record_full_read(lease, name, findings[-1].copy.provider)
            return ""

    def _from(
        self,
        provider: str,
        lease: Lease,
        chunk: Chunk,
        posting: PostRecord,
        advance: Callable[[int], None],
    ) -> tuple[CopyFinding, int]:
        copy, taken = Copy(provider, ""), 0

        def told(size_bytes: int) -> None:
            nonlocal taken
            taken += size_bytes
            advance(size_bytes)

        try:
            ranges = _of_this_machine(self.rows.ranges(chunk.caf_file_id))
            differing = read_back(
                self.context, lease, chunk, posting, provider, ranges=ranges, progress=told
            )
        except NoChainAnswer:
            raise
        except (StoreError, IntegrityError) as error:
            advance(-taken)
            return unread_copy(copy, error), 0
        return CopyFinding(copy, whole=True), differing

    # assessments

    def assess(self) -> Mapping[str, tuple[Chunk, ChunkAssessment]]:
        """Look at every chunk in good standing now; return, by name, whether its objects are safe
        as far as the chunk goes.
        """
        chunks = self._chunks()
        self._export()
        self.reporter.tell(
            f"looking at {counted(len(chunks), 'chunk')}: what the chain lists, pieces of each "
            "copy, manifests"
        )
        problems = self._looked_at([chunk.name for chunk in chunks])
        assessments = {}
        for before in chunks:
            self.lease.check()
            chunk = self.context.ledger.chunks.get(before.name)
            reason, detail = self._assessed(chunk, problems.get(chunk.name, ""))
            assessments[chunk.name] = (
                chunk,
                ChunkAssessment(chunk.caf_file_id, chunk.name, reason, detail),
            )
        return assessments

    def _looked_at(self, names: Sequence[str], *, again: bool = True) -> dict[str, str]:
        """Let the proof watch look at each chunk; return why it could not, by name.

        Held ones are tried once more.
        """
        problems, held = {}, []
        for name in names:
            self.lease.check()
            try:
                prove_chunk(self.context, name)
            except NoChainAnswer:
                raise
            except HeldByOther as error:
                problems[name] = str(error)
                held.append(name)
            except StoreUnreachable as error:
                problems[name] = str(error)
        if held and again:
            for name in held:
                del problems[name]
            problems |= self._looked_at(held, again=False)
        return problems

    def _assessed(self, chunk: Chunk, problem: str) -> tuple[Unsafe | None, str]:
        """Say why the chunk's objects are not safe, by the first fault found; (None, "") where
        there is none.
        """
        if chunk.adopted:
            return (
                Unsafe.ADOPTED,
                f"chunk {chunk.name} is a file of another program, which kept no headers and no "
                "user metadata",
            )
        found = self._assessed_by_copies(chunk, problem)
        if found:
            return found
        if chunk.name in self.differing:
            return Unsafe.DISAGREES, self.differing[chunk.name]
        if not chunk.read_back_at:
            return Unsafe.NOT_READ_BACK, self.unread.get(chunk.name, "")
        return self._manifest_compared(chunk)

    def _assessed_by_copies(self, chunk: Chunk, problem: str) -> tuple[Unsafe, str] | None:
        required = self.context.store.required_copies
        copies = [copy for copy in self.context.ledger.replicas.list(chunk.name) if copy.listed]
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
        return self._assessed_by_windows(chunk, right)

    def _assessed_by_windows(
        self, chunk: Chunk, right: Sequence[KnownCopy]
    ) -> tuple[Unsafe, str] | None:
        """Say how many windows are known of as many copies as required; None where they are
        enough.
        """
        store, posting = self.context.store, posting_of(chunk)
        now = store.current_window(posting)
        if now is None:
            return Unsafe.ONE_WINDOW, "the store has no proof windows"
        known = sorted((_windows(copy, now) for copy in right), reverse=True)[
            store.required_copies - 1
        ]
        if known >= WINDOWS_REQUIRED:
            return None
        windows = f"{known} of {WINDOWS_REQUIRED} proof windows"
        told = (
            f"read back as a whole in {windows}"
            if is_small(chunk)
            else f"proven in {windows} in a row"
        )
        seconds = store.window_ends_in(posting)
        if seconds is None:
            return Unsafe.ONE_WINDOW, told
        if any(copy.last_window == now - 1 for copy in right):
            return (
                Unsafe.ONE_WINDOW,
                f"{told}; look again before this window ends in about {_duration(seconds)}",
            )
        when = f"the next window begins in about {_duration(seconds)}: look again while it lasts"
        return Unsafe.ONE_WINDOW, f"{told}; {when}"

    def _manifest_compared(self, chunk: Chunk) -> tuple[Unsafe | None, str]:
        """Compare the ledger's rows with the manifest that a provider gives; one that fails is no
        reason not to ask another.
        """
        posting, file, said = posting_of(chunk), self.folder / "manifest.parquet", list[str]()
        unanswered = True
        for provider in self.context.store.holders(posting):
            try:
                _save_manifest(self.context.store, posting, provider, chunk.name, file)
                differing = self.rows.differing(chunk.caf_file_id, file)
            except NoChainAnswer:
                raise
            except (StoreError, ArchiveError, IntegrityError) as error:
                unanswered = unanswered and not error.permanent
                said.append(f"{provider}: {error}")
                continue
            if not differing:
                return None, ""
            unanswered = False
            said.append(f"{provider}: {differing} objects' rows differ from the chunk's manifest")
        if unanswered:
            return Unsafe.NOT_LOOKED_AT, "; ".join(said) or "no provider is listed"
        return Unsafe.DISAGREES, "; ".join(said)


def _of_this_machine(ranges: Iterator[Range]) -> Iterator[Range]:
    """Yield the ranges; what is wrong with their file here is no fault of the provider whose bytes
    are compared.
    """
    try:
        yield from ranges
    except IntegrityError as error:
        raise StagingError(
            f"a temporary file of this command was damaged: {error}", hint="run the command again"
        ) from error


def _windows(copy: KnownCopy, now: int) -> int:
    """Return how many windows count of a copy as it is now.

    After a window without a proof that counts, the chain may have dropped the provider, and let it
    join again, unseen.
    """
    return copy.windows if copy.last_window is not None and copy.last_window >= now - 1 else 0


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} s"


def _save_manifest(
    store: ChunkStore, posting: PostRecord, provider: str, name: str, file: Path
) -> None:
    source = RemoteSource(store, posting, provider)
    fetch_manifest(source, ChunkFile(source, name).manifest_member(), file)


def recheck(
    context: RunContext, assessments: Mapping[str, tuple[Chunk, ChunkAssessment]]
) -> Iterator[ChunkAssessment]:
    """Yield the assessments; of chunks that changed since they were assessed, that they are not
    safe.
    """
    now = {
        chunk.name: chunk
        for chunk in context.ledger.chunks.list(context.source, [ChunkState.LOCATED])
    }
    for name, (before, assessment) in assessments.items():
        chunk = now.get(name)
        same = chunk and (chunk.merkle_root, chunk.owner, chunk.start) == (
            before.merkle_root,
            before.owner,
            before.start,
        )
        if assessment.reason is None and not (same and chunk and chunk.read_back_at):
            yield replace(
                assessment,
                reason=Unsafe.NOT_LOOKED_AT,
                detail=f"chunk {name} changed while this command ran: run it again",
            )
        else:
            yield assessment
