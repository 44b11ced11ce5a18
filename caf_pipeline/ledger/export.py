"""Exports a source's objects as Parquet: standings, exceptions, and full locations.

Objects that are located only by unknown posts count as not located.

Rows stream through a server-side cursor, so memory does not grow with their number. A binary cursor
was faster than COPY, which costs a call a row, and than COPY as CSV read by Arrow.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Text, any_, bindparam, select
from sqlalchemy.dialects.postgresql import ARRAY

from caf_pipeline.chunk_state import GOOD
from caf_pipeline.inventory.key_windows import ALL_KEYS, KeyWindow
from caf_pipeline.ledger.arrow import open_kept, write_export
from caf_pipeline.ledger.engine import LedgerPart, driver_connection, source_id_of
from caf_pipeline.ledger.records import RowSet
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.ledger.tables import CAF_FILES
from caf_pipeline.ledger.views import CHUNKS
from caf_pipeline.waits import Advance, ignore

BATCH_ROWS: Final = 50_000

_CHUNKS: Final = (
    select(CHUNKS.c.caf_file_id, CAF_FILES.c.row_set, CAF_FILES.c.row_count)
    .join_from(CHUNKS, CAF_FILES, CHUNKS.c.caf_file_id == CAF_FILES.c.caf_file_id)
    .where(
        CHUNKS.c.source_id == bindparam("source_id"),
        CHUNKS.c.state == any_(bindparam("good", type_=ARRAY(Text))),
        ~CHUNKS.c.from_unknown_post,
        CAF_FILES.c.row_count > 0,
    )
)

_NO_SKIP: Final = {"reason": None, "due": False}
_LOCATED_ROW: Final = {"standing": "located", **_NO_SKIP}

_Queries = Sequence[tuple[str, Mapping[str, Any]]]
"""Query files, with the values of the columns that their rows lack."""

_NOT_KEPT: Final[_Queries] = (
    ("export_claimed", {"standing": "claimed", **_NO_SKIP}),
    ("export_skipped", {"standing": "skipped"}),
    # Few, and never kept: which objects are located changes with any of their chunks.
    ("export_located_in_parts", _LOCATED_ROW),
)
_STANDING: Final[_Queries] = (("export_located", _LOCATED_ROW), *_NOT_KEPT)
_KEPT: Final[_Queries] = (("export_kept", _LOCATED_ROW),)
_EXCEPTIONS: Final[_Queries] = (("export_exceptions", {}),)
_LOCATIONS: Final[_Queries] = (
    ("export_locations", {"part_count": 0}),
    ("export_part_locations", {}),
)


class Exports(LedgerPart):
    """Writes Parquet files. A file replaces an older file when it is complete.

    Memory is constant. Methods that write one file return its number of rows. They raise
    StagingError if a file cannot be written.
    """

    def standing(self, source: str, path: Path, within: KeyWindow = ALL_KEYS) -> int:
        """An object may have several rows, e.g. skipped by one chunk and claimed by the next.

        The file may also have keys outside of `within`.
        """
        return self._export("standing", source, path, _STANDING, within)

    def changes(self, source: str, folder: Path, kept: Path) -> None:
        """Make a folder of files that together contain the rows of `standing`.

        The caller removes `folder`. Files in `kept` need not be exported again. Raises
        IntegrityError if one was damaged while in use: call again.
        """
        folder.mkdir()
        exported = folder / "exported"
        with open_kept(kept) as locations:
            with self._one_moment(source) as (connection, source_id):
                chunks = _chunks(connection, source_id)
                missing = locations.missing(chunks)
                # "0" sorts before the other names, which are hashes: its columns are those of all
                # files.
                self._write("standing", connection, source_id, folder / "0.parquet", _NOT_KEPT)
                self._write(
                    "kept",
                    connection,
                    source_id,
                    exported,
                    _KEPT if missing else (),
                    chunks=missing,
                )
            locations.add(exported, chunks)
            locations.link_into(folder)
        exported.unlink()

    def compare_kept(self, source: str, folder: Path, kept: Path, advance: Advance = ignore) -> int:
        """Return how many kept rows of chunks in good standing differ."""
        exported = folder / "exported"
        with open_kept(kept) as locations:
            with self._one_moment(source) as (connection, source_id):
                chunks = _chunks(connection, source_id)
                present = sorted(chunks.keys() - locations.missing(chunks))
                self._write(
                    "kept", connection, source_id, exported, _KEPT, chunks=present, advance=advance
                )
            return locations.count_differing(exported)

    def exceptions(self, source: str, path: Path, within: KeyWindow = ALL_KEYS) -> int:
        return self._export("exceptions", source, path, _EXCEPTIONS, within)

    def row_sets(self, source: str) -> Mapping[int, RowSet]:
        """Return the row set of each chunk in good standing that has whole objects."""
        with self._one_moment(source) as (connection, source_id):
            return _chunks(connection, source_id)

    def located(self, source: str, path: Path) -> int:
        """Rows come in any order. An object in parts has all its rows, or none."""
        return self._export("located", source, path, _LOCATIONS)

    def _export(
        self, what: str, source: str, path: Path, queries: _Queries, within: KeyWindow = ALL_KEYS
    ) -> int:
        with self._one_moment(source) as (connection, source_id):
            return self._write(what, connection, source_id, path, queries, within=within)

    @contextmanager
    def _one_moment(self, source: str) -> Iterator[tuple[Connection, int]]:
        """Two queries at two moments would both miss a chunk that was located in between."""
        with self._engine.begin() as connection:
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            # By default a cursor is planned for its first rows, by index. Here all rows are read.
            connection.exec_driver_sql("SET LOCAL cursor_tuple_fraction = 1.0")
            yield connection, source_id_of(connection, source)

    @staticmethod
    def _write(
        what: str,
        connection: Connection,
        source_id: int,
        path: Path,
        queries: _Queries,
        *,
        chunks: Sequence[int] = (),
        advance: Advance = ignore,
        within: KeyWindow = ALL_KEYS,
    ) -> int:
        start, end = _as_texts(within)
        values = {
            "source_id": source_id,
            "good": GOOD,
            "chunks": list(chunks),
            "start": start,
            "end": end,
        }

        def batches() -> Iterator[tuple[Mapping[str, Any], list[tuple[Any, ...]]]]:
            for name, constants in queries:
                with driver_connection(connection).cursor("export", binary=True) as cursor:
                    cursor.execute(query(name), values)
                    while rows := cursor.fetchmany(BATCH_ROWS):
                        yield constants, rows
                        advance(len(rows))

        return write_export(what, path, batches())


def _chunks(connection: Connection, source_id: int) -> dict[int, RowSet]:
    rows = connection.execute(_CHUNKS, {"source_id": source_id, "good": GOOD})
    return {row.caf_file_id: (str(row.row_set), row.row_count) for row in rows}


def _as_texts(within: KeyWindow) -> tuple[str, str | None]:
    """Return the bounds of all texts within a window whose bounds may be any bytes."""
    after, until = within
    end = None if until is None else _text_of(until)
    return _text_of(after or b""), end if end is not None and end.encode() == until else None


def _text_of(key: bytes) -> str:
    """Return the longest beginning that the database can compare."""
    key = key.partition(b"\0")[0]
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        return key[: error.start].decode()
