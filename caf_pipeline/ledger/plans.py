"""Plans: which new objects of an inventory go into which chunk."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Final

import pyarrow as pa
from sqlalchemy import bindparam, select
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
_NEW: Final = (
    insert(PLANS).on_conflict_do_nothing(index_elements=[PLANS.c.sha256]).returning(PLANS.c.plan_id)
)
_CHUNK_IDS: Final = select(CAF_FILES.c.number, CAF_FILES.c.caf_file_id).where(
    CAF_FILES.c.plan_id == bindparam("plan_id")
)


class Plans(LedgerPart):
    """Registers and lists plans."""

    def find(self, sha256: bytes) -> PlanRecord | None:
        rows = self._rows(_PLAN.where(PLANS.c.sha256 == sha256))
        return PlanRecord(**rows[0]._asdict()) if rows else None

    def is_name_taken(self, source: str, short: str) -> bool:
        return bool(self._rows(_PLAN.where(SOURCES.c.name == source, PLANS.c.name == short)))

    def register(
        self,
        lease: Lease,
        plan: PlanRecord,
        chunks: Sequence[ChunkPlan],
        claims: Iterable[pa.RecordBatch],
        parts: Iterable[tuple[int, PlannedObject]] = (),
    ) -> None:
        """Write a plan, its chunks as `planned`, its claims and its parts.

        Does nothing if the same hash is registered. If an error is raised, nothing was written.

        Raises:
            ClaimConflict: an object is already claimed or located.
            LeaseLost: another run holds the plan's lease, and removed this plan's files.
        """
        # NO KEY: locations and skips of the source may still be written.
        with self._of_source(plan.source, lock=Lock.NO_KEY_UPDATE) as (connection, source_id):
            values = {**asdict(plan), "source_id": source_id}
            del values["source"]
            plan_id = connection.execute(_NEW, values).scalar_one_or_none()
            if plan_id is None:
                return
            rows = (
                (
                    str(ChunkId(plan.source, plan.name, chunk.chunk_number)),
                    source_id,
                    plan_id,
                    chunk.chunk_number,
                    chunk.object_count,
                    chunk.object_bytes,
                    chunk.expected_size_bytes,
                )
                for chunk in chunks
            )
            copy_rows(connection, "caf_files", _PLANNED_CHUNK, rows)
            new_chunks = connection.execute(_CHUNK_IDS, {"plan_id": plan_id})
            ids = {row.number: row.caf_file_id for row in new_chunks}
            copy_claims(connection, source_id, ids, claims)
            register_parts(connection, source_id, plan_id, ids, parts)
            refuse_located(connection, source_id, plan_id)
            lock_lease(connection, lease)  # last: the lease's renewal waits for it

    def list(self, source: str | None = None, limit: int | None = None) -> Sequence[PlanRow]:
        """Latest first, without adopted files."""
        plans = []
        for row in self._rows(query("plans"), source=source, limit=limit):
            columns = row._asdict()
            states, created_at = columns.pop("chunks") or {}, columns.pop("created_at")
            chunks = {ChunkState(state): states[state] for state in sorted(states)}
            plans.append(PlanRow(PlanRecord(**columns), created_at, chunks))
        return plans
