"""Waits of live runs, visible to every process."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Final

from sqlalchemy import and_, bindparam, delete, func, insert, or_, select

from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.processes import is_alive
from caf_pipeline.ledger.records import Holder, RunWait
from caf_pipeline.ledger.tables import WAITS
from caf_pipeline.waits import RENEW_SECONDS, Wait

# A later writer removes rows of killed processes.
_REMOVE: Final = delete(WAITS).where(
    or_(
        and_(
            WAITS.c.run == bindparam("run"),
            WAITS.c.boot_id == bindparam("boot_id"),
            WAITS.c.pid == bindparam("pid"),
            WAITS.c.process_started == bindparam("process_started"),
            WAITS.c.source == bindparam("source"),
        ),
        WAITS.c.expires_at < func.clock_timestamp() - timedelta(days=1),
    )
)
_INSERT: Final = insert(WAITS).values(
    expires_at=func.clock_timestamp() + timedelta(seconds=3 * RENEW_SECONDS)
)
"""Two renewals may fail in a row."""

_LIVE: Final = (
    select(WAITS)
    .where(WAITS.c.expires_at > func.clock_timestamp())
    .order_by(WAITS.c.source, WAITS.c.since, WAITS.c.chunk, WAITS.c.what)
)


class RunWaits(LedgerPart):
    """Records and lists waits."""

    def record(self, holder: Holder, source: str, waits: Sequence[Wait]) -> None:
        """Replace the waits that this process wrote for the run and source.

        Call it again within 30 s.
        """
        columns = {**asdict(holder), "source": source}
        with self._engine.begin() as connection:
            connection.execute(_REMOVE, columns)
            for wait in waits:
                connection.execute(_INSERT, {**columns, **asdict(wait)})

    def list(self) -> Sequence[RunWait]:
        """By source and beginning, without dead processes of this machine."""
        return [
            RunWait(row.source, row.run, Wait(row.what, row.ends_by, row.since, row.chunk))
            for row in self._rows(_LIVE)
            if is_alive(row.boot_id, row.pid, row.process_started) is not False
        ]
