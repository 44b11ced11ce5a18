"""Objects that are split over chunks: which part a chunk has, and what becomes of all parts when one chunk is moved.

An object in parts has one claim, with the chunk of its first part. It ends when all parts are located, or when one chunk gives
its part up: then all parts of the plan are abandoned. Whether all are located is asked of the view `objects_in_parts` alone.
Source: docs/decisions/0020-objects-over-several-chunks.md.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection

from caf_pipeline.chunk_state import CLAIMING, IN_GOOD_STANDING, ChunkState
from caf_pipeline.errors import LedgerError
from caf_pipeline.inventory.objects import is_rewritten
from caf_pipeline.ledger.copy import copy_rows, withdraw_claims

if TYPE_CHECKING:
    from caf_pipeline.inventory.manifest import PartLocation
    from caf_pipeline.inventory.plan import PlannedObject

_PART: Final = {
    "caf_file_id": "int8",
    "file_path": "text",
    "version_id": "text",
    "etag": "text",
    "object_bytes": "int8",
    "rewritten_at": "timestamptz",
    "part": "int4",
    "part_count": "int4",
    "start_byte": "int8",
    "end_byte": "int8",
}
_KEY: Final = "file_path, version_id, etag, object_bytes, rewritten_at"
"""The columns that identify an object of a source in `object_parts`."""

# Parts of another plan keep their rows: those of this one get numbers that no other has. A plan has less than 100,000 chunks.
# Asked once for an object: what the statement has written of it by then is passed over each time.
_REGISTER: Final = f"""
    WITH numbered AS MATERIALIZED (
        SELECT {_KEY}, coalesce(
            (SELECT min(old.location_part - old.part) FROM object_parts AS old WHERE old.plan_id = %(plan_id)s
                AND ({_KEY}) = (object.file_path, object.version_id, object.etag, object.object_bytes, object.rewritten_at)),
            (SELECT 100000 * count(DISTINCT old.plan_id) FROM object_parts AS old WHERE old.source_id = %(source_id)s
                AND ({_KEY}) = (object.file_path, object.version_id, object.etag, object.object_bytes, object.rewritten_at))
            ) AS parts_before
        FROM (SELECT DISTINCT {_KEY} FROM splitting) AS object)
    INSERT INTO object_parts (plan_id, source_id, caf_file_id, {_KEY}, part, part_count, start_byte, end_byte, location_part)
    SELECT %(plan_id)s, %(source_id)s, caf_file_id, {_KEY}, part, part_count, start_byte, end_byte, part + parts_before
    FROM splitting JOIN numbered USING ({_KEY})
    """
_HAS_PART: Final = "SELECT EXISTS (SELECT FROM object_parts WHERE caf_file_id = %(id)s)"
# In one order, by all who wait for each other.
_ALL: Final = """
    SELECT parts.caf_file_id FROM object_parts AS own JOIN object_parts AS parts
        USING (plan_id, file_path, version_id, etag, object_bytes, rewritten_at)
    WHERE own.caf_file_id = %(id)s ORDER BY parts.part FOR UPDATE OF parts
    """
_IS_LOCATED: Final = """
    SELECT EXISTS (SELECT FROM objects_in_parts AS whole JOIN object_parts AS own ON own.plan_id = whole.plan_id
        AND own.file_path = whole.file_path AND own.version_id = whole.version_id AND own.etag = whole.etag
        AND own.object_bytes = whole.size_bytes AND own.rewritten_at = whole.rewritten_at
        WHERE own.caf_file_id = %(id)s)
    """
_END_SKIP: Final = """
    DELETE FROM skipped_objects AS old USING object_parts AS own WHERE own.caf_file_id = %(id)s
        AND old.source_id = own.source_id AND old.file_path = own.file_path AND old.version_id = own.version_id
        AND old.etag = own.etag AND old.size_bytes = own.object_bytes AND old.rewritten_at = own.rewritten_at
    """
# A chunk whose row is locked is being moved: its own run finds out.
_WITHDRAW_PLANNED: Final = """
    UPDATE caf_files SET state = 'withdrawn', updated_at = now(), reason = 'another part of its object cannot be archived: '
        || (SELECT name || ' is ' || CAST(%(after)s AS text) FROM caf_files WHERE caf_file_id = %(id)s)
    WHERE caf_file_id IN (SELECT caf_file_id FROM caf_files
        WHERE caf_file_id = ANY(%(all)s) AND state = 'planned' FOR NO KEY UPDATE SKIP LOCKED)
    """
_RECORD: Final = """
    INSERT INTO {table} (source_id, file_path, version_id, etag, size_bytes, rewritten_at, part, caf_file_id, start_byte,
        end_byte, last_modified, sha256, crc64nvme, s3_checksum, header_set)
    SELECT source_id, file_path, version_id, etag, object_bytes, rewritten_at, location_part, caf_file_id, %(start_byte)s,
        %(end_byte)s, %(last_modified)s, %(sha256)s, %(crc64nvme)s, %(s3_checksum)s, %(header_set)s
    FROM object_parts WHERE caf_file_id = %(id)s AND file_path = %(key)s
        AND version_id = coalesce(CAST(%(version_id)s AS text), '') AND etag = %(etag)s
        AND object_version(version_id, etag, object_bytes, rewritten_at) = %(object_version)s
        AND (part, part_count, start_byte, end_byte, object_bytes)
            = (%(number)s, %(count)s, %(first_byte)s, %(last_byte)s, %(object_bytes)s)
        AND end_byte - start_byte = %(end_byte)s - %(start_byte)s
    """


def register_parts(
    connection: Connection,
    source_id: int,
    plan_id: int,
    chunks: Mapping[int, int],
    parts: "Iterable[tuple[int, PlannedObject]]",
) -> None:
    """Write which parts the chunks of a plan have; `chunks` has the `caf_file_id` of each chunk number."""
    rows = (
        (
            chunks[number],
            planned.object.key.decode(),
            planned.object.version_id or "",
            planned.object.etag,
            planned.object.size_bytes,
            planned.object.rewritten_at,
            planned.part.number,
            planned.part.count,
            planned.part.start_byte,
            planned.part.end_byte,
        )
        for number, planned in parts
        if planned.part
    )
    _register(connection, source_id, plan_id, rows)


def import_part(connection: Connection, source_id: int, plan_id: int, caf_file_id: int, part: "PartLocation") -> None:
    """Write which part a chunk that only the store knew has, and its row."""
    of = part.part
    rewritten_at = part.last_modified if is_rewritten(part.object_version, part.etag, part.object_bytes) else None
    identity = (part.version_id or "", part.etag, part.object_bytes, rewritten_at)
    _register(
        connection,
        source_id,
        plan_id,
        [(caf_file_id, part.key, *identity, of.number, of.count, of.start_byte, of.end_byte)],
    )
    record_part(connection, "file_locations", caf_file_id, part)


def _register(connection: Connection, source_id: int, plan_id: int, rows: Iterable[tuple[Any, ...]]) -> None:
    connection.exec_driver_sql(
        'CREATE TEMPORARY TABLE splitting (caf_file_id bigint, file_path text COLLATE "C", version_id text COLLATE "C",'
        ' etag text COLLATE "C", object_bytes bigint, rewritten_at timestamptz, part integer, part_count integer,'
        " start_byte bigint, end_byte bigint) ON COMMIT DROP"
    )
    if copy_rows(connection, "splitting", _PART, rows):
        # psycopg cannot send -infinity.
        connection.exec_driver_sql("UPDATE splitting SET rewritten_at = '-infinity' WHERE rewritten_at IS NULL")
        connection.exec_driver_sql(_REGISTER, {"source_id": source_id, "plan_id": plan_id})


def has_part(connection: Connection, caf_file_id: int) -> bool:
    """Tell whether a chunk has a part of an object."""
    return bool(connection.exec_driver_sql(_HAS_PART, {"id": caf_file_id}).scalar_one())


def record_part(connection: Connection, table: str, caf_file_id: int, part: "PartLocation") -> None:
    """Write the row of a chunk's part to `pending_locations` or `file_locations`. It counts once all parts are located.

    Raises:
        LedgerError: it is not the part that the chunk was planned for; the transaction can only be rolled back.
    """
    of = part.part
    facts = {
        "id": caf_file_id,
        "number": of.number,
        "count": of.count,
        "first_byte": of.start_byte,
        "last_byte": of.end_byte,
        "header_set": part.headers.id,
        **{
            name: getattr(part, name)
            for name in (
                *("object_bytes", "key", "object_version", "version_id", "start_byte", "end_byte"),
                *("etag", "last_modified", "sha256", "crc64nvme", "s3_checksum"),
            )
        },
    }
    if connection.exec_driver_sql(_RECORD.format(table=table), facts).rowcount != 1:
        raise LedgerError(
            f"the chunk's part {of.number} of {of.count} of '{part.key}' is not the one that was planned for it",
            hint="the staged file is not the one that was sealed: check the disk",
        )


def follow_move(connection: Connection, caf_file_id: int, after: ChunkState) -> bool:
    """Let the other parts of an object follow from the move of a chunk that has one; return whether it has one.

    Where the chunk gave its part up, all are abandoned, their claim ends, and chunks that are only planned are withdrawn. Where
    all are located by now, the claim ends. Runs whose moves come at the same time wait for each other.
    """
    if not has_part(connection, caf_file_id):
        return False
    if after in CLAIMING:
        return True
    found = connection.exec_driver_sql(_ALL, {"id": caf_file_id}).scalars().all()
    if after not in IN_GOOD_STANDING:
        connection.exec_driver_sql("UPDATE object_parts SET abandoned = true WHERE caf_file_id = ANY(%(all)s)", {"all": found})
        connection.exec_driver_sql(_WITHDRAW_PLANNED, {"all": found, "after": after, "id": caf_file_id})
        withdraw_claims(connection, found)
    elif connection.exec_driver_sql(_IS_LOCATED, {"id": caf_file_id}).scalar_one():
        connection.exec_driver_sql(_END_SKIP, {"id": caf_file_id})
        connection.exec_driver_sql("DELETE FROM claims WHERE caf_file_id = ANY(%(all)s)", {"all": found})
    return True
