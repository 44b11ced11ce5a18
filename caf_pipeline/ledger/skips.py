"""Skips: objects that are not archived, with the reason and the time from which a plan may have
them again.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime

from caf_pipeline.ledger.copy import end_skips, record_skips, record_waiting, waiting_since
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.records import Skip


class Skips(LedgerPart):
    """Writes skips that belong to no chunk."""

    def record(self, source: str, skips: Iterable[Skip]) -> None:
        """Write skips that belong to no chunk; a skip of the same object replaces the older one."""
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
        """Let skips no longer count, of objects that a whole inventory did not list; one that is
        listed again is planned again.

        Args:
            source: of the objects.
            skips: key, encoded where it is unsupported, and object version.
            listed_at: when the inventory was taken.
            silent_from: what was modified from then on the inventory may lack; it stays as it is.
        """
        with self._of_source(source) as (connection, source_id):
            end_skips(connection, source_id, skips, listed_at=listed_at, silent_from=silent_from)

    def record_waiting(
        self, source: str, skips: Iterable[Skip], until: datetime | None, *, whole: bool
    ) -> None:
        """Write which objects wait for the next plan, as skips of reason `waiting`.

        Args:
            source: of the objects.
            skips: those that wait.
            until: the sensor finds them as new from then on; None where none wait.
            whole: what the source has was planned, so that no other object of it waits any more.
        """
        with self._of_source(source) as (connection, source_id):
            record_waiting(connection, source_id, skips, until, whole=whole)

    def waiting_since(self, source: str, skips: Iterable[Skip]) -> datetime | None:
        """Return when the first of these objects began to wait that waits already; None where none
        does.
        """
        with self._of_source(source) as (connection, source_id):
            return waiting_since(connection, source_id, skips)
