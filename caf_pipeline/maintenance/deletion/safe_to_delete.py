"""Writes the list of objects that are safe to delete at their source. It deletes nothing itself.

    read back → prove → compare manifests → list the source → decide, account, write

An object is safe if all of these hold:

- Its chunk is located, and the required copies were proven in two consecutive windows. A chunk of
  up to two leaves was instead read whole from each copy in two windows.
- Its chunk was read back as a whole. If it is encrypted, an identity opened it.
- The chunk's manifest and the ledger describe the object equally.
- The source still has exactly this object.

Source: promises 1 and 2 in docs/explanation/design.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote_to_bytes

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import IntegrityError, LedgerError, SettingsError, UsageError
from caf_pipeline.inventory.snapshot import Snapshot
from caf_pipeline.ledger.records import deletion_lease, plan_lease
from caf_pipeline.maintenance.deletion.assessment import ChunkAssessor, ProgressReporter
from caf_pipeline.maintenance.deletion.deletable import Decisions, Unsafe, tallied
from caf_pipeline.maintenance.deletion.files import (
    BatchManifest,
    Report,
    require_manifest,
    require_report,
)
from caf_pipeline.records import posting_of
from caf_pipeline.run_context import RunContext
from caf_pipeline.steps.inventories import take_inventory
from caf_pipeline.steps.planning import filters_of, record_current, temporary_folder
from caf_pipeline.system.folder_lock import reading

EXAMPLES: Final = 5


@dataclass(frozen=True, slots=True)
class NotSafe:
    """Objects that are unsafe for one reason. `examples` are pairs of key and detail."""

    reason: Unsafe
    skip: str
    objects: int
    size_bytes: int
    examples: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class DeletionReport:
    """The result for all objects of a fresh inventory.

    `manifest` is None if nothing is safe. `gone` counts located keys that are not in the source any
    more. `read_back` counts chunks, and their bytes.
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
        return not self.not_safe


def find_deletable(
    context: RunContext,
    manifest: Path,
    *,
    report: Path | None = None,
    reads_back: bool = True,
    reporter: ProgressReporter | None = None,
) -> DeletionReport:
    """Decide which objects of the source are safe to delete, and write the list of them.

    May be repeated after any failure. After an error, `manifest` is the older list or missing; it
    is missing if nothing is safe. `report` has every other object with its reason. Unless
    `reads_back`, chunks that never were read back are unsafe.
    """
    bucket = context.source_settings.bucket
    require_manifest(manifest, bucket)
    if report:
        require_report(report)
        if report.resolve() == manifest.resolve():
            raise UsageError(
                f"{report} cannot be the list and the report",
                hint="name two files with --output and --report",
            )
    located = next(iter(context.ledger.chunks.list(context.source, [ChunkState.LOCATED])), None)
    if located is not None and context.store.current_window(posting_of(located)) is None:
        raise SettingsError(
            f"the store '{context.store.name}' proves nothing over time, so that no object is ever "
            "safe to delete at its source",
            hint='keep chunks on Jackal (store.kind = "jackal"), or compare and delete at your '
            "own risk",
        )
    context.objects.clock()  # report an unreachable source before chunks are read back for hours
    with (
        context.lease(deletion_lease(context.source)) as lease,
        temporary_folder(context) as folder,
    ):
        chunks = ChunkAssessor(context, lease, folder, reporter or ProgressReporter())
        read = chunks.read_back_all() if reads_back else (0, 0)
        assessments = chunks.assess()
        chunks.reporter.note(f"listing '{context.source}' again")
        snapshot = take_inventory(context, resume=False, to_plan=False)
        with pq.ParquetFile(snapshot.path) as file:
            with_versions = any(
                batch.column(0).null_count < batch.num_rows
                for batch in file.iter_batches(columns=["version_id"])
            )
        with reading(snapshot.path):
            (current_folder := folder / "current").mkdir()
            with context.lease(plan_lease(context.source)) as planning:
                current = record_current(
                    context, planning, snapshot, current_folder, compares_left_out=True
                )
            rechecked = chunks.recheck(assessments)
            decisions = Decisions(
                current.identified,
                chunks.located,
                current.standing,
                current.rewritten,
                rechecked.values(),
                filters=filters_of(context, snapshot),
            )
            with _Lists(
                manifest, report, context.source, bucket=bucket, with_versions=with_versions
            ) as lists:
                for batch in decisions.batches(examples=EXAMPLES):
                    lists.take(batch)
                lists.require_all_of(snapshot)
                for name, entry in chunks.recheck(assessments).items():
                    if entry.reason and not rechecked[name].reason:
                        raise LedgerError(
                            f"chunk {name} became unsafe while the list was written: "
                            f"{entry.reason}",
                            hint="run it again",
                        )
                lease.check()
                lists.publish()
            return DeletionReport(
                snapshot=snapshot,
                safe_objects=lists.safe[0],
                safe_bytes=lists.safe[1],
                manifest=manifest if lists.safe[0] else None,
                columns=("Bucket", "Key", "VersionId") if with_versions else ("Bucket", "Key"),
                not_safe=lists.not_safe(),
                gone=decisions.gone_count,
                gone_examples=[key.decode(errors="replace") for key in decisions.gone_examples],
                read_back=read,
            )


# --- the lists


class _Lists:
    """Nothing stays unless `publish` is reached."""

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
                examples = self._examples.setdefault((reason, skip), [])
                if len(examples) == EXAMPLES:
                    continue
                is_match = pc.equal(unsafe.column("reason"), reason)
                if skip:
                    is_match = pc.and_(is_match, pc.equal(unsafe.column("detail"), skip))
                rows = unsafe.filter(is_match).slice(0, EXAMPLES - len(examples)).to_pylist()
                for row in rows:
                    try:
                        key = unquote_to_bytes(row["encoded_key"]).decode()
                    except UnicodeDecodeError:
                        key = row["encoded_key"]
                    examples.append((key, "" if skip else row["detail"]))

    def require_all_of(self, snapshot: Snapshot) -> None:
        objects = self.safe[0] + sum(count for count, _ in self._not_safe.values())
        size_bytes = self.safe[1] + sum(size for _, size in self._not_safe.values())
        listed, written = (snapshot.object_count, snapshot.object_bytes), self._manifest.line_count
        if (objects, size_bytes) != listed or written != self.safe[0]:
            raise IntegrityError(
                f"the source has {listed[0]} objects ({listed[1]} bytes), but {objects} "
                f"({size_bytes} bytes) were decided, and {written} of {self.safe[0]} safe objects "
                "were listed; nothing was written",
                hint="report this bug, and delete nothing",
            )

    def publish(self) -> None:
        manifest, report = self._paths
        require_manifest(manifest, self._bucket)
        if report:
            require_report(report)
        # A kill in between must not leave an older list beside the new report.
        self._manifest.remove_older()
        if self._report:
            self._report.publish()
        self._manifest.publish()

    def not_safe(self) -> list[NotSafe]:
        groups = [
            NotSafe(Unsafe(reason), skip, objects, size_bytes, self._examples[reason, skip])
            for (reason, skip), (objects, size_bytes) in self._not_safe.items()
        ]
        return sorted(groups, key=lambda group: (-group.objects, group.reason, group.skip))
