"""Says which objects of a source may be deleted there, by what is known now of each of them; it
deletes nothing.

    read back → prove → compare manifests → list the source → decide, account, write

An object is safe where its chunk is located, was proven by the required copies in two windows in a
row (one no larger than two leaves was read as a whole from each of them in two windows), was read
back as a whole, and its manifest says of the object what the ledger does; and where the source
still has exactly that object. What takes longest comes first, what can change by itself comes last.

Source: promises 1 and 2 in docs/explanation/design.md.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote_to_bytes

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import IntegrityError, LedgerError, SettingsError, StagingError, UsageError
from caf_pipeline.inventory.snapshot import Snapshot
from caf_pipeline.ledger.records import deletion_lease, plan_lease, posting_of
from caf_pipeline.maintenance.deletion.assessment import ChunkAssessor, ProgressReporter, recheck
from caf_pipeline.maintenance.deletion.deletable import Decisions, Unsafe, tallied
from caf_pipeline.maintenance.deletion.files import (
    BatchManifest,
    Report,
    require_manifest,
    require_report,
)
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.inventories import take_inventory
from caf_pipeline.steps.planning import state_current
from caf_pipeline.system.folder_lock import reading

EXAMPLES: Final = 5
"""Objects that are named for each reason."""

_FOLDER: Final = ".deletion"


@dataclass(frozen=True, slots=True)
class NotSafe:
    """The objects that are not safe for one reason.

    `skip` says which skip it was; examples are (key, what more is known).
    """

    reason: Unsafe
    skip: str
    objects: int
    size_bytes: int
    examples: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class DeletionReport:
    """What became of the objects of a fresh inventory: each is safe, or not safe for one reason.

    Attributes: manifest: the list that was written; None where nothing is safe. columns: of the
        list. not_safe: by reason, the most objects first. gone: keys that are located and that the
        source no longer has; `gone_examples` are some of them. read_back: chunks that were read
        back by this command, and their bytes.
    """

    snapshot: Snapshot
    safe_objects: int
    safe_bytes: int
    manifest: Path | None
    columns: tuple[str, ...]
    not_safe: Sequence[NotSafe]
    gone: int
    gone_examples: Sequence[str]
    read_back: tuple[int, int]

    @property
    def everything_is_safe(self) -> bool:
        """Whether all objects of the source may be deleted; also where there are none."""
        return not self.not_safe


def find_deletable(
    context: RunContext,
    manifest: Path,
    *,
    report: Path | None = None,
    reads_back: bool = True,
    reporter: ProgressReporter | None = None,
) -> DeletionReport:
    """Find out which objects of the source are safe to delete, and write the list of them.

    May be run again after any failure: a chunk that was read back once is not read again.

    Args: context: the source. manifest: the list for S3 Batch Operations. Replaced when the new one
        is complete; removed where nothing is safe. report: gets every other object with its reason,
        as Parquet or CSV. reads_back: whether chunks that were never read back as a whole are read
        now. Where not, their objects are not safe. reporter: who is told how it goes.

    Raises: UsageError: a file exists and is something else, or both are one. SettingsError: the
        store proves nothing over time.
            HeldByOther: the same is under way. SourceError. StoreUnreachable: the chain is out of
            reach. LedgerError: also where a chunk changed meanwhile. IntegrityError: the accounting
            does not hold. StagingError: no room. After any of them neither file was touched.
    """
    bucket = context.source_settings.bucket
    require_manifest(manifest, bucket)
    if report:
        require_report(report)
        if report.resolve() == manifest.resolve():
            raise UsageError(
                f"{report} cannot be the list and the report",
                hint="name two files by --output and --report",
            )
    _require_proofs(context)
    # a source that cannot be asked is told of before chunks are read back for hours
    context.objects.clock()
    with context.lease(deletion_lease(context.source)) as lease, _folder(context) as folder:
        chunks = ChunkAssessor(context, lease, folder, reporter or ProgressReporter())
        read = chunks.read_back_all() if reads_back else (0, 0)
        assessments = chunks.assess()
        chunks.reporter.tell(f"listing '{context.source}' again")
        snapshot = take_inventory(context, resume=False, to_plan=False)
        with reading(snapshot.path):
            with context.lease(plan_lease(context.source)) as planning:
                current = state_current(
                    context, planning, snapshot, _made(folder / "current"), compares_left_out=True
                )
            said = list(recheck(context, assessments))
            decisions = Decisions(
                current.identified, chunks.located, current.standing, current.rewritten, said
            )
            with _Lists(
                manifest,
                report,
                context.source,
                bucket=bucket,
                with_versions=_has_versions(snapshot),
            ) as lists:
                for batch in decisions.batches(examples=EXAMPLES):
                    lists.take(batch)
                lists.require_all_of(snapshot)
                if list(recheck(context, assessments)) != said:
                    raise LedgerError(
                        "a chunk changed, or was found damaged, while the list was written",
                        hint="run it again",
                    )
                lease.check()
                lists.publish()
            return DeletionReport(
                snapshot=snapshot,
                safe_objects=lists.safe[0],
                safe_bytes=lists.safe[1],
                manifest=manifest if lists.safe[0] else None,
                columns=("Bucket", "Key", "VersionId")
                if _has_versions(snapshot)
                else ("Bucket", "Key"),
                not_safe=lists.not_safe(),
                gone=decisions.gone_count,
                gone_examples=[key.decode(errors="replace") for key in decisions.gone_examples],
                read_back=read,
            )


def _require_proofs(context: RunContext) -> None:
    """Refuse a store that keeps chunks and proves nothing over time."""
    located = next(iter(context.ledger.chunks.list(context.source, [ChunkState.LOCATED])), None)
    if located is None or context.store.current_window(posting_of(located)) is not None:
        return
    raise SettingsError(
        f"the store '{context.store.name}' proves nothing over time: no object that it keeps is "
        "ever safe to delete at its"
        " source",
        hint='keep chunks on Jackal (store.kind = "jackal"), or compare and delete at your own '
        "risk",
    )


@contextmanager
def _folder(context: RunContext) -> Iterator[Path]:
    """Give a folder for temporary files.

    The holder of the source's lease may remove what a killed command left there.
    """
    path = context.inventories() / _FOLDER
    try:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    except OSError as error:
        raise StagingError(
            f"the folder {path} cannot be made: {error.strerror}",
            hint="mend its parent's permissions",
        ) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# --- the lists
# ------------------------------------------------------------------------------------------


def _has_versions(snapshot: Snapshot) -> bool:
    """Tell whether any object of the snapshot has a version id."""
    with pq.ParquetFile(snapshot.path) as file:
        for batch in file.iter_batches(columns=["version_id"]):
            if batch.column(0).null_count < batch.num_rows:
                return True
    return False


class _Lists:
    """Both files while they are written, and the sums of what went into them.

    Leaves nothing unless `publish` was reached.
    """

    def __init__(
        self, manifest: Path, report: Path | None, tag: str, *, bucket: str, with_versions: bool
    ) -> None:
        self._bucket = bucket
        self._paths = manifest, report
        self.safe = (0, 0)
        self._not_safe: dict[tuple[str, str], tuple[int, int]] = {}
        self._examples: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self._manifest = BatchManifest(manifest, tag, bucket=bucket, with_versions=with_versions)
        try:
            self._report = Report(report, tag) if report else None
        except BaseException:
            self._manifest.abort()
            raise

    def __enter__(self) -> "_Lists":
        return self

    def __exit__(self, *_: object) -> None:
        self._manifest.abort()
        if self._report:
            self._report.abort()

    def take(self, batch: pa.RecordBatch) -> None:
        """Put each object into the list that it belongs to."""
        is_safe = pc.is_null(batch.column("reason"))
        self._manifest.add(batch.filter(is_safe))
        unsafe = batch.filter(pc.invert(is_safe))
        if self._report and unsafe.num_rows:
            self._report.add(unsafe)
        for reason, skip, objects, size_bytes in tallied([batch]):
            if reason is None:
                self.safe = self.safe[0] + objects, self.safe[1] + size_bytes
            else:
                before = self._not_safe.get((reason, skip), (0, 0))
                self._not_safe[reason, skip] = before[0] + objects, before[1] + size_bytes
                self._take_examples(unsafe, reason, skip)

    def _take_examples(self, unsafe: pa.RecordBatch, reason: str, skip: str) -> None:
        taken = self._examples.setdefault((reason, skip), [])
        if len(taken) == EXAMPLES:
            return
        of_it = pc.equal(unsafe.column("reason"), reason)
        if skip:
            of_it = pc.and_(of_it, pc.equal(unsafe.column("detail"), skip))
        some = unsafe.filter(of_it).slice(0, EXAMPLES - len(taken))
        for encoded, detail in zip(
            some.column("encoded_key").to_pylist(), some.column("detail").to_pylist(), strict=True
        ):
            taken.append((_readable(encoded), "" if skip else detail))

    def require_all_of(self, snapshot: Snapshot) -> None:
        """Raise IntegrityError unless each object of the snapshot went into exactly one list."""
        objects = self.safe[0] + sum(count for count, _ in self._not_safe.values())
        size_bytes = self.safe[1] + sum(size for _, size in self._not_safe.values())
        listed, written = (snapshot.object_count, snapshot.object_bytes), self._manifest.line_count
        if (objects, size_bytes) != listed or written != self.safe[0]:
            raise IntegrityError(
                f"the source has {listed[0]} objects ({listed[1]} bytes), but {objects} "
                f"({size_bytes} bytes) were decided on, and"
                f" {written} of {self.safe[0]} safe ones listed; nothing was written",
                hint="it is a bug; report it, and delete nothing",
            )

    def publish(self) -> None:
        """Let both files have their names, unless something else has taken them meanwhile."""
        manifest, report = self._paths
        require_manifest(manifest, self._bucket)
        if report and self._report:
            require_report(report)
            self._report.publish()
        self._manifest.publish()

    def not_safe(self) -> list[NotSafe]:
        """Return the sums by reason, the most objects first."""
        found = [
            NotSafe(Unsafe(reason), skip, objects, size_bytes, self._examples[reason, skip])
            for (reason, skip), (objects, size_bytes) in self._not_safe.items()
        ]
        return sorted(found, key=lambda each: (-each.objects, each.reason, each.skip))


def _readable(encoded: str) -> str:
    """Return a key as text; as it is encoded where it is none."""
    try:
        return unquote_to_bytes(encoded).decode()
    except UnicodeDecodeError:
        return encoded
