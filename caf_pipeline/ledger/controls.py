"""What an operator has set in the ledger: pause, bandwidth and spend cap, for all runs on all
machines.
"""

from typing import Final

from sqlalchemy import bindparam, delete, func
from sqlalchemy.dialects.postgresql import insert

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import UsageError
from caf_pipeline.ledger.engine import LedgerEngine
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import OperatorControls, chunk_lease
from caf_pipeline.ledger.tables import ORDERS

_LEAST: Final = {"bandwidth": 0, "spend_cap": -1}
"""The least value of each one that is a number: no limit, and no cap."""

_MOST: Final = 10**18 - 1  # what the table takes

_SENDING: Final = [ChunkState.UPLOADING, ChunkState.DAMAGED]
"""States in which a chunk that is held is uploaded, or repaired by an upload."""

_ORDER: Final = insert(ORDERS)
_GIVE: Final = _ORDER.on_conflict_do_update(
    index_elements=[ORDERS.c.name], set_={"value": _ORDER.excluded.value, "ordered_at": func.now()}
)
_WITHDRAW: Final = delete(ORDERS).where(ORDERS.c.name == bindparam("name"))


class Controls:
    """Where what an operator has set is kept, for runs that obey within seconds. Safe in
    threads.
    """

    def __init__(self, engine: LedgerEngine) -> None:
        self._engine = engine

    def current(self) -> OperatorControls:
        """Return what is set, and how many runs upload now (by state and live lease); at least
        1.
        """
        with self._engine.begin() as connection:
            row = connection.exec_driver_sql(
                query("operator_controls"), {"prefix": chunk_lease(""), "states": _SENDING}
            ).one()
        orders = row.orders
        return OperatorControls(
            paused=orders.get("paused", ""),
            bandwidth=int(orders["bandwidth"]) if "bandwidth" in orders else None,
            spend_cap=int(orders["spend_cap"]) if "spend_cap" in orders else None,
            uploads=max(1, row.uploads),
        )

    def set(self, name: str, value: str | None) -> None:
        """Set "paused" (to the reason), "bandwidth" or "spend_cap"; None: it is not set.

        Raises:
            UsageError: there is no such name, or it cannot have such a value.
        """
        value = _checked(name, value)
        with self._engine.begin() as connection:
            if value is None:
                connection.execute(_WITHDRAW, {"name": name})
            else:
                connection.execute(_GIVE, {"name": name, "value": value})


def _checked(name: str, value: str | None) -> str | None:
    if name != "paused" and name not in _LEAST:
        raise UsageError(f"'{name}' cannot be set here", hint=f"set paused, {', '.join(_LEAST)}")
    if value is None:
        return None
    if name == "paused":
        if not value.strip():
            raise UsageError("a pause needs a reason")
        return value
    try:
        number = int(value)
    except ValueError:
        number = _LEAST[name] - 1
    if not _LEAST[name] <= number <= _MOST:
        raise UsageError(
            f"{name} cannot be '{value}'", hint=f"give a whole number from {_LEAST[name]} up"
        )
    return str(number)
