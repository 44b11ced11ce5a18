"""The times of archived logs, by which a search picks the objects to be fetched: written by a chunk's seal, read by page.

What a chunk has of them its manifest tells.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from caf_pipeline.ledger.copy import copy_rows
from caf_pipeline.ledger.database import Connection, LedgerPart

if TYPE_CHECKING:
    from caf_pipeline.inventory.manifest import LogTimes
    from caf_pipeline.ledger.records import Location

_COLUMNS: Final = {"caf_file_id": "int8", "start_byte": "int8", "first_ms": "int8", "last_ms": "int8"}
_TELL: Final = "UPDATE caf_files SET has_log_times = true WHERE caf_file_id = %(caf_file_id)s"
# LATERAL with LIMIT: one look-up an object, whatever the planner knows of the table.
_TOLD: Final = """
    SELECT asked.number, first_ms, last_ms
    FROM unnest(%(chunks)s::text[], %(starts)s::bigint[]) WITH ORDINALITY AS asked (chunk, start_byte, number)
    CROSS JOIN LATERAL (SELECT caf_file_id FROM caf_files WHERE name = asked.chunk LIMIT 1) AS chunk
    CROSS JOIN LATERAL (SELECT first_ms, last_ms FROM log_times
        WHERE caf_file_id = chunk.caf_file_id AND start_byte = asked.start_byte LIMIT 1) AS told
"""


def record_log_times(connection: Connection, caf_file_id: int, logs: "Collection[LogTimes] | None") -> None:
    """Write the times of a chunk's logs; nothing where its packing did not look for any (None)."""
    if logs is not None:
        connection.execute(_TELL, {"caf_file_id": caf_file_id})
    if logs:
        copy_rows(connection, "log_times", _COLUMNS, ((caf_file_id, *one) for one in logs))


def forget_log_times(connection: Connection, caf_file_id: int) -> None:
    """Delete the times of a chunk's logs."""
    connection.execute("DELETE FROM log_times WHERE caf_file_id = %(id)s", {"id": caf_file_id})
    connection.execute(
        "UPDATE caf_files SET has_log_times = false WHERE caf_file_id = %(id)s AND has_log_times", {"id": caf_file_id}
    )


class ArchivedLogs(LedgerPart):
    """Which objects are logs."""

    def chunks_with_log_times(self, chunks: Collection[str]) -> Collection[str]:
        """Return those of these chunks whose packing looked for logs."""
        with self._database.reading() as connection:
            statement = "SELECT name FROM caf_files WHERE name = ANY(%(chunks)s) AND has_log_times"
            return {name for (name,) in connection.execute(statement, {"chunks": list(chunks)})}

    def log_times(self, locations: "Sequence[Location]") -> "Mapping[int, tuple[int | None, int | None]]":
        """Return, by their number in `locations`, of those that are logs the first and the last time (None: not told)."""
        chunks, starts = [one.chunk for one in locations], [one.row.start_byte for one in locations]
        with self._database.reading() as connection:
            rows = connection.execute(_TOLD, {"chunks": chunks, "starts": starts}).fetchall()
        # An empty object begins where the next one does.
        return {number - 1: (first_ms, last_ms) for number, first_ms, last_ms in rows if locations[number - 1].size_bytes}
