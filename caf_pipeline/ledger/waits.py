"""What live runs wait for, as rows of the ledger that every process sees."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.processes import is_alive
from caf_pipeline.ledger.records import Holder, RunWait
from caf_pipeline.waits import RENEW_SECONDS, Wait

_LIVE_SECONDS: Final = 3 * RENEW_SECONDS  # two renewals may fail in a row

_MINE: Final = (
    "run = %(run)s AND boot_id = %(boot_id)s AND pid = %(pid)s AND process_started = %(process_started)s AND source = %(source)s"
)
# Rows that processes left when they were killed are removed by whoever writes next.
_REMOVE = f"DELETE FROM waits WHERE ({_MINE}) OR expires_at < clock_timestamp() - interval '1 day'"
_INSERT = (
    "INSERT INTO waits (run, boot_id, pid, process_started, source, chunk, what, ends_by, since, expires_at)"
    " VALUES (%(run)s, %(boot_id)s, %(pid)s, %(process_started)s, %(source)s, %(chunk)s, %(what)s, %(ends_by)s, %(since)s,"
    " clock_timestamp() + make_interval(secs => %(seconds)s))"
)
_LIVE = (
    "SELECT run, boot_id, pid, process_started, source, chunk, what, ends_by, since FROM waits"
    " WHERE expires_at > clock_timestamp() ORDER BY source, since, chunk, what"
)


class RunWaits(LedgerPart):
    """What runs wait for."""

    def record(self, holder: Holder, source: str, waits: Sequence[Wait]) -> None:
        """Put these waits in place of those that this process wrote for the run and source before.

        To be repeated within 30 s while it waits.
        """
        mine = {**asdict(holder), "source": source}
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_REMOVE, mine)
            for wait in waits:
                connection.exec_driver_sql(_INSERT, {**mine, **asdict(wait), "seconds": _LIVE_SECONDS})

    def list(self) -> Sequence[RunWait]:
        """Return what live runs wait for, by source and beginning. What a dead process of this machine waited for is left out."""
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(_LIVE).fetchall()
        return [
            RunWait(row.source, row.run, Wait(row.what, row.ends_by, row.since, row.chunk))
            for row in rows
            if is_alive(row.boot_id, row.pid, row.process_started) is not False
        ]
