"""What the ledger knows of a source's objects, as Parquet for joins with a snapshot: standings, exceptions, locations in full.

Streams by a server-side cursor in batches: memory does not grow with the number of objects. A binary cursor was faster than
COPY, which costs a call a row, and than COPY as CSV read by Arrow.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection, text

from caf_pipeline.errors import StagingError
from caf_pipeline.inventory.snapshot import EXCEPTION_SCHEMA, LOCATED_SCHEMA, STANDING_SCHEMA
from caf_pipeline.ledger.copy import GOOD
from caf_pipeline.ledger.database import LedgerPart, driver_connection, source_id_of

BATCH_ROWS: Final = 50_000

# Each query gives the columns of its schema in order, without those that have one value in all rows.
_LOCATED: Final = """
    SELECT file_path, object_version, last_modified FROM file_locations JOIN caf_files USING (caf_file_id)
    WHERE file_locations.source_id = %(source_id)s AND part = 0 AND state = ANY(%(good)s)
"""
_CLAIMED: Final = "SELECT file_path, object_version, last_modified FROM claims WHERE source_id = %(source_id)s"
_SKIPPED: Final = """
    SELECT file_path, object_version, reason, retry_at <= now(), last_modified FROM skipped_objects
    WHERE source_id = %(source_id)s
"""
_NO_SKIP: Final = {"reason": None, "due": False}
_STANDING: Final = (
    (_LOCATED, {"standing": "located", **_NO_SKIP}),
    (_CLAIMED, {"standing": "claimed", **_NO_SKIP}),
    (_SKIPPED, {"standing": "skipped"}),
)
_LOCATIONS: Final = """
    SELECT file_path, object_version, part, caf_file_id, start_byte, end_byte, version_id, etag, sha256,
        last_modified
    FROM file_locations JOIN caf_files USING (caf_file_id)
    WHERE file_locations.source_id = %(source_id)s AND state = ANY(%(good)s)
"""
_EXCEPTIONS: Final = """
    SELECT file_path, stated_at, object_version, last_modified FROM current_exceptions WHERE source_id = %(source_id)s
"""


class Exports(LedgerPart):
    """What is known of a source's objects, as Parquet. A file appears when it is complete, in place of an older one.

    Each method returns the rows written, has constant memory, and raises StagingError where the file cannot be written.
    """

    def export_standing(self, source: str, path: Path) -> int:
        """Write what is known of the source's objects at one moment (`inventory.STANDING_SCHEMA`).

        An object may have several rows, e.g. skipped by one chunk and claimed by the next.
        """
        return self._export(source, path, STANDING_SCHEMA, _STANDING, dictionaries=["standing", "reason"])

    def export_exceptions(self, source: str, path: Path) -> int:
        """Write the exceptions of the source (`inventory.EXCEPTION_SCHEMA`)."""
        return self._export(source, path, EXCEPTION_SCHEMA, [(_EXCEPTIONS, {})], dictionaries=["object_version"])

    def export_located(self, source: str, path: Path) -> int:
        """Write every location of the source in chunks in good standing (`inventory.LOCATED_SCHEMA`).

        Rows come as they lie in the table, where those of a chunk lie together.
        """
        return self._export(source, path, LOCATED_SCHEMA, [(_LOCATIONS, {})], dictionaries=["object_version"])

    def _export(
        self,
        source: str,
        path: Path,
        schema: pa.Schema,
        queries: Iterable[tuple[str, Mapping[str, Any]]],
        *,
        dictionaries: list[str],
    ) -> int:
        with self._database.transaction() as connection:
            # One snapshot for all queries: an object that becomes located meanwhile would be missing from both.
            connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
            # All rows are wanted, in any order; by default a cursor is planned for its first rows, by index.
            connection.execute(text("SET LOCAL cursor_tuple_fraction = 1.0"))
            source_id = source_id_of(connection, source)
            batches = (_batches(connection, query, source_id, schema, same) for query, same in queries)
            return _write(chain.from_iterable(batches), path, schema, dictionaries)


def _batches(
    connection: Connection, query: str, source_id: int, schema: pa.Schema, same: Mapping[str, Any]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a query; `same` has the columns that it does not give."""
    with driver_connection(connection).cursor("export", binary=True) as cursor:
        cursor.execute(query, {"source_id": source_id, "good": GOOD})
        while rows := cursor.fetchmany(BATCH_ROWS):
            given = zip(*rows, strict=True)
            columns = [
                pa.repeat(pa.scalar(same[field.name], field.type), len(rows))
                if field.name in same
                else pa.array(next(given), field.type)
                for field in schema
            ]
            yield pa.record_batch(columns, schema=schema)


def _write(batches: Iterable[pa.RecordBatch], path: Path, schema: pa.Schema, dictionaries: list[str]) -> int:
    # No `WholeFile`: the run that asked reads it and no later one, so that nothing waits until gigabytes are on the disk.
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
