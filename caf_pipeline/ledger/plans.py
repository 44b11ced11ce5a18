"""The plans: which new objects of an inventory go into which chunk."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Final

import pyarrow as pa
from sqlalchemy import Connection, bindparam, select
from sqlalchemy.dialects.postgresql import insert

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.inventory.plan import ChunkPlan, PlannedObject
from caf_pipeline.ledger.copy import copy_claims, copy_rows, refuse_located
from caf_pipeline.ledger.engine import LedgerPart, Lock
from caf_pipeline.ledger.leases import lock_lease
from caf_pipeline.ledger.parts import register_parts
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import PlanRecord, PlanRow
from caf_pipeline.ledger.tables import CAF_FILES, PLANS, SOURCES
from caf_pipeline.store.protocol import Lease

_PLANNED_CHUNK: Final = {
    "name": "text",
    "source_id": "int4",
    "plan_id": "int8",
    "number": "int4",
    "object_count": "int8",
    "object_bytes": "int8",
    "expected_size_bytes": "int8",
}
_PLAN: Final = select(
    SOURCES.c.name.label("source"),
    PLANS.c.sha256,
    PLANS.c.name,
    PLANS.c.snapshot,
    PLANS.c.folder,
    PLANS.c.object_count,
    PLANS.c.object_bytes,
).join_from(PLANS, SOURCES)
_OF_HASH: Final = _PLAN.where(PLANS.c.sha256 == bindparam("sha256"))
_OF_NAME: Final = _PLAN.where(
    SOURCES.c.name == bindparam("source"), PLANS.c.name == bindparam("short")
)
_NEW: Final = (
    insert(PLANS).on_conflict_do_nothing(index_elements=[PLANS.c.sha256]).returning(PLANS.c.plan_id)
)
_CHUNK_IDS: Final = select(CAF_FILES.c.number, CAF_FILES.c.caf_file_id).where(
    CAF_FILES.c.plan_id == bindparam("plan_id")
)


class Plans(LedgerPart):
    """Registers plans."""

    def find(self, sha256: bytes) -> PlanRecord | None:
        """Return the plan of this full hash."""
        with self._engine.begin() as connection:
            row = connection.execute(_OF_HASH, {"sha256": sha256}).one_or_none()
        return None if row is None else PlanRecord(**row._asdict())

    def is_name_taken(self, source: str, short: str) -> bool:
        """Return whether another plan of the source already has this short name."""
        with self._engine.begin() as connection:
            return (
                connection.execute(_OF_NAME, {"source": source, "short": short}).first() is not None
            )

    def register(
        self,
        lease: Lease,
        plan: PlanRecord,
        chunks: Sequence[ChunkPlan],
        claims: Iterable[pa.RecordBatch],
        parts: Iterable[tuple[int, PlannedObject]] = (),
    ) -> None:
        """Write the plan, its chunks as `planned`, its claims, batches as of
        `plan.read_identities`, and `plan.read_parts`.

        A plan of the same hash that is registered already changes nothing. Plans of one source are
        registered one by one.

        Raises: ClaimConflict: an object is claimed or located already; nothing was written.
            LeaseLost: another run has the lease on the source's plan now, and removed what it found
            of this one.
        """
        # NO KEY: loads of locations and skips of the source go on.
        with self._of_source(plan.source, lock=Lock.NO_KEY_UPDATE) as (connection, source_id):
            plan_id = _insert_plan(connection, source_id, plan)
            if plan_id is None:
                return
            ids = _insert_chunks(connection, source_id, plan_id, plan, chunks)
            copy_claims(connection, source_id, ids, claims)
            register_parts(connection, source_id, plan_id, ids, parts)
            refuse_located(connection, source_id, plan_id)
            lock_lease(connection, lease)  # last: its own renewal waits for it

    def list(self, source: str | None = None, limit: int | None = None) -> Sequence[PlanRow]:
        """Return the plans of a source, or of all, the latest first and at most `limit`; no plan
        made adopted files.
        """
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(
                query("plans"), {"source": source, "limit": limit}
            ).fetchall()
        return [
            PlanRow(
                PlanRecord(
                    **{field.name: getattr(row, field.name) for field in fields(PlanRecord)}
                ),
                row.created_at,
                {ChunkState(state): count for state, count in sorted((row.chunks or {}).items())},
            )
            for row in rows
        ]


def _insert_plan(connection: Connection, source_id: int, plan: PlanRecord) -> int | None:
    """Return the new plan's id, None if the ledger has a plan of this hash already."""
    values = asdict(plan)
    del values["source"]
    return connection.execute(_NEW, {**values, "source_id": source_id}).scalar_one_or_none()


def _insert_chunks(
    connection: Connection,
    source_id: int,
    plan_id: int,
    plan: PlanRecord,
    chunks: Sequence[ChunkPlan],
) -> Mapping[int, int]:
    """Return the new chunks' ids by number."""
    rows = (
        (
            str(ChunkId(plan.source, plan.name, one.chunk_number)),
            source_id,
            plan_id,
            one.chunk_number,
            one.object_count,
            one.object_bytes,
            one.expected_size_bytes,
        )
        for one in chunks
    )
    copy_rows(connection, "caf_files", _PLANNED_CHUNK, rows)
    return {
        number: caf_file_id
        for number, caf_file_id in connection.execute(_CHUNK_IDS, {"plan_id": plan_id})
    }
