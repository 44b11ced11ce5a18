"""The last reading of each account's space and coins."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from sqlalchemy import exists, select

from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import StoragePlanRow
from caf_pipeline.ledger.tables import STORAGE_PLANS, TRANSACTIONS

_ROWS: Final = select(
    STORAGE_PLANS,
    exists()
    .where(
        TRANSACTIONS.c.account == STORAGE_PLANS.c.account,
        TRANSACTIONS.c.purpose == "buy",
        TRANSACTIONS.c.outcome.is_(None),
    )
    .label("purchase_pending"),
).order_by(STORAGE_PLANS.c.account)


class StoragePlans(LedgerPart):
    """The last reading of each account's plan and balance."""

    def record(
        self,
        account: str,
        *,
        read_at: datetime,
        balance: int,
        plan: tuple[int, int, datetime] | None,
        starts_at: datetime | None = None,
        bought: bool = False,
    ) -> None:
        """`plan`: bytes of space, bytes used, end. `bought`: our purchase has just set the end."""
        space_bytes, used_bytes, ends_at = plan or (None, None, None)
        self._execute(
            query("record_storage_plan"),
            account=account,
            read_at=read_at,
            balance=balance,
            bought=bought,
            space_bytes=space_bytes,
            used_bytes=used_bytes,
            starts_at=starts_at,
            ends_at=ends_at,
        )

    def list(self) -> Sequence[StoragePlanRow]:
        return [StoragePlanRow(**row._asdict()) for row in self._rows(_ROWS)]

    def last(self, account: str) -> StoragePlanRow | None:
        """Return the last reading of one account."""
        return next((row for row in self.list() if row.account == account), None)
