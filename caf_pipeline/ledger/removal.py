"""Removes a source if none of its chunks was ever posted or located.

The rows in `leases` stay: a chunk that is planned again under the same name gets a greater epoch than each earlier run of it.
"""

from typing import Final

from psycopg.errors import LockNotAvailable
from sqlalchemy import Connection

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import HeldByOther, IllegalMove, LedgerError
from caf_pipeline.ledger.engine import LedgerPart, source_id_of
from caf_pipeline.ledger.leases import lock_lease, require_free
from caf_pipeline.ledger.records import RemovableSource, chunk_lease, plan_lease
from caf_pipeline.store.protocol import Lease

_S = ChunkState

REMOVABLE: Final = (_S.PLANNED, _S.PACKING, _S.SEALED, _S.EMPTY, _S.PARKED, _S.WITHDRAWN)
"""States of chunks that may never have been posted; their other columns say whether they were."""

OF_AN_ADDRESS: Final = (
    "skipped_objects",
    "current_exceptions",
    "inventories",
    "noticed_keys",
    "messages_set_apart",
    "queue_reads",
    "rebuilds",
    "store_looks",
    "left_posts",
)
"""Tables with rows about a source's bucket that are written before the source has a chunk."""

OF_A_CHUNK: Final = (
    "staging_reservations",
    "replicas",
    "full_reads",
    "chunk_copies",
    "transaction_posts",
    "read_failures",
    "object_parts",
    "log_times",
    "pending_locations",
)
"""Tables with rows of a chunk by its `caf_file_id`. Rows of `posts` and `file_locations` forbid a removal."""

_POSTED_OR_LOCATED = """
    SELECT name, state FROM chunks WHERE source_id = %(id)s AND (state <> ALL(%(removable)s)
        OR copy_state <> 'wanted' OR located_at IS NOT NULL OR restored_at IS NOT NULL OR adopted_at IS NOT NULL
        OR EXISTS (SELECT FROM posts WHERE posts.caf_file_id = chunks.caf_file_id)
        OR EXISTS (SELECT FROM transaction_posts AS posts WHERE posts.caf_file_id = chunks.caf_file_id
            AND (live OR posts.start IS NOT NULL)))
    ORDER BY name LIMIT 1
    """
_HELD = """
    SELECT leases.name FROM leases JOIN caf_files ON leases.name = %(prefix)s || caf_files.name
    WHERE source_id = %(id)s AND expires_at > clock_timestamp() ORDER BY leases.name
    """
_COUNTS = """
    SELECT address, (SELECT count(*) FROM plans WHERE plans.source_id = sources.source_id) AS plans,
        (SELECT count(*) FROM caf_files WHERE caf_files.source_id = sources.source_id) AS chunks
    FROM sources WHERE source_id = %(id)s
    """


class SourceRemoval(LedgerPart):
    """Removes a source."""

    def removable(self, source: str) -> RemovableSource:
        """Return what `remove_source` would remove.

        Raises:
            NotLocated: there is no such source.
            IllegalMove: a chunk of the source was posted or located, or may be.
            LedgerError: the source is being rebuilt.
            HeldByOther: a run plans the source, or works on a chunk of it.
        """
        with self._of_source(source, lock="FOR UPDATE") as (connection, source_id):
            require_free(connection, plan_lease(source))
            _require_removable(connection, source_id, source)
            return RemovableSource(**connection.exec_driver_sql(_COUNTS, {"id": source_id}).one()._asdict())

    def remove(self, lease: Lease, source: str) -> None:
        """Remove the source, its plans and its chunks. `lease` is the caller's on the source's plan.

        Raises:
            LeaseLost: another run has the lease now. And as `removable`, except for a run that plans the source.
        """
        with self._engine.begin() as connection:
            facts = {"id": source_id_of(connection, source, lock="FOR UPDATE")}
            _require_removable(connection, facts["id"], source)
            for table in OF_A_CHUNK:
                connection.exec_driver_sql(
                    f"DELETE FROM {table} USING caf_files"
                    f" WHERE {table}.caf_file_id = caf_files.caf_file_id AND caf_files.source_id = %(id)s",
                    facts,
                )
            for table in ("claims", *OF_AN_ADDRESS, "caf_files", "plans", "sources"):
                connection.exec_driver_sql(f"DELETE FROM {table} WHERE source_id = %(id)s", facts)
            lock_lease(connection, lease)  # last: its own renewal waits for it


def _require_removable(connection: Connection, source_id: int, source: str) -> None:
    """Lock the source's chunks, and raise unless nothing was posted or located, and no run works on a chunk."""
    facts = {"id": source_id, "removable": [*REMOVABLE], "prefix": chunk_lease("")}
    try:
        connection.exec_driver_sql("SELECT FROM caf_files WHERE source_id = %(id)s FOR UPDATE NOWAIT", facts)
    except LockNotAvailable as error:
        raise HeldByOther(
            f"a run works on a chunk of source '{source}' now", holder="", hint="wait for that run, or end it first"
        ) from error
    chunk = connection.exec_driver_sql(_POSTED_OR_LOCATED, facts).fetchone()
    if chunk is not None:
        raise IllegalMove(
            f"source '{source}' cannot be removed: chunk {chunk.name} is '{chunk.state}', and is or may be stored",
            hint="keep the source in the ledger; to archive nothing more of it, take it out of caf.toml",
        )
    if connection.exec_driver_sql("SELECT EXISTS (SELECT FROM file_locations WHERE source_id = %(id)s)", facts).scalar_one():
        raise IllegalMove(
            f"source '{source}' cannot be removed: the ledger has locations of its objects",
            hint="keep the source in the ledger; to archive nothing more of it, take it out of caf.toml",
        )
    if connection.exec_driver_sql("SELECT EXISTS (SELECT FROM rebuilds WHERE source_id = %(id)s)", facts).scalar_one():
        raise LedgerError(
            f"source '{source}' cannot be removed: its rebuild is not complete, so that the store may have chunks of it",
            hint=f"complete it with 'caf rebuild {source}'",
        )
    for name in connection.exec_driver_sql(_HELD, facts).scalars().all():
        require_free(connection, name)
