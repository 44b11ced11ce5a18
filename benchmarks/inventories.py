"""Generated inventories of any size, as inputs for planning."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from caf_pipeline.inventory.ledger_rows import EXCEPTION_SCHEMA, STANDING_SCHEMA
from caf_pipeline.inventory.snapshot import SNAPSHOT_SCHEMA, SnapshotWriter
from caf_pipeline.system.parquet import write_whole

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
BATCH = 100_000


# The same keys as `key` returns. Versions have the format of S3Object.object_version.
_OBJECTS = """
    SELECT encode(format('data/year=2025/part-{:012d}-{:016x}.parquet', number,
            (number::HUGEINT * 2654435761 % 18446744073709551616)::UBIGINT)) AS key,
        NULL AS version_id, format('{:032x}', number) AS etag, number * 7919 % 10000000 AS
            size_bytes,
        TIMESTAMPTZ '2026-01-01 00:00:00+00' AS last_modified, 'STANDARD' AS storage_class, '' AS
            checksum,
        format('etag:{:032x}:{}', number, number * 7919 % 10000000) AS object_version,
        true AS is_latest, false AS is_delete_marker
    FROM range($first, $last) AS numbers(number)"""


def objects(first: int, end: int) -> Iterator[pa.RecordBatch]:
    """Yield the objects of these numbers as batches of a snapshot."""
    for start in range(first, end, BATCH):
        numbers = {"first": start, "last": min(start + BATCH, end)}
        rows = duckdb.sql(_OBJECTS, params=numbers).to_arrow_table().cast(SNAPSHOT_SCHEMA)
        yield from rows.combine_chunks().to_batches()


def make(path: Path, count: int) -> None:
    """Write a snapshot of `count` objects, and the ledger's rows for it to a `.known` file.

    Every second object is located.
    """
    with (
        SnapshotWriter(path, source="bench", listed_at=MOMENT) as writer,
        pq.ParquetWriter(path.with_suffix(".known"), STANDING_SCHEMA) as ledger_rows,
    ):
        for batch in objects(0, count):
            writer.add_batch(batch)
            every_second = batch.take(pa.array(range(0, batch.num_rows, 2)))
            standing = {"standing": "located", "reason": None, "due": False, "last_modified": None}
            columns = [
                every_second[name]
                if name in ("key", "object_version")
                else pa.array([standing[name]] * len(every_second), type_)
                for name, type_ in zip(STANDING_SCHEMA.names, STANDING_SCHEMA.types, strict=True)
            ]
            ledger_rows.write_table(pa.Table.from_arrays(columns, schema=STANDING_SCHEMA))
        writer.finish()


def make_located(path: Path, count: int) -> None:
    """Write a snapshot of `count` objects, all of them located in their current version.

    The `.known` file has the ledger's rows for them. The `.stated` file, with the exceptions that
    the ledger has recorded, is empty.
    """
    make(path, count)
    standing = {"standing": "located", "reason": None, "due": False}

    def rows(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
        for batch in file.iter_batches(BATCH):
            columns = [
                pa.array([standing[field.name]] * len(batch), field.type)
                if field.name in standing
                else batch[field.name]
                for field in STANDING_SCHEMA
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=STANDING_SCHEMA)

    with pq.ParquetFile(path) as file:
        write_whole(rows(file), path.with_suffix(".known"), STANDING_SCHEMA)
    pq.write_table(EXCEPTION_SCHEMA.empty_table(), path.with_suffix(".stated"))


def key(number: int) -> str:
    """Return the key of an object. Its length is typical for a data lake."""
    return f"data/year=2025/part-{number:012d}-{number * 2654435761 % (1 << 64):016x}.parquet"
