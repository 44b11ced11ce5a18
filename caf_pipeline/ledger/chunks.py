"""Questions about chunks: their rows, versions of a key, sums over a source."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    Text,
    and_,
    any_,
    bindparam,
    desc,
    exists,
    false,
    func,
    select,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY

from caf_pipeline.chunk_state import CLAIMING, GOOD, ChunkState, CopyState, stored_state
from caf_pipeline.errors import NotLocated
from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.current_content import content
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.records import ArchiveRate, SourceAccount, WaitingObjects
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.ledger.tables import (
    CAF_FILES,
    CHUNK_COPIES,
    CLAIMS,
    FILE_LOCATIONS,
    FULL_READS,
    OBJECT_PARTS,
    PENDING_LOCATIONS,
    PLANS,
    SKIPPED_OBJECTS,
    SOURCES,
)
from caf_pipeline.ledger.views import CHUNKS, CURRENT_SKIPS
from caf_pipeline.records import Chunk, Sample

_CHUNK_COLUMNS: Final = [
    field.name for field in fields(Chunk) if field.name in CHUNKS.c and field.name != "samples"
]

_WITHOUT_SAMPLES: Final[Select[Any]] = (
    select(
        *(CHUNKS.c[name] for name in _CHUNK_COLUMNS),
        SOURCES.c.name.label("source"),
        func.coalesce(CHUNK_COPIES.c.archive_id, SOURCES.c.archive_id).label("archive_id"),
        PLANS.c.name.label("plan"),
        PLANS.c.folder.label("plan_folder"),
        FULL_READS.c.read_at.label("read_back_at"),
        FULL_READS.c.opened_with,
        FULL_READS.c.tail_sha256.label("read_tail_sha256"),
        FULL_READS.c.agreed_sha256.label("agreed_sha256"),
        func.coalesce(OBJECT_PARTS.c.part, 0).label("part"),
        func.coalesce(OBJECT_PARTS.c.part_count, 0).label("part_count"),
        func.coalesce(OBJECT_PARTS.c.abandoned, false()).label("part_abandoned"),
        CHUNKS.c.adopted_at.is_not(None).label("adopted"),
    )
    .join_from(CHUNKS, SOURCES, CHUNKS.c.source_id == SOURCES.c.source_id)
    .join(PLANS, CHUNKS.c.plan_id == PLANS.c.plan_id)
    .outerjoin(
        CHUNK_COPIES,
        and_(
            CHUNKS.c.caf_file_id == CHUNK_COPIES.c.caf_file_id,
            CHUNKS.c.store == CHUNK_COPIES.c.store,
        ),
    )
    .outerjoin(OBJECT_PARTS, CHUNKS.c.caf_file_id == OBJECT_PARTS.c.caf_file_id)
    .outerjoin(
        FULL_READS,
        and_(
            CHUNKS.c.caf_file_id == FULL_READS.c.caf_file_id,
            CHUNKS.c.store == FULL_READS.c.store,
            CHUNKS.c.merkle_root == FULL_READS.c.merkle_root,
        ),
    )
)
_WITH_SAMPLES: Final = _WITHOUT_SAMPLES.add_columns(CHUNKS.c.samples)
_CHUNK: Final = _WITH_SAMPLES.where(CHUNKS.c.name == bindparam("name"))
# The stored states have an index.
_IN_STATES: Final = _WITHOUT_SAMPLES.where(
    CHUNKS.c.state == any_(bindparam("states", type_=ARRAY(Text))),
    CHUNKS.c.chunk_state == any_(bindparam("stored", type_=ARRAY(Text))),
).order_by(CHUNKS.c.name)

_OF_SOURCE: Final = SOURCES.c.name == bindparam("source")
_LOCATED: Final = and_(
    _OF_SOURCE,
    CHUNKS.c.chunk_state == ChunkState.LOCATED,
    CHUNKS.c.copy_state == CopyState.VERIFIED,
)

_LOCATED_AMONG: Final = (
    _WITHOUT_SAMPLES.where(_LOCATED, CHUNKS.c.name == any_(bindparam("names", type_=ARRAY(Text))))
    .order_by(CHUNKS.c.name)
    .limit(bindparam("limit"))
)

_LONGEST_AGO: Final = func.coalesce(CHUNKS.c.checked_at, CHUNKS.c.located_at)
_WAITING: Final = (
    select(CHUNKS.c.caf_file_id)
    .join_from(CHUNKS, SOURCES, CHUNKS.c.source_id == SOURCES.c.source_id)
    .where(_LOCATED, CHUNKS.c.look_again_at <= func.now())
    .order_by(CHUNKS.c.look_again_at, CHUNKS.c.caf_file_id)
    .limit(bindparam("waiting"))
    .correlate(None)
)
_TO_PROVE: Final = (
    _WITH_SAMPLES.where(_LOCATED, CHUNKS.c.unanswered_at.is_(None))
    .order_by(CHUNKS.c.caf_file_id.in_(_WAITING).desc(), _LONGEST_AGO, CHUNKS.c.caf_file_id)
    .limit(bindparam("limit"))
)
_SUSPECTED: Final = (
    _WITH_SAMPLES.where(_LOCATED, CHUNKS.c.suspected_at.is_not(None))
    .order_by(_LONGEST_AGO, CHUNKS.c.caf_file_id)
    .limit(bindparam("limit"))
)
_UNREAD: Final = _WITH_SAMPLES.where(
    _LOCATED, CHUNKS.c.unread.is_not(None), CHUNKS.c.unanswered_at.is_(None)
).order_by(_LONGEST_AGO, CHUNKS.c.caf_file_id)
_UNANSWERED: Final = _WITH_SAMPLES.where(_LOCATED, CHUNKS.c.unanswered_at.is_not(None)).order_by(
    CHUNKS.c.unanswered_at, CHUNKS.c.caf_file_id
)

RATES_ASKED: Final = 50
RATES_NEEDED: Final = 3
"""One long pause then changes the median little."""

_OF_CHUNK: Final = (
    FILE_LOCATIONS.c.caf_file_id
    == select(CAF_FILES.c.caf_file_id)
    .where(CAF_FILES.c.name == bindparam("chunk"))
    .scalar_subquery()
)
_ANY_OBJECT: Final = (
    select(FILE_LOCATIONS.c.start_byte, FILE_LOCATIONS.c.end_byte, FILE_LOCATIONS.c.sha256)
    .where(
        _OF_CHUNK,
        (FILE_LOCATIONS.c.end_byte - FILE_LOCATIONS.c.start_byte).between(1, bindparam("most")),
    )
    .order_by(func.random())
    .limit(1)
)
_SOME_MEMBERS: Final[Select[Any]] = (
    select(
        FILE_LOCATIONS.c.file_path.label("key"),
        func.object_version(
            FILE_LOCATIONS.c.version_id,
            FILE_LOCATIONS.c.etag,
            FILE_LOCATIONS.c.size_bytes,
            FILE_LOCATIONS.c.rewritten_at,
        ).label("object_version"),
        func.nullif(FILE_LOCATIONS.c.version_id, "").label("version_id"),
        FILE_LOCATIONS.c.start_byte,
        FILE_LOCATIONS.c.end_byte,
        FILE_LOCATIONS.c.etag,
        FILE_LOCATIONS.c.last_modified,
        FILE_LOCATIONS.c.sha256,
        FILE_LOCATIONS.c.header_set,
    )
    .where(_OF_CHUNK)
    .order_by(func.random())
    .limit(bindparam("limit"))
)

_SKIPPED_OF_CHUNK: Final = (
    select(SKIPPED_OBJECTS.c.reason, func.count().label("objects"))
    .join(CAF_FILES, CAF_FILES.c.caf_file_id == SKIPPED_OBJECTS.c.caf_file_id)
    .where(CAF_FILES.c.name == bindparam("chunk"))
    .group_by(SKIPPED_OBJECTS.c.reason)
)
_ROWS: Final = union_all(
    *(
        select(rows.c.file_path, rows.c.size_bytes)
        .join(CAF_FILES, CAF_FILES.c.caf_file_id == rows.c.caf_file_id)
        .where(CAF_FILES.c.name == bindparam("chunk"))
        for rows in (PENDING_LOCATIONS, FILE_LOCATIONS)
    )
)
_LARGEST: Final = _ROWS.order_by(desc("size_bytes"), desc("file_path")).limit(bindparam("limit"))
_COUNT_ROWS: Final = select(func.count()).select_from(_ROWS.subquery())
_RECIPIENTS: Final = select(CAF_FILES.c.recipients).where(CAF_FILES.c.name == bindparam("chunk"))


def _sum_without_parts(column: ColumnElement[int]) -> ColumnElement[int]:
    """Objects in parts are counted by object."""
    return func.coalesce(func.sum(column).filter(OBJECT_PARTS.c.part.is_(None)), 0)


_SUMS: Final = (
    select(
        CHUNKS.c.state,
        func.count().label("chunks"),
        _sum_without_parts(CHUNKS.c.member_count).label("members"),
        _sum_without_parts(CHUNKS.c.member_bytes).label("bytes"),
        _sum_without_parts(
            CHUNKS.c.object_count - CHUNKS.c.skipped_count - CHUNKS.c.released_count
        ).label("claimed"),
    )
    .join_from(
        CHUNKS, OBJECT_PARTS, CHUNKS.c.caf_file_id == OBJECT_PARTS.c.caf_file_id, isouter=True
    )
    .where(CHUNKS.c.source_id == bindparam("source_id"))
    .group_by(CHUNKS.c.state)
)
_SKIPPED: Final = (
    select(
        CURRENT_SKIPS.c.reason,
        func.count().label("objects"),
        func.min(CURRENT_SKIPS.c.retry_at)
        .filter(func.isfinite(CURRENT_SKIPS.c.retry_at))
        .label("retried_at"),
    )
    .where(CURRENT_SKIPS.c.source_id == bindparam("source_id"))
    .group_by(CURRENT_SKIPS.c.reason)
)
_WAITING_OBJECTS: Final = select(
    func.count().label("objects"),
    func.coalesce(func.sum(SKIPPED_OBJECTS.c.size_bytes), 0).label("size_bytes"),
    func.min(SKIPPED_OBJECTS.c.retry_at).label("until"),
).where(
    SKIPPED_OBJECTS.c.source_id == bindparam("source_id"),
    SKIPPED_OBJECTS.c.reason == SkipReason.WAITING,
    ~exists().where(*(column == SKIPPED_OBJECTS.c[column.name] for column in CLAIMS.primary_key)),
)


class Chunks(LedgerPart):
    """Reads chunks and objects."""

    def get(self, name: str) -> Chunk:
        """Raises NotLocated if the ledger has no such chunk."""
        rows = self._rows(_CHUNK, name=name)
        if not rows:
            raise NotLocated(
                f"the ledger has no chunk {name}",
                hint="`caf status` lists the chunks; `caf doctor` removes partitions without a "
                "plan",
            )
        return _chunk(rows[0])

    def list(
        self, source: str | None = None, states: Iterable[ChunkState] | None = None
    ) -> Sequence[Chunk]:
        """By name, without samples."""
        states = [*states] if states is not None else [*ChunkState]
        statement = _IN_STATES if source is None else _IN_STATES.where(_OF_SOURCE)
        stored = sorted(set(map(stored_state, states)))
        rows = self._rows(statement, states=states, stored=stored, source=source)
        return [_chunk(row) for row in rows]

    def located_among(self, source: str, names: Collection[str], limit: int) -> Sequence[Chunk]:
        """Return up to `limit` located chunks of these names, by name, without samples."""
        rows = self._rows(_LOCATED_AMONG, source=source, names=[*names], limit=limit)
        return [_chunk(row) for row in rows]

    def to_prove(self, source: str, limit: int, *, waiting: int = 0) -> Sequence[Chunk]:
        """Located chunks to check, the longest unchecked first.

        Up to `waiting` chunks whose next proof window has begun come before them. Chunks with a
        copy that did not answer are left out.
        """
        rows = self._rows(_TO_PROVE, source=source, limit=limit, waiting=waiting)
        return [_chunk(row) for row in rows]

    def suspected(self, source: str, limit: int) -> Sequence[Chunk]:
        """Located chunks that differ from the store's lists, the longest unchecked first."""
        return [_chunk(row) for row in self._rows(_SUSPECTED, source=source, limit=limit)]

    def unread(self, source: str) -> Sequence[Chunk]:
        """Located, answering chunks that were not read whole since a rebuild restored them.

        The longest unchecked comes first.
        """
        return [_chunk(row) for row in self._rows(_UNREAD, source=source)]

    def unanswered(self, source: str) -> Sequence[Chunk]:
        """Located chunks with a copy that did not answer, the oldest check first."""
        return [_chunk(row) for row in self._rows(_UNANSWERED, source=source)]

    def any_object(self, chunk: str, most_bytes: int) -> Sample | None:
        """Takes about 0.5 s for a chunk of a million rows."""
        for row in self._rows(_ANY_OBJECT, chunk=chunk, most=most_bytes):
            return Sample(row.start_byte, row.end_byte - row.start_byte, row.sha256)
        return None

    def some_members(self, chunk: str, limit: int) -> Sequence[LocationRow]:
        """Takes as long as `any_object`. A part has a row of its own."""
        rows = self._rows(_SOME_MEMBERS, chunk=chunk, limit=limit)
        return [LocationRow(**row._asdict()) for row in rows]

    def skipped(self, chunk: str) -> Mapping[SkipReason, int]:
        rows = self._rows(_SKIPPED_OF_CHUNK, chunk=chunk)
        return {SkipReason(row.reason): row.objects for row in rows}

    def count_rows(self, chunk: str) -> int:
        return int(self._scalar(_COUNT_ROWS, chunk=chunk))

    def recipients(self, chunk: str) -> Sequence[str]:
        return self._scalar(_RECIPIENTS, chunk=chunk) or ()

    def largest(self, chunk: str, limit: int) -> Sequence[tuple[str, int]]:
        rows = self._rows(_LARGEST, chunk=chunk, limit=limit)
        return [(row.file_path, row.size_bytes) for row in rows]

    def has_version_ids(self, source: str) -> bool:
        """Only the objects planned last count."""
        return bool(self._scalar(query("has_version_ids"), source=source, good=GOOD))

    def account(self, source: str) -> SourceAccount:
        with self._of_source(source) as (connection, source_id):
            sums = connection.execute(_SUMS, {"source_id": source_id}).fetchall()
            in_parts = connection.exec_driver_sql(
                query("count_in_parts"), {"source_id": source_id}
            ).one()
            skipped = connection.execute(_SKIPPED, {"source_id": source_id}).fetchall()
            located = sum(int(row.members) for row in sums if row.state in GOOD) + in_parts.objects
            counts = content(connection, source_id, located)
            waiting = connection.execute(_WAITING_OBJECTS, {"source_id": source_id}).one()
        located_bytes = sum(int(row.bytes) for row in sums if row.state in GOOD)
        claimed = sum(int(row.claimed) for row in sums if row.state in CLAIMING)
        return SourceAccount(
            source=source,
            chunks={ChunkState(row.state): row.chunks for row in sums},
            located_objects=located,
            located_bytes=located_bytes + int(in_parts.bytes),
            claimed_objects=claimed + in_parts.claimed,
            skipped={SkipReason(row.reason): row.objects for row in skipped},
            retried_at=min((row.retried_at for row in skipped if row.retried_at), default=None),
            content=counts,
            waiting=WaitingObjects(waiting.objects, int(waiting.size_bytes), waiting.until)
            if waiting.objects
            else None,
        )

    def archive_rate(self, source: str) -> ArchiveRate | None:
        """None if fewer than `RATES_NEEDED` chunks were located."""
        (row,) = self._rows(query("archive_rate"), source=source, chunks=RATES_ASKED + 1)
        return ArchiveRate(row.rate, row.chunks) if row.chunks >= RATES_NEEDED else None


def _chunk(row: Row[Any]) -> Chunk:
    columns = {"samples": (), **row._asdict()}
    columns["state"] = ChunkState(row.state)
    columns["copy_state"] = CopyState(row.copy_state) if row.copy_state else None
    for name in ("samples", "unread"):
        columns[name] = tuple(
            Sample(sample["offset"], sample["length"], bytes.fromhex(sample["sha256"]))
            for sample in columns[name] or ()
        )
    return Chunk(**columns)
