"""What an asset's page shows of a run: numbers, a few tables, nothing for a single object but the
largest.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import pyarrow as pa
from dagster import MetadataValue, TableColumn, TableColumnConstraints, TableRecord, TableSchema

from caf_pipeline.chunk_state import CLAIMING, IN_GOOD_STANDING
from caf_pipeline.inventory.accounting import Accounting
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.inventory.plan import OBJECTS_FILE
from caf_pipeline.inventory.plan_statistics import SizeStep, histogram_svg
from caf_pipeline.inventory.snapshot import Snapshot
from caf_pipeline.ledger.records import Chunk, PlanRow, SourceAccount, SourceProgress
from caf_pipeline.maintenance.repair import RepairReport
from caf_pipeline.maintenance.scrub import ProofReport
from caf_pipeline.steps.audit import FetchedMembers
from caf_pipeline.steps.chunk_steps import SealReport, UploadReport, VerifyReport
from caf_pipeline.steps.inventories import TakenReport
from caf_pipeline.steps.planning import PlanReport
from caf_pipeline.steps.preview import PlanEstimate, difference
from caf_pipeline.store.jackal.answers import StoragePlan
from caf_pipeline.store.jackal.storage_forecast import StorageForecast
from caf_pipeline.store.protocol import Copy
from caf_pipeline.system.quantities import show_size

Metadata = dict[str, MetadataValue | TableSchema | str | int | float]

MAX_ROWS: Final = 20
"""Of any table: metadata are read on a page and kept for ever."""

MIB: Final = 1 << 20

_ADDRESS_END: Final = 10
"""Characters of each end of a provider's address; the first four are the same for all of a
chain's.
"""

WARNING: Final = "warning"
"""What an inventory or a plan is warned about, in its metadata; `caf run` shows it, too."""

_HASH: Final = re.compile(r"\b[0-9a-f]{64}\b")

_LOCATION_COLUMNS: Final = {
    "caf_file_id": "bigint",
    "start_byte": "bigint",
    "end_byte": "bigint",
    "size_bytes": "bigint",
    "last_modified": "timestamp with time zone",
    "rewritten_at": "timestamp with time zone",
    "source_id": "integer",
    "part": "integer",
    "file_path": "text",
    "version_id": "text",
    "etag": "text",
    "sha256": "bytea",
    "crc64nvme": "bytea",
    "s3_checksum": "text",
    "header_set": "bytea",
}
"""Of the table `file_locations`, with the types as Postgres names them."""

_NULLABLE: Final = {"crc64nvme", "s3_checksum", "header_set"}


# --- what is always so of an asset, shown before it was ever materialized
# ---------------------------------------------


def file_definition(schema: pa.Schema) -> Metadata:
    """Return the columns of a Parquet file."""
    return {
        "dagster/column_schema": _columns(
            (field.name, str(field.type), field.nullable) for field in schema
        )
    }


def locations_definition() -> Metadata:
    """Return the table of locations and its columns."""
    columns = _columns((name, type, name in _NULLABLE) for name, type in _LOCATION_COLUMNS.items())
    return {"dagster/table_name": "public.file_locations", "dagster/column_schema": columns}


def _columns(columns: Iterable[tuple[str, str, bool]]) -> TableSchema:
    """Return a schema of columns, each its name, its type and whether it may be null."""
    constraints = {
        nullable: TableColumnConstraints(nullable=nullable) for nullable in (True, False)
    }
    return TableSchema(
        [
            TableColumn(name, type, constraints=constraints[nullable])
            for name, type, nullable in columns
        ]
    )


# --- what a run made
# ------------------------------------------------------------------------------------------


def sizes(**sizes_bytes: int) -> Metadata:
    """Return each size twice: `stored_size_bytes=n` as that, and as `stored_size` for people."""
    shown: Metadata = {}
    for name, size_bytes in sizes_bytes.items():
        shown |= {name.removesuffix("_bytes"): show_size(size_bytes), name: size_bytes}
    return shown


def _uri(path: Path) -> str:
    return path.absolute().as_uri()


SNAPSHOT: Final = "snapshot"
"""The name of the inventory that numbers are of."""

REPORT: Final = "inventory_report"
REPORT_AGE: Final = "inventory_report_age"
"""The names of the address and the age of the report that an inventory was made of; `caf run` shows
them, too.
"""

OF_PROGRESS: Final = "archived_objects"
"""What every observation of how far a source is has, and no other."""

SKIPPED: Final = "skipped_"
"""How the names of the numbers of skipped objects begin; the reason follows."""

LEFT_OUT: Final = "left_out_by_"
"""How the names of the numbers of objects begin that filters leave out; the filter follows."""


def table(columns: Mapping[str, str], rows: Sequence[Sequence[str | int]]) -> MetadataValue:
    """Return a table of at most `MAX_ROWS`. `columns` maps a name to its type, "string" or
    "int".
    """
    schema = TableSchema(columns=[TableColumn(name, type) for name, type in columns.items()])
    records = [TableRecord(dict(zip(columns, row, strict=True))) for row in rows[:MAX_ROWS]]
    return MetadataValue.table(records, schema=schema)


def skips(skipped: Mapping[SkipReason, int] | Mapping[str, int]) -> Metadata:
    """Return one number for each reason that occurred."""
    return {f"{SKIPPED}{reason}": count for reason, count in sorted(skipped.items()) if count}


def left_out(numbers: Mapping[str, int]) -> Metadata:
    """Return one number for each filter that leaves objects out."""
    return {f"{LEFT_OUT}{name}": count for name, count in numbers.items()}


def snapshot_metadata(
    snapshot: Snapshot, warning: str = "", taken: TakenReport | None = None
) -> Metadata:
    """Return what is shown of an inventory, and of the report that it was made of."""
    return {
        **({WARNING: warning} if warning else {}),
        SNAPSHOT: snapshot.name,
        "dagster/uri": _uri(snapshot.path),
        "dagster/row_count": snapshot.row_count,
        "objects": snapshot.object_count,
        **sizes(size_bytes=snapshot.object_bytes),
        "unsupported_keys": snapshot.unsupported_count,
        "whole_source": snapshot.complete,
        **versions_beside(snapshot),
        **(_report_metadata(taken) if taken else {}),
    }


VERSIONS: Final = "versions"
OLDER_VERSIONS: Final = "older_versions"
DELETE_MARKERS: Final = "delete_markers"
DELETED_KEYS: Final = "deleted_keys"
"""The names of what an inventory has of versions; `caf run` shows them, too."""


def versions_beside(snapshot: Snapshot) -> Metadata:
    """Return which versions are objects of an inventory, and what keys have beside their current
    ones.

    Older versions are objects of an inventory of all versions, and are left out of one of the
    current ones.
    """
    beside = snapshot.beside
    return {
        VERSIONS: "all" if snapshot.all_versions else "current",
        OLDER_VERSIONS: beside.older,
        DELETE_MARKERS: beside.markers,
        DELETED_KEYS: beside.deleted_keys,
    }


def _report_metadata(taken: TakenReport) -> Metadata:
    report, counts = taken.report, taken.counts
    return {
        REPORT: report.url,
        "inventory_report_time": f"{report.taken_at:%Y-%m-%d %H:%M:%S} UTC",
        REPORT_AGE: str(timedelta(seconds=int(taken.age.total_seconds()))),
        "inventory_report_files": report.file_count,
        **sizes(inventory_report_size_bytes=report.size_bytes),
        "outside_prefix": counts.outside_prefix,
        "multipart_objects": counts.multipart,
        "storage_classes": table(
            {"storage class": "string", "objects": "int"}, counts.storage_classes.most_common()
        ),
        "encryption": table(
            {"encryption": "string", "objects": "int"}, counts.encryption.most_common()
        ),
    }


def plan_metadata(
    report: PlanReport, registered: int, *, copies: int, estimate: PlanEstimate
) -> Metadata:
    """Return what is shown of a plan; `registered` partitions were added for it.

    `copies`: for how many of each chunk the store charges; 0: for none.
    """
    chunks = report.chunks
    charged = copies * sum(chunk.expected_size_bytes for chunk in chunks)
    shown: Metadata = {
        SNAPSHOT: report.snapshot.name,
        "chunks": len(chunks),
        "partitions_added": registered,
    }
    shown |= left_out(report.left_out)
    if report.warning:
        shown[WARNING] = report.warning
    if report.comparison.requests:
        comparison = report.comparison
        shown |= {
            "written_again": comparison.requests,
            "written_again_equal": comparison.equal,
            "written_again_other_headers": comparison.other_headers,
            "written_again_other_bytes": comparison.other_bytes,
            "written_again_without_checksum": comparison.without_checksum,
            "written_again_not_compared": comparison.not_compared,
        }
    if report.waiting:
        shown |= {
            "waiting_objects": report.waiting.objects,
            **sizes(waiting_bytes=report.waiting.size_bytes),
        }
        shown["waiting_until"] = MetadataValue.timestamp(report.waiting.until)
    if report.plan is None:
        return shown | {
            "plan": "nothing new" if report.waiting is None else "what is new waits for more"
        }
    objects = sum(plan.object_count for plan in report.plans)
    return shown | {
        "plan": ", ".join(plan.name for plan in report.plans),
        "dagster/uri": _uri(Path(report.plan.folder, OBJECTS_FILE)),
        "dagster/row_count": objects,
        "objects": objects,
        **sizes(
            size_bytes=sum(plan.object_bytes for plan in report.plans),
            **({"charged_bytes": charged} if charged else {}),
        ),
        "chunk_list": table(
            {"chunk": "string", "objects": "int", "size": "string", "size_bytes": "int"},
            [
                (chunk.name, chunk.object_count, show_size(chunk.object_bytes), chunk.object_bytes)
                for chunk in chunks[:MAX_ROWS]
            ],
        ),
        **_estimate_metadata(estimate),
        **(_last_plan(estimate, report.previous) if report.previous else {}),
    }


def _estimate_metadata(estimate: PlanEstimate) -> Metadata:
    """Return what archiving a plan takes; what is not known is not shown, but for the time."""
    seen, storage = estimate.statistics, estimate.storage
    named = {"key": "string", "size": "string", "size_bytes": "int"}
    classes = [
        (name, count, show_size(size), size) for name, (count, size) in seen.storage_classes.items()
    ]
    shown: Metadata = {
        "fill": round(estimate.fill, 4),
        "object_sizes": drawn_histogram(seen.sizes),
        "largest_objects": table(
            named, [(key, show_size(size), size) for key, size in seen.largest]
        ),
        "smallest_objects": table(
            named, [(key, show_size(size), size) for key, size in seen.smallest]
        ),
        "storage_classes": table(
            {"class": "string", "objects": "int", "size": "string", "size_bytes": "int"}, classes
        ),
        **(
            {"split_objects": seen.split_objects, "parts": seen.parts} if seen.split_objects else {}
        ),
        "requests": estimate.requests,
        "estimated_seconds": "not known yet"
        if estimate.seconds is None
        else round(estimate.seconds),
    }
    if estimate.request_usd is not None:
        shown["estimated_request_usd"] = round(estimate.request_usd, 4)
    if estimate.egress_usd is not None:
        shown["estimated_egress_usd"] = round(estimate.egress_usd, 4)
    if storage:
        shown |= {
            "storage_ujkl": storage.price_ujkl,
            "storage_days": storage.days,
            "fees_ujkl": storage.fees_ujkl,
        }
    elif estimate.storage_unknown:
        shown["storage_ujkl"] = f"not known: {estimate.storage_unknown}"
    return shown


def drawn_histogram(sizes: Sequence[SizeStep]) -> MetadataValue:
    """Return a histogram as the UI draws it (1.13.27): from Markdown's picture, not from HTML's,
    and below 1,000 characters.
    """
    encoded = histogram_svg(sizes).replace("<", "%3C").replace(">", "%3E")
    return MetadataValue.md(f"![object sizes](<data:image/svg+xml,{encoded}>)")


def _last_plan(estimate: PlanEstimate, previous: PlanRow) -> Metadata:
    """Return how a plan differs from the one before; more is positive."""
    found = difference(estimate.statistics, estimate.chunks, previous)
    return {
        "last_plan": f"{found.plan} of {found.planned_at:%Y-%m-%d %H:%M:%S} UTC",
        "objects_more_than_last": found.objects,
        "bytes_more_than_last": found.size_bytes,
        "chunks_more_than_last": found.chunks,
    }


def accounting_metadata(account: Accounting) -> Metadata:
    """Return how many objects of a snapshot are located, claimed or skipped, and how many located
    ones are current.
    """
    return {
        "objects": account.objects,
        "located": account.located,
        "claimed": account.claimed,
        "unaccounted": account.unaccounted,
        "current": account.current,
        "older": account.older,
        "gone": account.gone,
        "in_two_places": account.in_two_places,
        "planned_twice": account.planned_twice,
        **left_out(account.left_out),
        **skips(account.skipped),
        "examples": table({"key": "string"}, [(key,) for key in account.examples]),
    }


def progress_metadata(progress: SourceProgress, copies: Mapping[tuple[str, str], int]) -> Metadata:
    """Return how far a source is, as numbers that the UI plots over time; `copies` are those of
    `copy_counts`.

    Pending is what is planned and not archived, parked chunks among it. The rate is that of the
    last hour at most.
    """
    archived, pending = progress.sums(IN_GOOD_STANDING), progress.sums(CLAIMING)
    oldest = (
        (progress.at - progress.oldest_planned_at) / timedelta(hours=1)
        if progress.oldest_planned_at
        else 0.0
    )
    return {
        OF_PROGRESS: archived.objects,
        "pending_objects": pending.objects,
        "skipped_objects": progress.skipped_objects,
        **sizes(archived_bytes=archived.size_bytes, pending_bytes=pending.size_bytes),
        "oldest_pending_hours": round(oldest, 1),
        "archived_mib_per_second": round((progress.bytes_per_second or 0.0) / MIB, 1),
        **{
            f"copies_{status}": copies.get((progress.source, status), 0)
            for status in ("listed", "unlisted", "faulty")
        },
    }


def seal_metadata(report: SealReport) -> Metadata:
    """Return what is shown of a packed chunk.

    It has no address: its file is removed from staging when the chunk is located.
    """
    chunk = report.chunk
    return {
        **chunk_metadata(chunk),
        "fill": round(report.fill, 3),
        "seconds": round(report.seconds, 1),
        "mib_per_second": round(report.bytes_per_second / MIB, 1),
        **sizes(resumed_bytes=report.resumed_bytes),
        **({"not_resumed": report.not_resumed} if report.not_resumed else {}),
        "merkle_root": chunk.merkle_root.hex() if chunk.merkle_root else "none",
        "skipped": chunk.skipped_count,
        "released": chunk.released_count,
        **skips(report.skipped),
        "largest_members": table(
            {"key": "string", "size": "string", "size_bytes": "int"},
            [(key, show_size(its), its) for key, its in report.largest],
        ),
    }


def chunk_metadata(chunk: Chunk) -> Metadata:
    """Return what is shown of a chunk at every step."""
    return {
        "state": chunk.state.value,
        "objects": chunk.member_count,
        **sizes(size_bytes=chunk.member_bytes, stored_size_bytes=chunk.stored_size_bytes),
        "attempts": chunk.attempts,
    }


def locations_metadata(chunk: Chunk, account: SourceAccount) -> Metadata:
    """Return what is shown of a chunk whose objects are located: its rows, and those of the source
    with it.
    """
    return {
        **chunk_metadata(chunk),
        "dagster/partition_row_count": chunk.member_count,
        "dagster/row_count": account.located_objects,
    }


def upload_metadata(report: UploadReport) -> Metadata:
    """Return what is shown of an upload."""
    return {
        "seconds": round(report.seconds, 1),
        "mib_per_second": round(report.bytes_per_second / MIB, 1),
    }


def verify_metadata(report: VerifyReport) -> Metadata:
    """Return what is shown of a stored chunk."""
    chunk = report.chunk
    return {
        **chunk_metadata(chunk),
        "merkle_root": chunk.merkle_root.hex() if chunk.merkle_root else "none",
        "owner": chunk.owner or "none",
        "start": chunk.start if chunk.start is not None else "none",
        "copies": len(report.copies),
        "samples_compared": report.samples,
        **providers(report.copies),
    }


def providers(copies: Sequence[Copy], **columns: tuple[str, Sequence[str | int]]) -> Metadata:
    """Return a table that fits its page, of the providers that have a chunk, and their addresses in
    full beside it.

    A provider's address and the proof that the chain lists have some 45 and 180 characters.
    `columns` are further ones, each its type and its values in the order of `copies`.
    """
    names = {"provider": "string", "last_proven_height": "int"} | {
        name: type for name, (type, _) in columns.items()
    }
    heights = [copy.last_proven or 0 for copy in copies]
    rows = zip(
        [_short(copy.provider) for copy in copies],
        heights,
        *(values for _, values in columns.values()),
        strict=True,
    )
    return {
        "providers": table(names, list(rows)),
        "provider_addresses": MetadataValue.json([copy.provider for copy in copies[:MAX_ROWS]]),
    }


def _short(provider: str) -> str:
    """Return an address by its two ends, as explorers of chains do."""
    return (
        provider
        if len(provider) <= 2 * _ADDRESS_END + 1
        else f"{provider[:_ADDRESS_END]}…{provider[-_ADDRESS_END:]}"
    )


def shorten_hashes(text: str) -> str:
    """Return a text with only the beginnings of its SHA-256s and Merkle roots: no page breaks them
    into lines.
    """
    return _HASH.sub(lambda found: f"{found[0][:8]}…", text)


def proof_metadata(report: ProofReport) -> Metadata:
    """Return what is shown of a look at a stored chunk."""
    faults = [shorten_hashes(each.fault) or "none" for each in report.checks]
    verified = ["yes" if each.copy.verified else "not known" for each in report.checks]
    return {
        "verdict": report.verdict,
        "state": report.chunk.state.value,
        "copies": len(report.checks),
        "read_back": len(report.read_back),
        **providers(
            [each.copy for each in report.checks],
            verified=("string", verified),
            fault=("string", faults),
        ),
    }


def repair_metadata(report: RepairReport) -> Metadata:
    """Return what is shown of a repaired chunk."""
    return {
        "state": report.chunk.state.value,
        "origin": report.origin,
        "posted_again": report.posted_again,
        "copies": len(report.copies),
        **providers(report.copies),
    }


def forecast_metadata(plan: StoragePlan, forecast: StorageForecast, waiting_bytes: int) -> Metadata:
    """Return how much bought space is left, for how long; `waiting_bytes` are planned and not yet
    posted, every copy counted.
    """
    shown: Metadata = {
        **sizes(
            space_bytes=plan.space_bytes,
            used_bytes=plan.used_bytes,
            free_bytes=plan.free_bytes,
            waiting_bytes=waiting_bytes,
            charged_per_day_bytes=round(forecast.charged_per_day),
        ),
        "ends_at": MetadataValue.timestamp(plan.ends_at),
        "days_left": round(forecast.days_left, 1),
        "first": forecast.first,
    }
    if forecast.fills_in_days is not None:
        shown["fills_in_days"] = round(forecast.fills_in_days, 1)
    return shown


def read_back_metadata(result: FetchedMembers) -> Metadata:
    """Return what is shown of objects that were read back."""
    return {
        "tried": result.tried,
        "mismatched": table({"key": "string"}, [(key,) for key in result.mismatched]),
    }
