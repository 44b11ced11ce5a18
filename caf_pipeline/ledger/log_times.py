"""The times of archived logs, by which a search picks the objects to be fetched: written by a chunk's seal, read by page.

What a chunk has of them its manifest tells.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection

from caf_pipeline.ledger.copy import copy_rows

if TYPE_CHECKING:
    from caf_pipeline.inventory.manifest import LogTimes

_COLUMNS: Final = {"caf_file_id": "int8", "start_byte": "int8", "first_ms": "int8", "last_ms": "int8"}
_TELL: Final = "UPDATE caf_files SET has_log_times = true WHERE caf_file_id = %(caf_file_id)s"


def record_log_times(connection: Connection, caf_file_id: int, logs: "Collection[LogTimes] | None") -> None:
    """Write the times of a chunk's logs; nothing where its packing did not look for any (None)."""
    if logs is not None:
        connection.exec_driver_sql(_TELL, {"caf_file_id": caf_file_id})
    if logs:
        copy_rows(connection, "log_times", _COLUMNS, ((caf_file_id, *one) for one in logs))


def forget_log_times(connection: Connection, caf_file_id: int) -> None:
    """Delete the times of a chunk's logs."""
    connection.exec_driver_sql("DELETE FROM log_times WHERE caf_file_id = %(id)s", {"id": caf_file_id})
    connection.exec_driver_sql(
        "UPDATE caf_files SET has_log_times = false WHERE caf_file_id = %(id)s AND has_log_times", {"id": caf_file_id}
    )
