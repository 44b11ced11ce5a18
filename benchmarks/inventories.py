"""Inventories of any size, made and not listed: what planning is measured with."""

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from caf_pipeline.inventory.objects import S3Object
from caf_pipeline.inventory.snapshot import STANDING_SCHEMA, SnapshotWriter

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
PAGE = 10_000


def make(path: Path, count: int) -> None:
    """Write a snapshot of `count` objects, and beside it what the ledger would know: every second of them is located."""
    with (
        SnapshotWriter(path, source="bench", listed_at=MOMENT) as writer,
        pq.ParquetWriter(path.with_suffix(".known"), STANDING_SCHEMA) as known,
    ):
        for first in range(0, count, PAGE):
            page = [_an_object(number) for number in range(first, min(first + PAGE, count))]
            writer.add(page)
            rows = [
                {"key": obj.key, "object_version": obj.object_version, "standing": "located", "reason": None, "due": False}
                for obj in page[::2]
            ]
            known.write_table(pa.Table.from_pylist(rows, schema=STANDING_SCHEMA))
        writer.finish()


def _an_object(number: int) -> S3Object:
    return S3Object(key(number).encode(), None, f"{number:032x}", number * 7919 % 10_000_000, MOMENT)


def key(number: int) -> str:
    """Return the key of an object, as long as those of a data lake."""
    return f"data/year=2025/part-{number:012d}-{number * 2654435761 % (1 << 64):016x}.parquet"
