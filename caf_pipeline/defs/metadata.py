"""Metadata for the pages of assets: numbers and small tables, never an entry per object."""

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
from caf_pipeline.ledger.records import Chunk, SourceAccount, SourceProgress
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
"""Rows of any table, since Dagster keeps metadata for ever."""

MIB: Final = 1 << 20

_ADDRESS_END: Final = 10
"""All addresses share the first four characters."""

_RECIPIENT_ENDS: Final = 16, 8
"""Characters shown of a recipient: the first 7 are the prefix of all hybrid ones."""

WARNING: Final = "warning"
"""`caf run` shows it, too."""

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
"""Types are those of Postgres."""

_NULLABLE: Final = {"crc64nvme", "s3_checksum", "header_set"}


def file_definition(schema: pa.Schema) -> Metadata:
    """Describe a Parquet file's columns."""
    return {
        "dagster/column_schema": _columns(
            (field.name, str(field.type), field.nullable) for field in schema
        )
    }


def locations_definition() -> Metadata:
    """Name the table of locations and its columns."""
    columns = _columns((name, type, name in _NULLABLE) for name, type in _LOCATION_COLUMNS.items())
    return {"dagster/table_name": "public.file_locations", "dagster/column_schema": columns}


def _columns(columns: Iterable[tuple[str, str, bool]]) -> TableSchema:
    constraints = {
        nullable: TableColumnConstraints(nullable=nullable) for nullable in (True, False)
    }
    return TableSchema(
        [
            TableColumn(name, type, constraints=constraints[nullable])
            for name, type, nullable in columns
        ]
    )


def sizes(**sizes_bytes: int) -> Metadata:
    """Return sizes as numbers (`stored_size_bytes`) and as text (`stored_size`)."""
    shown: Metadata = {}
    for name, size_bytes in sizes_bytes.items():
        shown |= {name.removesuffix("_bytes"): show_size(size_bytes), name: size_bytes}
    return shown


def _uri(path: Path) -> str:
    return path.absolute().as_uri()


SNAPSHOT: Final = "snapshot"

REPORT: Final = "inventory_report"
REPORT_AGE: Final = "inventory_report_age"
"""`caf run` shows them, too."""

OF_PROGRESS: Final = "archived_objects"
"""Only observations of progress have this entry."""

SKIPPED: Final = "skipped_"
"""The reason follows."""

LEFT_OUT: Final = "left_out_by_"
"""The filter follows."""


def table(columns: Mapping[str, str], rows: Sequence[Sequence[str | int]]) -> MetadataValue:
    """Return a table of at most `MAX_ROWS` rows of "string" and "int"."""
    schema = TableSchema(columns=[TableColumn(name, type) for name, type in columns.items()])
    records = [TableRecord(dict(zip(columns, row, strict=True))) for row in rows[:MAX_ROWS]]
    return MetadataValue.table(records, schema=schema)


def skips(skipped: Mapping[SkipReason, int] | Mapping[str, int]) -> Metadata:
    """Count skips by reason."""
    return {f"{SKIPPED}{reason}": count for reason, count in sorted(skipped.items()) if count}


def left_out(numbers: Mapping[str, int]) -> Metadata:
    """Count objects by filter."""
    return {f"{LEFT_OUT}{name}": count for name, count in numbers.items()}


def snapshot_metadata(
    snapshot: Snapshot, warning: str = "", taken: TakenReport | None = None
) -> Metadata:
    """Describe an inventory and its report."""
    report_metadata: Metadata = {}
    if taken:
        report, counts = taken.report, taken.counts
        report_metadata = {
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
        **report_metadata,
    }


VERSIONS: Final = "versions"
OLDER_VERSIONS: Final = "older_versions"
DELETE_MARKERS: Final = "delete_markers"
DELETED_KEYS: Final = "deleted_keys"
"""`caf run` shows them, too."""


def versions_beside(snapshot: Snapshot) -> Metadata:
    """Describe covered versions and noncurrent entries."""
    beside = snapshot.beside
    return {
        VERSIONS: "all" if snapshot.all_versions else "current",
        OLDER_VERSIONS: beside.older,
        DELETE_MARKERS: beside.markers,
        DELETED_KEYS: beside.deleted_keys,
    }


def plan_metadata(
    report: PlanReport, registered: int, *, copies: int, estimate: PlanEstimate
) -> Metadata:
    """Describe a plan, which added `registered` partitions.

    The store charges for `copies` of each chunk.
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
            "plan": "nothing new" if report.waiting is None else "new objects wait for more"
        }
    comparison_with_last_plan: Metadata = {}
    if report.previous:
        change = difference(estimate.statistics, estimate.chunks, report.previous)
        comparison_with_last_plan = {
            "last_plan": f"{change.plan} of {change.planned_at:%Y-%m-%d %H:%M:%S} UTC",
            "objects_more_than_last": change.objects,
            "bytes_more_than_last": change.size_bytes,
            "chunks_more_than_last": change.chunks,
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
        **comparison_with_last_plan,
    }


def _estimate_metadata(estimate: PlanEstimate) -> Metadata:
    # Unknown estimates are left out, except for the time and the price of storage.
    statistics, storage = estimate.statistics, estimate.storage
    columns = {"key": "string", "size": "string", "size_bytes": "int"}
    classes = [
        (name, count, show_size(size), size)
        for name, (count, size) in statistics.storage_classes.items()
    ]
    shown: Metadata = {
        "fill": round(estimate.fill, 4),
        "object_sizes": histogram_metadata(statistics.sizes),
        "largest_objects": table(
            columns, [(key, show_size(size), size) for key, size in statistics.largest]
        ),
        "smallest_objects": table(
            columns, [(key, show_size(size), size) for key, size in statistics.smallest]
        ),
        "storage_classes": table(
            {"class": "string", "objects": "int", "size": "string", "size_bytes": "int"}, classes
        ),
        **(
            {"split_objects": statistics.split_objects, "parts": statistics.parts}
            if statistics.split_objects
            else {}
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


def histogram_metadata(sizes: Sequence[SizeStep]) -> MetadataValue:
    """Draw a histogram for Dagster's UI (1.13.27).

    It must be a Markdown image, not HTML, with fewer than 1,000 characters.
    """
    encoded = histogram_svg(sizes).replace("<", "%3C").replace(">", "%3E")
    return MetadataValue.md(f"![object sizes](<data:image/svg+xml,{encoded}>)")


def accounting_metadata(account: Accounting) -> Metadata:
    """Count located, claimed, skipped and current objects."""
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
    """Describe progress as numbers that the UI plots.

    Pending objects include those of parked chunks. The rate covers at most the last hour.
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


def seal_metadata(report: SealReport, recipients: Sequence[str]) -> Metadata:
    """Describe a packed chunk, without a URI: staging is temporary."""
    chunk = report.chunk
    return {
        **chunk_metadata(chunk, recipients),
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
            [(key, show_size(size), size) for key, size in report.largest],
        ),
    }


def chunk_metadata(chunk: Chunk, recipients: Sequence[str]) -> Metadata:
    """Describe a chunk, as every step does."""
    shown: Metadata = {}
    if chunk.merkle_root is not None:
        # A header does not name all recipients, so a rebuild does not know them.
        is_unknown = chunk.encrypted and not recipients
        shown["recipients"] = "unknown" if is_unknown else show_recipients(recipients)
    return shown | {
        "state": chunk.state.value,
        "objects": chunk.member_count,
        **sizes(size_bytes=chunk.member_bytes, stored_size_bytes=chunk.stored_size_bytes),
        "attempts": chunk.attempts,
    }


def show_recipients(recipients: Sequence[str]) -> str:
    """Shorten recipients, or return "public"."""
    start, end = _RECIPIENT_ENDS
    return ", ".join(f"{text[:start]}…{text[-end:]}" for text in recipients[:MAX_ROWS]) or "public"


def locations_metadata(chunk: Chunk, recipients: Sequence[str], account: SourceAccount) -> Metadata:
    """Describe a located chunk, with row counts of it and its source."""
    return {
        **chunk_metadata(chunk, recipients),
        "dagster/partition_row_count": chunk.member_count,
        "dagster/row_count": account.located_objects,
    }


def upload_metadata(report: UploadReport) -> Metadata:
    """Describe an upload."""
    return {
        "seconds": round(report.seconds, 1),
        "mib_per_second": round(report.bytes_per_second / MIB, 1),
    }


def verify_metadata(report: VerifyReport, recipients: Sequence[str]) -> Metadata:
    """Describe a stored chunk."""
    chunk = report.chunk
    return {
        **chunk_metadata(chunk, recipients),
        "merkle_root": chunk.merkle_root.hex() if chunk.merkle_root else "none",
        "owner": chunk.owner or "none",
        "start": chunk.start if chunk.start is not None else "none",
        "copies": len(report.copies),
        "samples_compared": report.samples,
        **providers(report.copies),
    }


def providers(copies: Sequence[Copy], **columns: tuple[str, Sequence[str | int]]) -> Metadata:
    """Return a table of providers, and their full addresses.

    `columns` have a type, and values in the order of `copies`.
    """
    names = {"provider": "string", "last_proven_height": "int"} | {
        name: type for name, (type, _) in columns.items()
    }
    end = _ADDRESS_END
    rows = zip(
        [
            copy.provider
            if len(copy.provider) <= 2 * end + 1
            else f"{copy.provider[:end]}…{copy.provider[-end:]}"
            for copy in copies
        ],
        [copy.last_proven or 0 for copy in copies],
        *(values for _, values in columns.values()),
        strict=True,
    )
    return {
        "providers": table(names, list(rows)),
        "provider_addresses": MetadataValue.json([copy.provider for copy in copies[:MAX_ROWS]]),
    }


def shorten_hashes(text: str) -> str:
    """Cut SHA-256s and roots short: the UI does not wrap them."""
    return _HASH.sub(lambda match: f"{match[0][:8]}…", text)


def proof_metadata(report: ProofReport) -> Metadata:
    """Describe a proof."""
    faults = [shorten_hashes(check.fault) or "none" for check in report.checks]
    verified = ["yes" if check.copy.verified else "not known" for check in report.checks]
    return {
        "verdict": report.verdict,
        "state": report.chunk.state.value,
        "copies": len(report.checks),
        "read_back": len(report.read_back),
        **providers(
            [check.copy for check in report.checks],
            verified=("string", verified),
            fault=("string", faults),
        ),
    }


def repair_metadata(report: RepairReport) -> Metadata:
    """Describe a repaired chunk."""
    return {
        "state": report.chunk.state.value,
        "origin": report.origin,
        "posted_again": report.posted_again,
        "copies": len(report.copies),
        **providers(report.copies),
    }


def forecast_metadata(plan: StoragePlan, forecast: StorageForecast, waiting_bytes: int) -> Metadata:
    """Describe the bought space that is left.

    `waiting_bytes` are of all copies of planned chunks that are not posted yet.
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
    """Describe objects that were read back."""
    return {
        "tried": result.tried,
        "mismatched": table({"key": "string"}, [(key,) for key in result.mismatched]),
    }
