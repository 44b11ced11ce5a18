"""The last reading of the space that each account bought, and of its coins."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.records import StoragePlanRow

# An older reading changes nothing.
_RECORD: Final = """
    INSERT INTO storage_plans AS old (account, read_at, balance, space_bytes, used_bytes, ends_at, latest_end, latest_end_space)
    VALUES (%(account)s, %(read_at)s, %(balance)s, %(space_bytes)s, %(used_bytes)s, %(ends_at)s, %(ends_at)s, %(space_bytes)s)
    ON CONFLICT (account) DO UPDATE SET read_at = excluded.read_at, balance = excluded.balance,
        space_bytes = excluded.space_bytes, used_bytes = excluded.used_bytes, ends_at = excluded.ends_at,
        latest_end = CASE WHEN %(bought)s THEN excluded.ends_at ELSE greatest(old.latest_end, excluded.ends_at) END,
        latest_end_space = CASE WHEN NOT %(bought)s AND old.latest_end > coalesce(excluded.ends_at, '-infinity')
            THEN old.latest_end_space ELSE excluded.space_bytes END
    WHERE old.read_at <= excluded.read_at
    """
_READ: Final = (
    "SELECT account, read_at, balance, space_bytes, used_bytes, ends_at, latest_end, latest_end_space"
    " FROM storage_plans ORDER BY account"
)


class StoragePlans(LedgerPart):
    """The last reading of each account's plan and balance."""

    def record(
        self,
        account: str,
        *,
        read_at: datetime,
        balance: int,
        plan: tuple[int, int, datetime] | None,
        bought: bool = False,
    ) -> None:
        """Record a reading: bytes of space, bytes used, end. `bought`: a purchase of this ledger has just set the end."""
        space_bytes, used_bytes, ends_at = plan or (None, None, None)
        values = {"space_bytes": space_bytes, "used_bytes": used_bytes, "ends_at": ends_at}
        facts = {"account": account, "read_at": read_at, "balance": balance, "bought": bought, **values}
        with self._engine.begin() as connection:
            connection.exec_driver_sql(_RECORD, facts)

    def list(self) -> Sequence[StoragePlanRow]:
        """Return the last reading of each account."""
        with self._engine.begin() as connection:
            return [StoragePlanRow(**row._asdict()) for row in connection.exec_driver_sql(_READ)]
