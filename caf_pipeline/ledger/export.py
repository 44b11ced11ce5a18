"""What the ledger knows of a source's objects, as Parquet for joins with a snapshot: standings, exceptions, locations in full.

Streams by a server-side cursor in batches: memory does not grow with the number of objects. A binary cursor was faster than
COPY, which costs a call a row, and than COPY as CSV read by Arrow.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection

from caf_pipeline.chunk_state import GOOD
from caf_pipeline.ledger.engine import LedgerPart, driver_connection, source_id_of

BATCH_ROWS: Final = 50_000

# Each query gives the columns of its schema in order, without those that have one value in all rows.
_LOCATED: Final = """
    SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified
    FROM file_locations JOIN chunks USING (caf_file_id)
    WHERE file_locations.source_id = %(source_id)s AND part = 0 AND state = ANY(%(good)s)
"""
# Few, and none of them is ever kept: which parts are located changes with any of their chunks.
_LOCATED_IN_PARTS: Final = """
    SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified
    FROM objects_in_parts WHERE source_id = %(source_id)s
"""
_KEPT: Final = """
    SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified, caf_file_id
    FROM file_locations
    WHERE source_id = %(source_id)s AND part = 0 AND caf_file_id = ANY(%(chunks)s)
"""
# Reads the table and no key of it: a tenth of what an export takes.
_CHUNKS: Final = """
    WITH counted AS (SELECT caf_file_id, count(*) AS rows FROM file_locations WHERE source_id = %(source_id)s AND part = 0
        GROUP BY caf_file_id)
    SELECT caf_file_id, name, located_at, rows FROM chunks JOIN counted USING (caf_file_id) WHERE state = ANY(%(good)s)
"""
_CLAIMED: Final = """
    SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified
    FROM claims WHERE source_id = %(source_id)s
"""
_SKIPPED: Final = """
    SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), reason,
        retry_at <= now() OR reason = 'waiting', last_modified
    FROM skipped_objects
    WHERE source_id = %(source_id)s
"""
_NO_SKIP: Final = {"reason": None, "due": False}
_LOCATED_ROW: Final = {"standing": "located", **_NO_SKIP}

_Queries = Sequence[tuple[str, Mapping[str, Any]]]
"""Each with the values of the columns that it does not give."""

_NOT_KEPT: Final[_Queries] = (
    (_CLAIMED, {"standing": "claimed", **_NO_SKIP}),
    (_SKIPPED, {"standing": "skipped"}),
    (_LOCATED_IN_PARTS, _LOCATED_ROW),
)
_STANDING: Final[_Queries] = ((_LOCATED, _LOCATED_ROW), *_NOT_KEPT)
_LOCATIONS: Final = """
    SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), part, caf_file_id, start_byte, end_byte,
        nullif(version_id, ''), etag, sha256,
        last_modified, crc64nvme, s3_checksum, header_sets.header_set
    FROM file_locations JOIN chunks USING (caf_file_id) LEFT JOIN header_sets USING (header_set)
    WHERE file_locations.source_id = %(source_id)s AND part = 0 AND state = ANY(%(good)s)
"""
_PARTS: Final = """
    SELECT located.file_path, object_version(located.version_id, located.etag, located.size_bytes, located.rewritten_at),
        own.part, own.part_count, located.caf_file_id, located.start_byte, located.end_byte, nullif(located.version_id, ''),
        located.etag, located.sha256, located.last_modified, located.crc64nvme, located.s3_checksum, header_sets.header_set
    FROM objects_in_parts AS whole JOIN object_parts AS own ON own.plan_id = whole.plan_id AND own.file_path = whole.file_path
        AND own.version_id = whole.version_id AND own.etag = whole.etag AND own.object_bytes = whole.size_bytes
        AND own.rewritten_at = whole.rewritten_at
    CROSS JOIN LATERAL (
        SELECT * FROM file_locations AS rows
        WHERE rows.source_id = own.source_id AND rows.file_path = own.file_path AND rows.version_id = own.version_id
            AND rows.etag = own.etag AND rows.size_bytes = own.object_bytes AND rows.rewritten_at = own.rewritten_at
            AND rows.part = own.location_part LIMIT 1) AS located
    LEFT JOIN header_sets ON header_sets.header_set = located.header_set
    WHERE whole.source_id = %(source_id)s
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

    def export_changes(self, source: str, folder: Path, kept: Path) -> None:
        """Make a folder of files that together are what `export_standing` writes.

        Args:
            source: which.
            folder: is made; removing it is the caller's.
            kept: where the files are kept that the next call needs not export again (`kept`).

        Raises:
            StagingError: there is no room. IntegrityError: a kept file was damaged while it was in use: call again.
        """
        from caf_pipeline.ledger.kept import open_kept  # noqa: PLC0415 - a look-up needs no pyarrow

        folder.mkdir()
        exported = folder / "exported"
        with open_kept(kept) as locations:
            with self._one_moment(source) as (connection, source_id):
                chunks = _chunks(connection, source_id)
                missing = locations.missing(chunks)
                # "0" comes first of the names that are hashes: its columns are those of all.
                self._write("standing", connection, source_id, folder / "0.parquet", _NOT_KEPT)
                self._write("kept", connection, source_id, exported, [(_KEPT, _LOCATED_ROW)] if missing else [], chunks=missing)
            locations.add(exported, missing, chunks)
            locations.link_into(folder)
        exported.unlink()

    def compare_kept(self, source: str, folder: Path, kept: Path) -> int:
        """Compare all that is kept of chunks in good standing with the database, row by row; return how many rows differ.

        `folder` takes a temporary file. Raises as `export_changes`.
        """
        from caf_pipeline.ledger.kept import open_kept  # noqa: PLC0415 - as above

        exported = folder / "exported"
        with open_kept(kept) as locations:
            with self._one_moment(source) as (connection, source_id):
                chunks = _chunks(connection, source_id)
                here = sorted(chunks.keys() - locations.missing(chunks))
                self._write("kept", connection, source_id, exported, [(_KEPT, _LOCATED_ROW)], chunks=here)
            return locations.count_differing(exported)

    def export_exceptions(self, source: str, path: Path) -> int:
        """Write the exceptions of the source (`inventory.EXCEPTION_SCHEMA`)."""
        return self._export("exceptions", source, path, [(_EXCEPTIONS, {})])

    def export_located(self, source: str, path: Path) -> int:
        """Write every location of the source in chunks in good standing (`inventory.LOCATED_SCHEMA`).

        Rows come as they lie in the table, where those of a chunk lie together. Of an object in parts all are there, or none.
        """
        return self._export("located", source, path, [(_LOCATIONS, {"part_count": 0}), (_PARTS, {})])

    def _export(self, what: str, source: str, path: Path, queries: _Queries) -> int:
        with self._one_moment(source) as (connection, source_id):
            return self._write(what, connection, source_id, path, queries)

    @contextmanager
    def _one_moment(self, source: str) -> Iterator[tuple[Connection, int]]:
        """Begin a read-only transaction whose queries all see the same snapshot of the database; yield it with the source's id.

        Two queries that saw two moments would both miss a chunk that became located between them.
        """
        with self._engine.begin() as connection:
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            # All rows are wanted, in any order; by default a cursor is planned for its first rows, by index.
            connection.exec_driver_sql("SET LOCAL cursor_tuple_fraction = 1.0")
            yield connection, source_id_of(connection, source)

    @staticmethod
    def _write(
        what: str, connection: Connection, source_id: int, path: Path, queries: _Queries, *, chunks: Sequence[int] = ()
    ) -> int:
        from caf_pipeline.ledger.arrow import write_export  # noqa: PLC0415 - a look-up needs no pyarrow

        values = {"source_id": source_id, "good": GOOD, "chunks": list(chunks)}
        return write_export(what, path, ((same, rows) for query, same in queries for rows in _fetched(connection, query, values)))


def _chunks(connection: Connection, source_id: int) -> dict[int, tuple[str, int]]:
    """Return the chunks in good standing that have locations, as `kept` wants them."""
    found = connection.exec_driver_sql(_CHUNKS, {"source_id": source_id, "good": GOOD})
    return {caf_file_id: (f"{name} {located_at}", rows) for caf_file_id, name, located_at, rows in found}


def _fetched(connection: Connection, query: str, values: Mapping[str, Any]) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the rows of a query, some at once."""
    with driver_connection(connection).cursor("export", binary=True) as cursor:
        cursor.execute(query, values)
        while rows := cursor.fetchmany(BATCH_ROWS):
            yield rows
