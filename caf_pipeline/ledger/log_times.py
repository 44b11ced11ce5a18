"""First and last times of archived logs. A search fetches only objects whose times match."""

from collections.abc import Collection
from typing import Final

from sqlalchemy import Connection, bindparam, delete, update

from caf_pipeline.inventory.manifest import LogTimes
from caf_pipeline.ledger.copy import copy_rows
from caf_pipeline.ledger.tables import CAF_FILES, LOG_TIMES

_COLUMNS: Final = {
    "caf_file_id": "int8",
    "start_byte": "int8",
    "first_ms": "int8",
    "last_ms": "int8",
}
_OF_CHUNK: Final = CAF_FILES.c.caf_file_id == bindparam("id")
_HAS_TIMES: Final = update(CAF_FILES).where(_OF_CHUNK).values(has_log_times=True)
_HAS_NO_TIMES: Final = (
    update(CAF_FILES).where(_OF_CHUNK, CAF_FILES.c.has_log_times).values(has_log_times=False)
)


def record_log_times(
    connection: Connection, caf_file_id: int, logs: Collection[LogTimes] | None
) -> None:
    """Write a chunk's log times. None: its packing did not look for logs."""
    if logs is not None:
        connection.execute(_HAS_TIMES, {"id": caf_file_id})
    if logs:
        copy_rows(connection, "log_times", _COLUMNS, ((caf_file_id, *times) for times in logs))


def forget_log_times(connection: Connection, caf_file_id: int) -> None:
    """Delete the times of a chunk's logs."""
    connection.execute(delete(LOG_TIMES).where(LOG_TIMES.c.caf_file_id == caf_file_id))
    connection.execute(_HAS_NO_TIMES, {"id": caf_file_id})
