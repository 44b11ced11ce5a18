"""Works around a bug in Dagster's event log on Postgres (dagster-io/dagster#33552).

If the row of a pool's default limit exists, Dagster continues in a failed transaction, and the run
fails. Remove this module when the issue is closed. Source:
`SqlEventLogStorage.initialize_concurrency_limit_to_default` of Dagster 1.13.27.
"""

from typing import Any, Final

from sqlalchemy import text

_SET_DEFAULT: Final = text(
    'INSERT INTO concurrency_limits (concurrency_key, "limit", using_default_limit) '
    "VALUES (:pool, :limit, true) "
    'ON CONFLICT (concurrency_key) DO UPDATE SET "limit" = excluded."limit" '
    "WHERE concurrency_limits.using_default_limit"
)


def make_default_limits_idempotent(event_log: Any) -> None:  # noqa: ANN401 - a PostgresEventLogStorage, which is slow to import
    """Let a pool's default limit be set repeatedly. An operator's limit stays."""
    original = event_log.initialize_concurrency_limit_to_default

    def initialize(concurrency_key: str) -> bool:
        limit = event_log._instance.global_op_concurrency_default_limit
        if limit is None:
            return bool(original(concurrency_key))  # it deletes the row, which cannot fail
        row = {"pool": concurrency_key, "limit": limit}
        with event_log.index_transaction() as connection:
            if connection.execute(_SET_DEFAULT, row).rowcount:
                event_log._allocate_concurrency_slots(connection, concurrency_key, limit)
        return True

    event_log.initialize_concurrency_limit_to_default = initialize
