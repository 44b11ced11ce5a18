"""Questions about chunks: their rows, the versions of a key, sums over a source. Nothing here writes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from sqlalchemy import Row

from caf_pipeline.chunk_state import CLAIMING, GOOD, ChunkState, CopyState, stored_state
from caf_pipeline.errors import NotLocated
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.current_content import content, still_skipped
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.records import (
    ArchiveRate,
    Chunk,
    LocationRow,
    PlanRecord,
    PlanRow,
    SourceAccount,
    WaitingObjects,
)
from caf_pipeline.store.protocol import Sample

_CHUNK: Final = """
    SELECT caf_file_id, chunks.name, sources.name AS source, archive_id, plans.name AS plan, folder AS plan_folder,
        number, state, copy_state, epoch, attempts, chunks.object_count, chunks.object_bytes, expected_size_bytes,
        caf_size_bytes, stored_size_bytes, member_count, member_bytes, skipped_count, released_count, merkle_root,
        proof_type, owner, start, {samples} AS samples, reason, updated_at, located_at, checked_at,
        full_reads.read_at AS read_back_at, unanswered_at,
        tail_start, tail_sha256, coalesce(part, 0) AS part, coalesce(part_count, 0) AS part_count,
        coalesce(abandoned, false) AS part_abandoned, adopted_at IS NOT NULL AS adopted
    FROM chunks JOIN sources USING (source_id) JOIN plans USING (plan_id) LEFT JOIN object_parts USING (caf_file_id)
        LEFT JOIN full_reads USING (caf_file_id, store)
"""
_LOCATED: Final = "chunk_state = 'located' AND copy_state = 'verified'"
"""The state `located`, as an index has it."""

_WAITING: Final = f"""SELECT caf_file_id FROM chunks JOIN sources USING (source_id)
    WHERE sources.name = %(source)s AND {_LOCATED} AND look_again_at <= now()
    ORDER BY look_again_at, caf_file_id LIMIT %(waiting)s"""
RATES_ASKED: Final = 50
RATES_NEEDED: Final = 3
"""Of chunks located last, the median of whose rates is taken: one long pause between two of them then changes little."""

# From one chunk located to the next, so that chunks archived side by side count as what they come to together; from when the
# chunk was planned where that is later, since nothing was to be done before. What a rebuild restored was never packed here.
_RATE = """
    WITH recent AS (SELECT created_at, located_at, member_bytes FROM caf_files
        WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND located_at IS NOT NULL AND attempts > 0
        ORDER BY located_at DESC LIMIT %(chunks)s),
    following AS (SELECT *, lag(located_at) OVER (ORDER BY located_at) AS before FROM recent),
    steps AS (SELECT member_bytes, extract(epoch FROM located_at - greatest(created_at, before)) AS seconds
        FROM following WHERE before IS NOT NULL)
    SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY member_bytes / CAST(seconds AS double precision)) AS rate,
        count(*) AS chunks FROM steps WHERE seconds > 0 AND member_bytes > 0
    """
_PLANS = """
    SELECT sources.name AS source, plans.sha256, plans.name, snapshot, folder, object_count, object_bytes, plans.created_at,
        (SELECT jsonb_object_agg(state, chunks) FROM (SELECT state, count(*) AS chunks FROM chunks
            WHERE chunks.plan_id = plans.plan_id GROUP BY state) AS states) AS chunks
    FROM plans JOIN sources USING (source_id) WHERE (sources.name = %(source)s OR CAST(%(source)s AS text) IS NULL)
        AND NOT EXISTS (SELECT FROM caf_files WHERE caf_files.plan_id = plans.plan_id AND adopted_at IS NOT NULL)
    ORDER BY plan_id DESC LIMIT %(limit)s
    """
_SKIPPED = (
    "SELECT reason, count(*) FROM skipped_objects"
    f" WHERE source_id = %(source_id)s AND {still_skipped('%(source_id)s')} GROUP BY reason"
)
_WAITING_OBJECTS = """
    SELECT count(*) AS objects, coalesce(sum(size_bytes), 0) AS size_bytes, min(retry_at) AS until FROM skipped_objects AS skipped
    WHERE source_id = %(source_id)s AND reason = 'waiting' AND NOT EXISTS (SELECT FROM claims
        WHERE claims.source_id = skipped.source_id AND claims.file_path = skipped.file_path
            AND claims.version_id = skipped.version_id AND claims.etag = skipped.etag
            AND claims.size_bytes = skipped.size_bytes AND claims.rewritten_at = skipped.rewritten_at)
    """
# Of many, some: what was archived last of a bucket that keeps versions has version ids. Each look for new objects may ask.
_SOME_VERSIONS = """
    SELECT version_id FROM (SELECT version_id FROM claims
        WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s) LIMIT 1000) AS claimed
    UNION ALL SELECT version_id FROM (SELECT caf_file_id FROM chunks
            WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND state = ANY(%(good)s)
                AND chunk_state = 'located' AND adopted_at IS NULL
            ORDER BY located_at DESC LIMIT 3) AS chunks
        CROSS JOIN LATERAL (SELECT version_id FROM file_locations
            WHERE caf_file_id = chunks.caf_file_id LIMIT 1000) AS located
    """
_ANY_OBJECT = """
    SELECT start_byte, end_byte, sha256 FROM file_locations
    WHERE caf_file_id = (SELECT caf_file_id FROM caf_files WHERE name = %(chunk)s)
        AND end_byte - start_byte BETWEEN 1 AND %(most)s
    ORDER BY random() LIMIT 1
    """
_SOME_MEMBERS = """
    SELECT file_path AS key, object_version(version_id, etag, size_bytes, rewritten_at) AS object_version,
        nullif(version_id, '') AS version_id, start_byte, end_byte, etag, last_modified, sha256, header_set
    FROM file_locations WHERE caf_file_id = (SELECT caf_file_id FROM caf_files WHERE name = %(chunk)s)
    ORDER BY random() LIMIT %(limit)s
    """
# Of chunks with a part, the number alone: what is located of objects in parts is asked of the objects.
_SUMS = """
    SELECT state, count(*) AS chunks, coalesce(sum(member_count) FILTER (WHERE part IS NULL), 0) AS members,
        coalesce(sum(member_bytes) FILTER (WHERE part IS NULL), 0) AS bytes,
        coalesce(sum(object_count - skipped_count - released_count) FILTER (WHERE part IS NULL), 0) AS claimed
    FROM chunks LEFT JOIN object_parts USING (caf_file_id) WHERE chunks.source_id = %(source_id)s GROUP BY state
    """
_IN_PARTS = """
    SELECT count(*) AS objects, coalesce(sum(size_bytes), 0) AS bytes, (SELECT count(*) FROM claims
        JOIN object_parts USING (caf_file_id) WHERE object_parts.source_id = %(source_id)s) AS claimed
    FROM objects_in_parts WHERE source_id = %(source_id)s
    """


class Lookups(LedgerPart):
    """What is known of chunks and objects."""

    def chunk(self, name: str) -> Chunk:
        """Return the chunk's row, or raise NotLocated."""
        with self._engine.begin() as connection:
            statement = f"{_CHUNK.format(samples='samples')} WHERE chunks.name = %(name)s"
            row = connection.exec_driver_sql(statement, {"name": name}).fetchone()
        if row is None:
            raise NotLocated(
                f"the ledger has no chunk {name}",
                hint="`caf status` lists the chunks; `caf doctor` removes a partition that no plan made",
            )
        return _chunk(row)

    def chunks(self, source: str | None = None, states: Iterable[ChunkState] | None = None) -> Sequence[Chunk]:
        """Return chunks by name, without their samples."""
        wanted = [*states] if states is not None else [*ChunkState]
        # The states that are stored have an index.
        statement = f"{_CHUNK.format(samples='NULL')} WHERE state = ANY(%(states)s) AND chunk_state = ANY(%(stored)s)"
        if source is not None:
            statement += " AND sources.name = %(source)s"
        with self._engine.begin() as connection:
            facts = {"states": wanted, "stored": sorted(set(map(stored_state, wanted))), "source": source}
            rows = connection.exec_driver_sql(f"{statement} ORDER BY chunks.name", facts)
            return [_chunk(row) for row in rows]

    def chunks_to_prove(self, source: str, limit: int, *, waiting: int = 0) -> Sequence[Chunk]:
        """Return located chunks, those first that were looked at longest ago (or located, where never looked at).

        Chunks with a copy that did not answer are left out: `unanswered_chunks` returns them.

        Before them come up to `waiting` of those that wait for a look in their next proof window, which has begun.
        """
        statement = (
            f"{_CHUNK.format(samples='samples')} WHERE sources.name = %(source)s AND {_LOCATED}"
            " AND unanswered_at IS NULL"
            f" ORDER BY caf_file_id IN ({_WAITING}) DESC, coalesce(checked_at, located_at), caf_file_id LIMIT %(limit)s"
        )
        facts = {"source": source, "limit": limit, "waiting": waiting}
        with self._engine.begin() as connection:
            return [_chunk(row) for row in connection.exec_driver_sql(statement, facts)]

    def suspected_chunks(self, source: str, limit: int) -> Sequence[Chunk]:
        """Return located chunks that the store's lists made suspect, those first that were looked at longest ago."""
        statement = (
            f"{_CHUNK.format(samples='samples')} WHERE sources.name = %(source)s AND {_LOCATED}"
            " AND suspected_at IS NOT NULL ORDER BY coalesce(checked_at, located_at), caf_file_id LIMIT %(limit)s"
        )
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(statement, {"source": source, "limit": limit})
            return [_chunk(row) for row in rows]

    def unanswered_chunks(self, source: str) -> Sequence[Chunk]:
        """Return located chunks with a copy that did not answer the last time; the chunk asked longest ago comes first."""
        statement = (
            f"{_CHUNK.format(samples='samples')} WHERE sources.name = %(source)s AND {_LOCATED}"
            " AND unanswered_at IS NOT NULL ORDER BY unanswered_at, caf_file_id"
        )
        with self._engine.begin() as connection:
            return [_chunk(row) for row in connection.exec_driver_sql(statement, {"source": source})]

    def any_object(self, chunk: str, most_bytes: int) -> Sample | None:
        """Return where one of the chunk's objects is, chosen at random from those of 1 to this many bytes; None without any.

        Reads the chunk's rows, some 0.5 s for a million.
        """
        with self._engine.begin() as connection:
            row = connection.exec_driver_sql(_ANY_OBJECT, {"chunk": chunk, "most": most_bytes}).fetchone()
        return None if row is None else Sample(row.start_byte, row.end_byte - row.start_byte, row.sha256)

    def some_members(self, chunk: str, limit: int) -> Sequence[LocationRow]:
        """Return up to so many of the chunk's location rows, chosen at random. A part has a row like an object of its own.

        Reads the chunk's rows, as `any_object`.
        """
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(_SOME_MEMBERS, {"chunk": chunk, "limit": limit}).fetchall()
        return [_location_row(row) for row in rows]

    def has_version_ids(self, source: str) -> bool:
        """Tell whether objects of the source are archived, or claimed, by version ids, as far as those planned last tell."""
        with self._engine.begin() as connection:
            statement = f"SELECT EXISTS (SELECT FROM ({_SOME_VERSIONS}) AS known WHERE version_id <> '')"
            return bool(connection.exec_driver_sql(statement, {"source": source, "good": GOOD}).scalar_one())

    def account(self, source: str) -> SourceAccount:
        """Return the sums of a source, from its chunks' counts."""
        with self._of_source(source) as (connection, source_id):
            sums = connection.exec_driver_sql(_SUMS, {"source_id": source_id}).fetchall()
            in_parts = connection.exec_driver_sql(_IN_PARTS, {"source_id": source_id}).one()
            skipped = connection.exec_driver_sql(_SKIPPED, {"source_id": source_id}).fetchall()
            located = sum(int(row.members) for row in sums if row.state in GOOD) + in_parts.objects
            counts = content(connection, source_id, located)
            waiting = connection.exec_driver_sql(_WAITING_OBJECTS, {"source_id": source_id}).one()
        return SourceAccount(
            source=source,
            chunks={ChunkState(row.state): row.chunks for row in sums},
            located_objects=located,
            located_bytes=sum(int(row.bytes) for row in sums if row.state in GOOD) + int(in_parts.bytes),
            claimed_objects=sum(int(row.claimed) for row in sums if row.state in CLAIMING) + in_parts.claimed,
            skipped={SkipReason(reason): count for reason, count in skipped},
            content=counts,
            waiting=WaitingObjects(waiting.objects, int(waiting.size_bytes), waiting.until) if waiting.objects else None,
        )

    def plans(self, source: str | None = None, limit: int | None = None) -> Sequence[PlanRow]:
        """Return the plans of a source, or of all, the latest first and at most `limit`; no plan made adopted files."""
        with self._engine.begin() as connection:
            rows = connection.exec_driver_sql(_PLANS, {"source": source, "limit": limit}).fetchall()
        return [
            PlanRow(
                PlanRecord(**{field.name: getattr(row, field.name) for field in fields(PlanRecord)}),
                row.created_at,
                {ChunkState(state): count for state, count in sorted((row.chunks or {}).items())},
            )
            for row in rows
        ]

    def archive_rate(self, source: str) -> ArchiveRate | None:
        """Return how fast the source's chunks were archived of late; None where fewer than `RATES_NEEDED` tell."""
        with self._engine.begin() as connection:
            row = connection.exec_driver_sql(_RATE, {"source": source, "chunks": RATES_ASKED + 1}).one()
        return ArchiveRate(row.rate, row.chunks) if row.chunks >= RATES_NEEDED else None

    def address(self, source: str) -> str | None:
        """Return the address of a source; None while the source has no chunk, since another address may then replace it."""
        with self._engine.begin() as connection:
            statement = (
                "SELECT address FROM sources WHERE name = %(source)s"
                " AND EXISTS (SELECT FROM caf_files WHERE caf_files.source_id = sources.source_id)"
            )
            found: str | None = connection.exec_driver_sql(statement, {"source": source}).scalar_one_or_none()
            return found

    def addresses(self) -> Mapping[str, str]:
        """Return the address of each source ever registered, by its archive's id."""
        with self._engine.begin() as connection:
            return {row.archive_id: row.address for row in connection.exec_driver_sql("SELECT archive_id, address FROM sources")}


def _location_row(row: Row[Any]) -> LocationRow:
    return LocationRow(**{field.name: getattr(row, field.name) for field in fields(LocationRow)})


def _chunk(row: Row[Any]) -> Chunk:
    samples = [Sample(one["offset"], one["length"], bytes.fromhex(one["sha256"])) for one in row.samples or ()]
    copy_state = CopyState(row.copy_state) if row.copy_state else None
    return Chunk(**{**row._asdict(), "state": ChunkState(row.state), "copy_state": copy_state, "samples": tuple(samples)})
