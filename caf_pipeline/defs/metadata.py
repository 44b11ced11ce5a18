"""What an asset's page shows of a run: numbers, a few tables, nothing for a single object but the largest.

Not here: what the numbers mean (`planning`, `archive`) and when they are written (`assets`, `ops`).
"""

from collections.abc import Mapping, Sequence
from typing import Final

from dagster import MetadataValue, TableColumn, TableRecord, TableSchema
from dagster._core.definitions.metadata import RawMetadataValue

from caf_pipeline.accounts import ReadBack
from caf_pipeline.archive import SealReport, UploadReport, VerifyReport
from caf_pipeline.interfaces import Chunk, PlannedChunk
from caf_pipeline.inventory import Accounting, SkipReason, Snapshot
from caf_pipeline.jackal.messages import StoragePlan
from caf_pipeline.jackal.outlook import Outlook
from caf_pipeline.planning import PlanReport
from caf_pipeline.proofs import ProofReport
from caf_pipeline.repair import RepairReport

Metadata = dict[str, RawMetadataValue]

MAX_ROWS: Final = 20
"""Of any table: metadata are read on a page and kept for ever."""

MIB: Final = 1 << 20

WARNING: Final = "warning"
"""What a plan is warned about, in its metadata; `caf run` shows it, too."""


SNAPSHOT: Final = "snapshot"
"""The name of the inventory that numbers are of."""

SKIPPED: Final = "skipped_"
"""How the names of the numbers of skipped objects begin; the reason follows."""


def table(columns: Mapping[str, str], rows: Sequence[Sequence[str | int]]) -> MetadataValue:
    """Return a table of at most `MAX_ROWS`. `columns` maps a name to its type, "string" or "int"."""
    schema = TableSchema(columns=[TableColumn(name, type) for name, type in columns.items()])
    records = [TableRecord(dict(zip(columns, row, strict=True))) for row in rows[:MAX_ROWS]]
    return MetadataValue.table(records, schema=schema)


def skips(skipped: Mapping[SkipReason, int] | Mapping[str, int]) -> Metadata:
    """Return one number for each reason that occurred."""
    return {f"{SKIPPED}{reason}": count for reason, count in sorted(skipped.items()) if count}


def snapshot_metadata(snapshot: Snapshot) -> Metadata:
    """Return what is shown of an inventory."""
    return {
        SNAPSHOT: snapshot.name,
        "path": MetadataValue.path(str(snapshot.path)),
        "objects": snapshot.object_count,
        "size_bytes": snapshot.object_bytes,
        "unsupported_keys": snapshot.unsupported_count,
        "whole_source": snapshot.complete,
    }


def plan_metadata(report: PlanReport, registered: int, *, copies: int) -> Metadata:
    """Return what is shown of a plan; `registered` partitions were added for it, and each chunk is kept `copies` times."""
    chunks = report.chunks
    shown: Metadata = {SNAPSHOT: report.snapshot.name, "chunks": len(chunks), "partitions_added": registered}
    if report.warning:
        shown[WARNING] = report.warning
    if report.plan is None:
        return shown | {"plan": "nothing new"}
    return shown | {
        "plan": ", ".join(plan.name for plan in report.plans),
        "objects": sum(plan.object_count for plan in report.plans),
        "size_bytes": sum(plan.object_bytes for plan in report.plans),
        "charged_bytes": copies * sum(chunk.expected_size_bytes for chunk in chunks),
        "folder": MetadataValue.path(report.plan.folder),
        "chunk_list": _planned(chunks),
    }


def _planned(chunks: Sequence[PlannedChunk]) -> MetadataValue:
    rows = [(chunk.name, chunk.object_count, chunk.object_bytes, chunk.expected_size_bytes) for chunk in chunks]
    return table({"chunk": "string", "objects": "int", "size_bytes": "int", "expected_size_bytes": "int"}, rows)


def accounting_metadata(account: Accounting) -> Metadata:
    """Return where the objects of a snapshot stand."""
    return {
        "objects": account.objects,
        "located": account.located,
        "claimed": account.claimed,
        "unaccounted": account.unaccounted,
        "in_two_places": account.in_two_places,
        "planned_twice": account.planned_twice,
        **skips(account.skipped),
        "examples": table({"key": "string"}, [(key,) for key in account.examples]),
    }


def seal_metadata(report: SealReport) -> Metadata:
    """Return what is shown of a packed chunk."""
    chunk = report.chunk
    return {
        **chunk_metadata(chunk),
        "fill": round(report.fill, 3),
        "seconds": round(report.seconds, 1),
        "mib_per_second": round(report.bytes_per_second / MIB, 1),
        "resumed_bytes": report.resumed_bytes,
        **({"not_resumed": report.not_resumed} if report.not_resumed else {}),
        "merkle_root": chunk.merkle_root.hex() if chunk.merkle_root else "none",
        "skipped": chunk.skipped_count,
        "released": chunk.released_count,
        **skips(report.skipped),
        "largest_members": table({"key": "string", "size_bytes": "int"}, report.largest),
    }


def chunk_metadata(chunk: Chunk) -> Metadata:
    """Return what is shown of a chunk at every step."""
    return {
        "state": chunk.state.value,
        "objects": chunk.member_count,
        "size_bytes": chunk.member_bytes,
        "stored_size_bytes": chunk.stored_size_bytes,
        "attempts": chunk.attempts,
    }


def upload_metadata(report: UploadReport) -> Metadata:
    """Return what is shown of an upload."""
    return {"seconds": round(report.seconds, 1), "mib_per_second": round(report.bytes_per_second / MIB, 1)}


def verify_metadata(report: VerifyReport) -> Metadata:
    """Return what is shown of a stored chunk."""
    chunk = report.chunk
    copies = table({"provider": "string", "proof": "string"}, [(copy.provider, copy.proof) for copy in report.copies])
    return {
        **chunk_metadata(chunk),
        "merkle_root": chunk.merkle_root.hex() if chunk.merkle_root else "none",
        "owner": chunk.owner or "none",
        "start": chunk.start if chunk.start is not None else "none",
        "copies": len(report.copies),
        "samples_compared": report.samples,
        "providers": copies,
    }


def proof_metadata(report: ProofReport) -> Metadata:
    """Return what is shown of a look at a stored chunk."""
    rows = [(each.copy.provider, each.copy.last_proven or 0, each.fault or "none") for each in report.checks]
    return {
        "state": report.chunk.state.value,
        "copies": len(report.checks),
        "read_back": len(report.read_back),
        "providers": table({"provider": "string", "last_proven_height": "int", "fault": "string"}, rows),
    }


def repair_metadata(report: RepairReport) -> Metadata:
    """Return what is shown of a repaired chunk."""
    return {
        "state": report.chunk.state.value,
        "origin": report.origin,
        "posted_again": report.posted_again,
        "copies": len(report.copies),
        "providers": table({"provider": "string"}, [(copy.provider,) for copy in report.copies]),
    }


def outlook_metadata(plan: StoragePlan, outlook: Outlook, waiting_bytes: int) -> Metadata:
    """Return how the bought space stands; `waiting_bytes` are planned and not yet posted, every copy counted."""
    shown: Metadata = {
        "space_bytes": plan.space_bytes,
        "used_bytes": plan.used_bytes,
        "free_bytes": plan.free_bytes,
        "waiting_bytes": waiting_bytes,
        "charged_bytes_per_day": round(outlook.charged_per_day),
        "ends_at": MetadataValue.timestamp(plan.ends_at),
        "days_left": round(outlook.days_left, 1),
        "first": outlook.first,
    }
    if outlook.fills_in_days is not None:
        shown["fills_in_days"] = round(outlook.fills_in_days, 1)
    return shown


def read_back_metadata(result: ReadBack) -> Metadata:
    """Return what is shown of objects that were read back."""
    return {"tried": result.tried, "mismatched": table({"key": "string"}, [(key,) for key in result.mismatched])}
