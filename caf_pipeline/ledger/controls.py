"""The operator's orders: pause, bandwidth and spend cap, for all runs on all machines."""

from typing import Final

from sqlalchemy import bindparam, delete, func, select
from sqlalchemy.dialects.postgresql import insert

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import CafError, UsageError
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import OperatorControls, chunk_lease
from caf_pipeline.ledger.tables import ORDERS

_LEAST: Final = {"bandwidth": 0, "spend_cap": -1}

_MOST: Final = 10**18 - 1  # limit of the table

_SENDING: Final = [ChunkState.UPLOADING, ChunkState.DAMAGED]

_UNVERIFIED: Final = "unverified"  # a restored backup without a hash

_VALUE: Final = select(ORDERS.c.value).where(ORDERS.c.name == bindparam("name"))
_ORDER: Final = insert(ORDERS)
_GIVE: Final = _ORDER.on_conflict_do_update(
    index_elements=[ORDERS.c.name], set_={"value": _ORDER.excluded.value, "ordered_at": func.now()}
)


class Controls(LedgerPart):
    """Keeps the operator's orders. Runs obey them within seconds. Safe in threads."""

    def current(self) -> OperatorControls:
        (row,) = self._rows(query("operator_controls"), prefix=chunk_lease(""), states=_SENDING)
        orders = row.orders
        return OperatorControls(
            paused=orders.get("paused", "") or orders.get(_UNVERIFIED, ""),
            bandwidth=int(orders["bandwidth"]) if "bandwidth" in orders else None,
            spend_cap=int(orders["spend_cap"]) if "spend_cap" in orders else None,
            uploads=max(1, row.uploads),
        )

    def set(self, name: str, value: str | None) -> None:
        """Set "paused" (to the reason), "bandwidth" or "spend_cap". None removes the order."""
        if name != "paused" and name not in _LEAST:
            raise UsageError(f"'{name}' is not an order", hint=f"set paused, {', '.join(_LEAST)}")
        if value is None:
            if name == "paused" and (unverified := self.unverified()):
                raise CafError(
                    f"the pause cannot end yet: {unverified}",
                    hint="run 'caf doctor' for all sources: if it finds that the ledger fits the "
                    "store, the pause may end. Otherwise restore another backup, or set an empty "
                    "database and run 'caf rebuild'",
                )
            self._execute(delete(ORDERS).where(ORDERS.c.name == name))
            return
        if name == "paused":
            if not value.strip():
                raise UsageError("a pause needs a reason")
        else:
            try:
                number = int(value)
            except ValueError:
                number = _LEAST[name] - 1
            if not _LEAST[name] <= number <= _MOST:
                raise UsageError(
                    f"{name} cannot be '{value}'",
                    hint=f"give a whole number from {_LEAST[name]} up",
                )
            value = str(number)
        self._execute(_GIVE, name=name, value=value)

    def unverified(self) -> str:
        """Return why the restored ledger must be compared with the store first, or ""."""
        return str(self._scalar(_VALUE, name=_UNVERIFIED) or "")

    def accept(self) -> None:
        """Record that the restored ledger fits the store. The pause goes on."""
        self._execute(delete(ORDERS).where(ORDERS.c.name == _UNVERIFIED))
