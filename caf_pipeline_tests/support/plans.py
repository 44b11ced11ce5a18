"""Deltas and plans for tests."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from caf_pipeline.caf.archive import DEFAULT_LIMITS, Limits
from caf_pipeline.inventory.cutting import write_plan
from caf_pipeline.inventory.objects import S3Object
from caf_pipeline.inventory.plan import (
    CHUNKS_FILE,
    PLAN_METADATA_KEY,
    Plan,
    PlannedObject,
    PlanTerms,
    read_chunk_objects,
    read_terms,
    write_sums,
)
from caf_pipeline.inventory.snapshot import SNAPSHOT_SCHEMA, snapshot_batch

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def an_object(
    key: str, size_bytes: int = 1, *, version_id: str | None = None, etag: str = "e"
) -> S3Object:
    return S3Object(key.encode(), version_id, etag, size_bytes, MOMENT)


def write_delta(path: Path, objects: list[S3Object]) -> Path:
    rows = snapshot_batch(sorted(objects, key=lambda obj: obj.key))
    pq.write_table(pa.Table.from_batches([rows], SNAPSHOT_SCHEMA), path)
    return path


def plan_of(
    folder: Path,
    objects: list[S3Object],
    *,
    target_size_bytes: int,
    limits: Limits = DEFAULT_LIMITS,
    source: str = "src",
    **terms: Any,
) -> Plan:
    folder.mkdir(parents=True, exist_ok=True)
    terms = PlanTerms(source, "0" * 32, target_size_bytes, "snapshot", MOMENT, limits, **terms)
    return write_plan(write_delta(folder / "delta.parquet", objects), folder, terms)


def with_terms(folder: Path, **changes: str) -> None:
    """Replace terms in a plan's metadata."""
    table = pq.read_table(folder / CHUNKS_FILE)
    terms = json.loads(table.schema.metadata[PLAN_METADATA_KEY]) | changes
    pq.write_table(
        table.replace_schema_metadata({PLAN_METADATA_KEY: json.dumps(terms)}), folder / CHUNKS_FILE
    )
    write_sums(folder)


def limit_to_target(folder: Path) -> None:
    """Set the chunks' limit to the target, so that large headers close a chunk early."""
    with_terms(folder, limit_size=read_terms(folder)["target_size"])


def chunks_of(plan: Plan) -> list[list[PlannedObject]]:
    return [list(read_chunk_objects(plan.folder, chunk.chunk_number)) for chunk in plan.chunks]
