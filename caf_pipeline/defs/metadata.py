"""Metadata for the pages of assets: numbers and small tables, never an entry per object."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final

from dagster import (
    AssetKey,
    MetadataValue,
    TableColumn,
    TableColumnConstraints,
    TableColumnDep,
    TableColumnLineage,
    TableRecord,
    TableSchema,
)

from caf_pipeline.chunk_state import CLAIMING, IN_GOOD_STANDING
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.records import SourceAccount, SourceProgress
from caf_pipeline.ledger.sql_files import described_columns
from caf_pipeline.records import Chunk, Copy
from caf_pipeline.store.jackal.answers import StoragePlan
from caf_pipeline.store.jackal.storage_forecast import StorageForecast
from caf_pipeline.system.quantities import show_size, show_time

if TYPE_CHECKING:
    from caf_pipeline.inventory.accounting import Accounting
    from caf_pipeline.inventory.plan_statistics import SizeStep
    from caf_pipeline.inventory.snapshot import Snapshot
    from caf_pipeline.maintenance.repair import RepairReport
    from caf_pipeline.maintenance.scrub import ProofReport
    from caf_pipeline.steps.audit import FetchedMembers
    from caf_pipeline.steps.chunk_steps import SealReport, UploadReport, VerifyReport
    from caf_pipeline.steps.inventories import TakenReport
    from caf_pipeline.steps.planning import PlanReport
    from caf_pipeline.steps.preview import PlanEstimate

Metadata = dict[str, MetadataValue | TableSchema | TableColumnLineage | str | int | float]

MAX_ROWS: Final = 20
"""Rows of any table, since Dagster keeps metadata for ever."""

MIB: Final = 1 << 20
GIB: Final = 1 << 30

_ADDRESS_END: Final = 10
"""All addresses share the first four characters."""

_RECIPIENT_ENDS: Final = 16, 8
"""Characters shown of a recipient: the first 7 are the prefix of all hybrid ones."""

WARNING: Final = "warning"
"""`caf run` shows it, too."""

_HASH: Final = re.compile(r"\b[0-9a-f]{64}\b")

INVENTORY_COLUMNS: Final = {
    "key": ("binary", "key of the object, as S3 has it"),
    "version_id": ("string", "version id; NULL: the bucket has no versions"),
    "etag": ("string", "ETag as S3 gave it, without quotes"),
    "size_bytes": ("int64", "size of the whole object"),
    "last_modified": ("timestamp[us, tz=UTC]", "LastModified of the object"),
    "storage_class": ("string", "storage class, as S3 names it"),
    "checksum": (
        "string",
        "kind of S3's own checksum, such as CRC64NVME/FULL_OBJECT; empty: none is listed",
    ),
    "object_version": ("string", "the same text in two inventories: the same content"),
    "is_latest": ("bool", "the version is the current one of its key"),
    "is_delete_marker": ("bool", "the version is a delete marker, without content"),
}
"""Type and description of each column, as SNAPSHOT_SCHEMA has them: pyarrow loads slowly."""

PLAN_COLUMNS: Final = INVENTORY_COLUMNS | {
    "chunk_number": ("int32", "number of the chunk in the plan, from 1"),
    "member": ("string", "name of the object in the chunk's CAF file"),
}
"""The same of PLAN_SCHEMA."""

_LOCATED_COLUMNS: Final = {
    "file_path": "key",
    "version_id": "version_id",
    "etag": "etag",
    "size_bytes": "size_bytes",
}
"""Columns of `file_locations` that are copied from a plan, whose names follow."""


def table_definition(columns: Mapping[str, tuple[str, str]]) -> Metadata:
    """Describe a table by the type and the description of each column."""
    return {
        "dagster/column_schema": TableSchema(
            [
                TableColumn(
                    name,
                    type,
                    description=description,
                    constraints=TableColumnConstraints(nullable="NULL" in description),
                )
                for name, (type, description) in columns.items()
            ]
        )
    }


def locations_definition() -> Metadata:
    """Name the table of locations and its columns, with their types in Postgres."""
    return {
        "dagster/table_name": "public.file_locations",
        **table_definition(described_columns("file_locations")),
    }


def plan_lineage(inventory: AssetKey) -> Metadata:
    """Return the columns of a plan that come from its inventory."""
    return _lineage(inventory, {name: name for name in INVENTORY_COLUMNS})


def locations_lineage(plan: AssetKey) -> Metadata:
    """Return the columns of `file_locations` that come from a plan."""
    return _lineage(plan, _LOCATED_COLUMNS)


def _lineage(upstream: AssetKey, columns: Mapping[str, str]) -> Metadata:
    deps = {name: [TableColumnDep(upstream, origin)] for name, origin in columns.items()}
    return {"dagster/column_lineage": TableColumnLineage(deps)}


def _gib(size_bytes: float) -> float:
    """Return a size that the UI plots, and that a person can read."""
    return round(size_bytes / GIB, 3)


def _uri(path: Path) -> str:
    return path.absolute().as_uri()


SNAPSHOT: Final = "snapshot"

SIZE: Final = "dagster/size_bytes"
"""Dagster (1.13.27) formats it on the asset's page, unlike any other number of bytes."""

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
            "inventory_report_time": MetadataValue.timestamp(report.taken_at),
            REPORT_AGE: str(timedelta(seconds=int(taken.age.total_seconds()))),
            "inventory_report_files": report.file_count,
            "inventory_report_size": show_size(report.size_bytes),
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
        SIZE: snapshot.object_bytes,
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
    from caf_pipeline.inventory.plan import OBJECTS_FILE
    from caf_pipeline.steps.preview import difference

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
            "waiting_size": show_size(report.waiting.size_bytes),
            "waiting_until": MetadataValue.timestamp(report.waiting.until),
        }
    if report.plan is None:
        return shown | {
            "plan": "nothing new" if report.waiting is None else "new objects wait for more"
        }
    comparison_with_last_plan: Metadata = {}
    if report.previous:
        change = difference(estimate.statistics, estimate.chunks, report.previous)
        comparison_with_last_plan = {
            "last_plan": f"{change.plan} of {show_time(change.planned_at)}",
            "objects_more_than_last": change.objects,
            "gib_more_than_last": _gib(change.size_bytes),
            "chunks_more_than_last": change.chunks,
        }
    return shown | {
        "plan": ", ".join(plan.name for plan in report.plans),
        "dagster/uri": _uri(Path(report.plan.folder, OBJECTS_FILE)),
        "dagster/row_count": sum(plan.object_count for plan in report.plans),
        SIZE: sum(plan.object_bytes for plan in report.plans),
        **({"charged_size": show_size(charged)} if charged else {}),
        "chunk_list": table(
            {"chunk": "string", "objects": "int", "size": "string"},
            [
                (chunk.name, chunk.object_count, show_size(chunk.object_bytes))
                for chunk in chunks[:MAX_ROWS]
            ],
        ),
        **_estimate_metadata(estimate),
        **comparison_with_last_plan,
    }


def _estimate_metadata(estimate: PlanEstimate) -> Metadata:
    # Unknown estimates are left out, except for the time and the price of storage.
    statistics, storage = estimate.statistics, estimate.storage
    columns = {"key": "string", "size": "string"}
    classes = [
        (name, count, show_size(size)) for name, (count, size) in statistics.storage_classes.items()
    ]
    shown: Metadata = {
        "fill": round(estimate.fill, 4),
        "object_sizes": histogram_metadata(statistics.sizes),
        "largest_objects": table(
            columns, [(key, show_size(size)) for key, size in statistics.largest]
        ),
        "smallest_objects": table(
            columns, [(key, show_size(size)) for key, size in statistics.smallest]
        ),
        "storage_classes": table({"class": "string", "objects": "int", "size": "string"}, classes),
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
        if storage.list_usd is not None:
            shown["storage_usd_at_most"] = round(storage.list_usd, 4)
    elif estimate.storage_unknown:
        shown["storage_ujkl"] = f"not known: {estimate.storage_unknown}"
    return shown


def histogram_metadata(sizes: Sequence[SizeStep]) -> MetadataValue:
    """Draw a histogram for Dagster's UI (1.13.27).

    It must be a Markdown image, not HTML, with fewer than 1,000 characters.
    """
    from caf_pipeline.inventory.plan_statistics import histogram_svg

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
        "archived_gib": _gib(archived.size_bytes),
        "pending_gib": _gib(pending.size_bytes),
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
        "resumed_size": show_size(report.resumed_bytes),
        **({"not_resumed": report.not_resumed} if report.not_resumed else {}),
        "merkle_root": chunk.merkle_root.hex() if chunk.merkle_root else "none",
        "skipped": chunk.skipped_count,
        "released": chunk.released_count,
        **skips(report.skipped),
        "largest_members": table(
            {"key": "string", "size": "string"},
            [(key, show_size(size)) for key, size in report.largest],
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
        "size": show_size(chunk.member_bytes),
        "stored_size": show_size(chunk.stored_size_bytes),
        "attempts": chunk.attempts,
    }


def show_recipients(recipients: Sequence[str]) -> str:
    """Shorten recipients, or return "public"."""
    start, end = _RECIPIENT_ENDS
    return ", ".join(f"{text[:start]}…{text[-end:]}" for text in recipients[:MAX_ROWS]) or "public"


def locations_metadata(chunk: Chunk, recipients: Sequence[str], account: SourceAccount) -> Metadata:
    """Describe a located chunk, with row counts of it and its source."""
    shown = chunk_metadata(chunk, recipients) | {
        "dagster/partition_row_count": chunk.member_count,
        "dagster/row_count": account.located_objects,
    }
    del shown["objects"]
    return shown


def verify_metadata(
    report: VerifyReport, upload: UploadReport, recipients: Sequence[str], urls: Mapping[str, str]
) -> Metadata:
    """Describe a stored chunk, with a link to its file. The UI plots no text."""
    chunk = report.chunk
    return {
        **chunk_metadata(chunk, recipients),
        **_fetching(chunk, urls),
        "seconds": round(upload.seconds, 1),
        "mib_per_second": round(upload.bytes_per_second / MIB, 1),
        "merkle_root": chunk.merkle_root.hex() if chunk.merkle_root else "none",
        "owner": chunk.owner or "none",
        "start": "none" if chunk.start is None else str(chunk.start),
        "copies": str(len(report.copies)),
        "samples_compared": str(report.samples),
        **providers(report.copies),
    }


def _fetching(chunk: Chunk, urls: Mapping[str, str]) -> Metadata:
    """Link to the chunk's file at one provider, and name the command that fetches it."""
    url = next(iter(urls.values()), "")
    if not url:
        return {}
    path = url.removeprefix("file://") if url.startswith("file://") else ""
    link = MetadataValue.path(path) if path else MetadataValue.url(url)
    name, origin = quote(f"{chunk.name}.caf"), quote(path or url)
    if chunk.encrypted:
        read = f"cat {origin}" if path else f"curl -f {origin}"
        fetch = f"{read} | age -d -i identity.txt -o {name}"
        return {"download_encrypted": link, "fetch": fetch}
    fetch = f"cp {origin} {name}" if path else f"curl -f -o {name} {origin}"
    return {"download": link, "fetch": fetch}


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
        "space_gib": _gib(plan.space_bytes),
        "used_gib": _gib(plan.used_bytes),
        "free_gib": _gib(plan.free_bytes),
        "waiting_gib": _gib(waiting_bytes),
        "charged_per_day_gib": _gib(forecast.charged_per_day),
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
