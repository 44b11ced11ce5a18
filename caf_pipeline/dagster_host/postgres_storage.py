"""What Dagster's event log does wrong on Postgres: it takes a pool's default limit a second time,
in a transaction that is over.

The first run of a pool writes its limit. A run that meets the row all the same, since another was
faster or the default was changed since, goes on in a transaction that Postgres has ended, and
fails: at first some runs of many, after a change every run. Source:
`SqlEventLogStorage.initialize_concurrency_limit_to_default` of Dagster 1.13.27;
dagster-io/dagster#33552. What to do when that is closed: leave this out.
"""

from functools import partial
from typing import Any, Final

from sqlalchemy import text

_TAKE_DEFAULT: Final = text(
    'INSERT INTO concurrency_limits (concurrency_key, "limit", using_default_limit) VALUES (:pool, '
    ":limit, true)"
    ' ON CONFLICT (concurrency_key) DO UPDATE SET "limit" = excluded."limit" WHERE '
    "concurrency_limits.using_default_limit"
)


def mend(event_log: Any) -> None:  # noqa: ANN401 - a PostgresEventLogStorage, which is loaded only where it is used
    """Let this event log take the default limit of a pool, however often it is asked; a limit of
    the pool's own stays.
    """
    event_log.initialize_concurrency_limit_to_default = partial(
        _take_default, event_log, event_log.initialize_concurrency_limit_to_default
    )


def _take_default(event_log: Any, original: Any, concurrency_key: str) -> bool:  # noqa: ANN401
    limit = event_log._instance.global_op_concurrency_default_limit
    if limit is None:
        return bool(original(concurrency_key))  # removes the row, which no other run minds
    with event_log.index_transaction() as connection:
        if connection.execute(_TAKE_DEFAULT, {"pool": concurrency_key, "limit": limit}).rowcount:
            event_log._allocate_concurrency_slots(connection, concurrency_key, limit)
    return True
