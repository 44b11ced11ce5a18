"""What the ledger knows of a source's objects, as one Parquet file for joins with a snapshot.

Streams by COPY in batches: memory does not grow with the number of objects. Not here: the joins (`inventory`).
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection, text

from caf_pipeline.database import driver_connection
from caf_pipeline.errors import StagingError
from caf_pipeline.inventory import STANDING_SCHEMA
from caf_pipeline.lifecycle import IN_GOOD_STANDING

BATCH_ROWS: Final = 50_000

_GOOD: Final = ", ".join(f"'{state}'" for state in sorted(IN_GOOD_STANDING))

# COPY takes no parameters; all that is put in here are a number and the names of states.
_LOCATED: Final = (
    "SELECT file_path, object_version FROM file_locations JOIN caf_files USING (caf_file_id)"
    " WHERE file_locations.source_id = {source_id} AND part = 0 AND state IN ({good})"
)
_CLAIMED: Final = "SELECT file_path, object_version FROM claims WHERE source_id = {source_id}"
_SKIPPED: Final = "SELECT file_path, object_version, reason, retry_at <= now() FROM skipped_objects WHERE source_id = {source_id}"


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
    part = path.with_name(path.name + ".part")
    count = 0
    try:
        with closing(pq.ParquetWriter(part, STANDING_SCHEMA, compression="zstd")) as writer:
            for batch in _batches(connection, source_id):
                writer.write_batch(batch)
                count += batch.num_rows
        part.replace(path)
    except OSError as error:
        raise StagingError(f"{path} cannot be written: {error.strerror or error}", hint="make room on that disk") from error
    finally:
        part.unlink(missing_ok=True)
    return count


def _batches(connection: Connection, source_id: int) -> Iterator[pa.RecordBatch]:
    for standing, query, types in (
        ("located", _LOCATED, ["text", "text"]),
        ("claimed", _CLAIMED, ["text", "text"]),
        ("skipped", _SKIPPED, ["text", "text", "text", "bool"]),
    ):
        for rows in _copied(connection, query.format(source_id=int(source_id), good=_GOOD), types):
            columns = list(zip(*rows, strict=True))
            count = len(rows)
            reasons, due = (columns[2], columns[3]) if standing == "skipped" else ((None,) * count, (False,) * count)
            yield pa.record_batch(
                [
                    pa.array(columns[0], pa.string()).cast(pa.binary()),
                    pa.array(columns[1], pa.string()),
                    pa.repeat(standing, count),
                    pa.array(reasons, pa.string()),
                    pa.array(due, pa.bool_()),
                ],
                schema=STANDING_SCHEMA,
            )


def _copied(connection: Connection, query: str, types: Sequence[str]) -> Iterator[list[tuple[Any, ...]]]:
    statement = f"COPY ({query}) TO STDOUT (FORMAT binary)"
    with driver_connection(connection).cursor() as cursor, cursor.copy(statement) as copy:
        copy.set_types(types)
        rows = copy.rows()
        while batch := list(islice(rows, BATCH_ROWS)):
            yield batch
