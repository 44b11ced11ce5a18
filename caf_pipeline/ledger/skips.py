"""Skips: objects that are not archived, the reason, and when a plan may take them again."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from sqlalchemy import bindparam, delete, exists, func

from caf_pipeline.ledger.copy import load_skips, record_skips, same_object
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import Skip
from caf_pipeline.ledger.tables import CLAIMS, SKIPPED_OBJECTS

# Skips of claimed objects stay until the chunk is located. If it skips them again, the earlier
# skips count.
_END_OLD_WAITING: Final = delete(SKIPPED_OBJECTS).where(
    SKIPPED_OBJECTS.c.source_id == bindparam("source_id"),
    SKIPPED_OBJECTS.c.reason == "waiting",
    SKIPPED_OBJECTS.c.last_at < func.now(),
    ~exists().where(same_object(CLAIMS, SKIPPED_OBJECTS)),
)


class Skips(LedgerPart):
    """Writes skips that belong to no chunk."""

    def record(self, source: str, skips: Iterable[Skip]) -> None:
        """A skip of the same object is replaced."""
        with self._of_source(source) as (connection, source_id):
            record_skips(connection, source_id, None, skips)

    def end(
        self,
        source: str,
        skips: Sequence[tuple[str, str]],
        *,
        listed_at: datetime,
        silent_from: datetime,
    ) -> None:
        """End skips of objects that a whole inventory did not list. Listed again, they are planned.

        `skips` are recorded keys and object versions. Skips of objects modified from `silent_from`
        on stay:
        the inventory may lack them.
        """
        with self._of_source(source) as (connection, source_id):
            values = {
                "source_id": source_id,
                "keys": [key for key, _ in skips],
                "versions": [version for _, version in skips],
                "listed_at": listed_at,
                "silent_from": silent_from,
            }
            connection.exec_driver_sql(query("end_skips"), values)

    def record_waiting(
        self, source: str, skips: Iterable[Skip], until: datetime | None, *, whole: bool
    ) -> None:
        """Write objects that wait for the next plan, as skips of reason `waiting`.

        The sensor takes them as new at `until`. If `whole`, no other object of the source waits.
        """
        with self._of_source(source) as (connection, source_id):
            values = {"source_id": source_id}
            if load_skips(connection, skips):
                connection.exec_driver_sql(query("record_waiting"), {**values, "until": until})
            if whole:
                connection.execute(_END_OLD_WAITING, values)

    def waiting_since(self, source: str, skips: Iterable[Skip]) -> datetime | None:
        with self._of_source(source) as (connection, source_id):
            load_skips(connection, skips)
            since: datetime | None = connection.exec_driver_sql(
                query("waiting_since"), {"source_id": source_id}
            ).scalar_one()
        return since
