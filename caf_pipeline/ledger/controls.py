"""What an operator has set in the ledger: pause, bandwidth and spend cap, for all runs on all machines."""

from typing import Final

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import UsageError
from caf_pipeline.ledger.engine import LedgerEngine
from caf_pipeline.ledger.records import OperatorControls, chunk_lease

_LEAST: Final = {"bandwidth": 0, "spend_cap": -1}
"""The least value of each one that is a number: no limit, and no cap."""

_MOST: Final = 10**18 - 1  # what the table takes

_SENDING: Final = [ChunkState.UPLOADING, ChunkState.DAMAGED]
"""States in which a chunk that is held is uploaded, or repaired by an upload."""

# Both in one statement, so of one moment. A lease that was given back has expired.
_CURRENT = """
    SELECT (SELECT coalesce(json_object_agg(name, value), '{}') FROM orders) AS given, (
        SELECT count(*) FROM chunks JOIN leases ON leases.name = %(prefix)s || chunks.name
        WHERE state = ANY(%(states)s) AND expires_at > clock_timestamp()) AS uploads
    """
_GIVE = (
    "INSERT INTO orders (name, value) VALUES (%(name)s, %(value)s)"
    " ON CONFLICT (name) DO UPDATE SET value = excluded.value, ordered_at = now()"
)


class Controls:
    """Where what an operator has set is kept, for runs that obey within seconds. Safe in threads."""

    def __init__(self, engine: LedgerEngine) -> None:
        self._engine = engine

    def current(self) -> OperatorControls:
        """Return what is set, and how many runs upload now (by state and live lease); at least 1."""
        with self._engine.begin() as connection:
            row = connection.exec_driver_sql(_CURRENT, {"prefix": chunk_lease(""), "states": _SENDING}).one()
        given = row.given
        return OperatorControls(
            paused=given.get("paused", ""),
            bandwidth=int(given["bandwidth"]) if "bandwidth" in given else None,
            spend_cap=int(given["spend_cap"]) if "spend_cap" in given else None,
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
                connection.exec_driver_sql("DELETE FROM orders WHERE name = %(name)s", {"name": name})
            else:
                connection.exec_driver_sql(_GIVE, {"name": name, "value": value})


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
        raise UsageError(f"{name} cannot be '{value}'", hint=f"give a whole number from {_LEAST[name]} up")
    return str(number)
