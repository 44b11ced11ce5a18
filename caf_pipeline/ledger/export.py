"""What the ledger knows of a source's objects, as Parquet for joins with a snapshot: standings, and locations in full.

Streams by a server-side cursor in batches: memory does not grow with the number of objects. A binary cursor was faster than
COPY, which costs a call a row, and than COPY as CSV read by Arrow.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection, text

from caf_pipeline.chunk_state import IN_GOOD_STANDING
from caf_pipeline.errors import StagingError
from caf_pipeline.inventory.snapshot import EXCEPTION_SCHEMA, LOCATED_SCHEMA, STANDING_SCHEMA
from caf_pipeline.ledger.current_content import exception_batches
from caf_pipeline.ledger.database import driver_connection

BATCH_ROWS: Final = 50_000
GOOD: Final = sorted(IN_GOOD_STANDING)

_LOCATED: Final = """
    SELECT file_path, object_version, last_modified FROM file_locations JOIN caf_files USING (caf_file_id)
    WHERE file_locations.source_id = %(source_id)s AND part = 0 AND state = ANY(%(good)s)
"""
_LOCATIONS: Final = """
    SELECT file_path, object_version, part, caf_file_id, start_byte, end_byte, version_id, etag, sha256,
        last_modified
    FROM file_locations JOIN caf_files USING (caf_file_id)
    WHERE file_locations.source_id = %(source_id)s AND state = ANY(%(good)s)
"""
_CLAIMED: Final = "SELECT file_path, object_version, last_modified FROM claims WHERE source_id = %(source_id)s"
_SKIPPED: Final = """
    SELECT file_path, object_version, last_modified, reason, retry_at <= now() FROM skipped_objects
    WHERE source_id = %(source_id)s
"""


def write_standing(connection: Connection, source_id: int, path: Path) -> int:
    """Write the standings of one moment to `path`, which appears when it is complete; return the rows written.

    Args:
        connection: at the beginning of a transaction.
        source_id: of the source.
        path: replaced where it exists.

    Raises:
        StagingError: the file cannot be written.
    """
    # One snapshot for all three statements: an object that becomes located meanwhile would be missing from both.
    connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
    return _write(connection, path, STANDING_SCHEMA, _batches(connection, source_id), dictionaries=["standing", "reason"])


def write_located(connection: Connection, source_id: int, path: Path) -> int:
    """Write the locations in chunks in good standing to `path`, as `write_standing` does; return the rows written.

    Rows come as they lie in the table, where those of a chunk lie together.
    """
    connection.execute(text("SET TRANSACTION READ ONLY"))
    return _write(connection, path, LOCATED_SCHEMA, _located_batches(connection, source_id), dictionaries=["object_version"])


def write_exceptions(connection: Connection, source_id: int, path: Path) -> int:
    """Write the exceptions of a source to `path`, as `write_standing` does; return the rows written."""
    connection.execute(text("SET TRANSACTION READ ONLY"))
    batches = exception_batches(connection, source_id, BATCH_ROWS)
    return _write(connection, path, EXCEPTION_SCHEMA, batches, dictionaries=["object_version"])


def _write(
    connection: Connection, path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch], *, dictionaries: list[str]
) -> int:
    """Write the batches, which are not asked for before the transaction is set for a whole read."""
    # All rows are wanted, in any order; by default a cursor is planned for its first rows, by index.
    connection.execute(text("SET LOCAL cursor_tuple_fraction = 1.0"))
    part = path.with_name(path.name + ".part")
    count = 0
    try:
        with closing(pq.ParquetWriter(part, schema, use_dictionary=dictionaries)) as writer:
            for batch in batches:
                writer.write_batch(batch)
                count += batch.num_rows
        part.replace(path)
    except OSError as error:
        raise StagingError(f"{path} cannot be written: {error.strerror or error}", hint="make room on that disk") from error
    finally:
        part.unlink(missing_ok=True)
    return count


def _batches(connection: Connection, source_id: int) -> Iterator[pa.RecordBatch]:
    for standing, query in (("located", _LOCATED), ("claimed", _CLAIMED), ("skipped", _SKIPPED)):
        parameters = {"source_id": source_id, "good": GOOD}
        with driver_connection(connection).cursor(f"standing_{standing}", binary=True) as cursor:
            cursor.execute(query, parameters)
            while rows := cursor.fetchmany(BATCH_ROWS):
                yield _batch(standing, list(zip(*rows, strict=True)))


def _located_batches(connection: Connection, source_id: int) -> Iterator[pa.RecordBatch]:
    with driver_connection(connection).cursor("located", binary=True) as cursor:
        cursor.execute(_LOCATIONS, {"source_id": source_id, "good": GOOD})
        while rows := cursor.fetchmany(BATCH_ROWS):
            keys, *others = zip(*rows, strict=True)
            columns = [pa.array(keys, pa.string()).cast(pa.binary())]
            columns += [pa.array(values, field.type) for values, field in zip(others, list(LOCATED_SCHEMA)[1:], strict=True)]
            yield pa.record_batch(columns, schema=LOCATED_SCHEMA)


def _batch(standing: str, columns: Sequence[Sequence[Any]]) -> pa.RecordBatch:
    """Return rows of (key, object version, last modified) and, of skips, (reason, whether it is due)."""
    keys, versions, times, *skips = columns
    count = len(keys)
    reasons, due = skips or (None, None)
    return pa.record_batch(
        [
            pa.array(keys, pa.string()).cast(pa.binary()),
            pa.array(versions, pa.string()),
            pa.repeat(standing, count),
            pa.nulls(count, pa.string()) if reasons is None else pa.array(reasons, pa.string()),
            pa.repeat(pa.scalar(False), count) if due is None else pa.array(due, pa.bool_()),
            pa.array(times, STANDING_SCHEMA.field("last_modified").type),
        ],
        schema=STANDING_SCHEMA,
    )
