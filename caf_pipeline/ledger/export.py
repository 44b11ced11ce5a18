"""What the ledger knows of a source's objects, as Parquet for joins with a snapshot: standings, exceptions, locations in full.

Streams by a server-side cursor in batches: memory does not grow with the number of objects. A binary cursor was faster than
COPY, which costs a call a row, and than COPY as CSV read by Arrow.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, text

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
    SELECT file_path, object_version, reason, retry_at <= now() OR reason = 'waiting', last_modified FROM skipped_objects
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
        return self._export("standing", source, path, _STANDING)

    def export_exceptions(self, source: str, path: Path) -> int:
        """Write the exceptions of the source (`inventory.EXCEPTION_SCHEMA`)."""
        return self._export("exceptions", source, path, [(_EXCEPTIONS, {})])

    def export_located(self, source: str, path: Path) -> int:
        """Write every location of the source in chunks in good standing (`inventory.LOCATED_SCHEMA`).

        Rows come as they lie in the table, where those of a chunk lie together.
        """
        return self._export("located", source, path, [(_LOCATIONS, {})])

    def _export(self, what: str, source: str, path: Path, queries: Iterable[tuple[str, Mapping[str, Any]]]) -> int:
        from caf_pipeline.ledger.arrow import write_export  # noqa: PLC0415 - a look-up needs no pyarrow

        with self._database.transaction() as connection:
            # One snapshot for all queries: an object that becomes located meanwhile would be missing from both.
            connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
            # All rows are wanted, in any order; by default a cursor is planned for its first rows, by index.
            connection.execute(text("SET LOCAL cursor_tuple_fraction = 1.0"))
            source_id = source_id_of(connection, source)
            fetched = ((same, rows) for query, same in queries for rows in _fetched(connection, query, source_id))
            return write_export(what, path, fetched)


def _fetched(connection: Connection, query: str, source_id: int) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the rows of a query, some at once."""
    with driver_connection(connection).cursor("export", binary=True) as cursor:
        cursor.execute(query, {"source_id": source_id, "good": GOOD})
        while rows := cursor.fetchmany(BATCH_ROWS):
            yield rows
