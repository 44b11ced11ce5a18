"""Objects that are split over chunks: the part of each chunk, and the effects of its moves.

The chunk of the first part holds the object's claim. The claim ends when all parts are located, or
when a chunk gives its part up, which abandons all parts. Only the view `objects_in_parts` decides
whether all are located. Source: docs/decisions/0020-objects-over-several-chunks.md.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    and_,
    any_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal,
    select,
    update,
)

from caf_pipeline.chunk_state import CLAIMING, IN_GOOD_STANDING, ChunkState
from caf_pipeline.errors import LedgerError
from caf_pipeline.inventory.manifest import PartLocation
from caf_pipeline.inventory.objects import is_rewritten
from caf_pipeline.inventory.plan import PlannedObject
from caf_pipeline.ledger.claims import copy_rows, withdraw_claims
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.ledger.tables import CLAIMS, METADATA, OBJECT_PARTS, SKIPPED_OBJECTS
from caf_pipeline.ledger.views import OBJECTS_IN_PARTS

_CREATE_SPLITTING: Final = """
    CREATE TEMPORARY TABLE splitting (
        caf_file_id bigint, file_path text COLLATE "C", version_id text COLLATE "C",
        etag text COLLATE "C", object_bytes bigint, rewritten_at timestamptz, part integer,
        part_count integer, start_byte bigint, end_byte bigint
    ) ON COMMIT DROP
    """
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
_OBJECT: Final = ("file_path", "version_id", "etag", "object_bytes", "rewritten_at")

_ALL: Final = bindparam("all", type_=ARRAY(BigInteger))


def _is_object(table: FromClause) -> ColumnElement[bool]:
    return and_(
        *(
            table.c["size_bytes" if name == "object_bytes" else name] == OBJECT_PARTS.c[name]
            for name in _OBJECT
        )
    )


_OWN: Final = OBJECT_PARTS.alias("own")
_PARTS: Final = OBJECT_PARTS.alias("parts")
# All transactions lock the rows in one order, which prevents deadlocks.
_LOCK_ALL: Final = (
    select(_PARTS.c.caf_file_id)
    .join_from(
        _OWN,
        _PARTS,
        and_(*(_OWN.c[name] == _PARTS.c[name] for name in ("plan_id", *_OBJECT))),
    )
    .where(_OWN.c.caf_file_id == bindparam("id"))
    .order_by(_PARTS.c.part)
    .with_for_update(of=_PARTS)
)
_IS_LOCATED: Final = select(
    exists().where(
        OBJECT_PARTS.c.caf_file_id == bindparam("id"),
        OBJECTS_IN_PARTS.c.plan_id == OBJECT_PARTS.c.plan_id,
        _is_object(OBJECTS_IN_PARTS),
    )
)
_ABANDON: Final = (
    update(OBJECT_PARTS).where(OBJECT_PARTS.c.caf_file_id == any_(_ALL)).values(abandoned=True)
)
_END_SKIP: Final = delete(SKIPPED_OBJECTS).where(
    OBJECT_PARTS.c.caf_file_id == bindparam("id"),
    SKIPPED_OBJECTS.c.source_id == OBJECT_PARTS.c.source_id,
    _is_object(SKIPPED_OBJECTS),
)
_END_CLAIM: Final = delete(CLAIMS).where(CLAIMS.c.caf_file_id == any_(_ALL))


def register_parts(
    connection: Connection,
    source_id: int,
    plan_id: int,
    chunks: Mapping[int, int],
    parts: Iterable[tuple[int, PlannedObject]],
) -> None:
    """Write the parts of a plan. `chunks` maps chunk numbers to `caf_file_id`."""
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


def import_part(
    connection: Connection, source_id: int, plan_id: int, caf_file_id: int, part: PartLocation
) -> None:
    """Write a restored chunk's part and its location."""
    row, numbers = part.row, part.part
    rewritten = is_rewritten(row.object_version, row.etag, part.object_bytes)
    columns = (
        caf_file_id,
        row.key,
        row.version_id or "",
        row.etag,
        part.object_bytes,
        row.last_modified if rewritten else None,
        numbers.number,
        numbers.count,
        numbers.start_byte,
        numbers.end_byte,
    )
    _register(connection, source_id, plan_id, [columns])
    record_part(connection, "file_locations", caf_file_id, part)


def _register(
    connection: Connection, source_id: int, plan_id: int, rows: Iterable[tuple[Any, ...]]
) -> None:
    connection.exec_driver_sql(_CREATE_SPLITTING)
    if copy_rows(connection, "splitting", _PART, rows):
        # psycopg cannot send -infinity.
        connection.exec_driver_sql(
            "UPDATE splitting SET rewritten_at = '-infinity' WHERE rewritten_at IS NULL"
        )
        connection.exec_driver_sql(
            query("register_parts"), {"source_id": source_id, "plan_id": plan_id}
        )


def has_part(connection: Connection, caf_file_id: int) -> bool:
    """Return whether the chunk has a part."""
    return bool(
        connection.execute(
            select(exists().where(OBJECT_PARTS.c.caf_file_id == caf_file_id))
        ).scalar_one()
    )


def record_part(connection: Connection, table: str, caf_file_id: int, part: PartLocation) -> None:
    """Write a part's row to `pending_locations` or `file_locations`.

    Raises LedgerError if it is not the planned part.
    """
    numbers, locations, planned = part.part, METADATA.tables[table], OBJECT_PARTS.c
    values = {
        "start_byte": part.row.start_byte,
        "end_byte": part.row.end_byte,
        "last_modified": part.row.last_modified,
        "sha256": part.row.sha256,
        "crc64nvme": part.crc64nvme,
        "s3_checksum": part.s3_checksum,
        "header_set": part.row.header_set,
    }
    identity = ("source_id", "file_path", "version_id", "etag", "rewritten_at", "caf_file_id")
    columns = {
        **{name: planned[name] for name in identity},
        "size_bytes": planned.object_bytes,
        "part": planned.location_part,
        **{name: literal(value, locations.c[name].type) for name, value in values.items()},
    }
    row = select(*columns.values()).where(
        planned.caf_file_id == caf_file_id,
        planned.file_path == part.row.key,
        planned.version_id == (part.row.version_id or ""),
        planned.etag == part.row.etag,
        func.object_version(
            planned.version_id, planned.etag, planned.object_bytes, planned.rewritten_at
        )
        == part.row.object_version,
        planned.object_bytes == part.object_bytes,
        planned.part == numbers.number,
        planned.part_count == numbers.count,
        planned.start_byte == numbers.start_byte,
        planned.end_byte == numbers.end_byte,
        planned.end_byte - planned.start_byte == part.row.end_byte - part.row.start_byte,
    )
    statement = insert(locations).from_select(list(columns), row).returning(locations.c.part)
    if connection.execute(statement).one_or_none() is None:
        raise LedgerError(
            f"part {numbers.number} of {numbers.count} of '{part.row.key}' is not the chunk's "
            "planned part",
            hint="the staged file differs from the sealed file: check the disk",
        )


def follow_move(connection: Connection, caf_file_id: int, after: ChunkState) -> bool:
    """Apply a chunk's move to its object's other parts; return whether it has a part.

    If the chunk gave its part up, all parts are abandoned, their claim ends, and planned chunks are
    withdrawn. If all parts are now located, the claim ends. Concurrent moves wait for each other.
    """
    if not has_part(connection, caf_file_id):
        return False
    if after in CLAIMING:
        return True
    parts = connection.execute(_LOCK_ALL, {"id": caf_file_id}).scalars().all()
    if after not in IN_GOOD_STANDING:
        connection.execute(_ABANDON, {"all": parts})
        connection.exec_driver_sql(
            query("withdraw_planned"), {"all": parts, "after": after, "id": caf_file_id}
        )
        withdraw_claims(connection, parts)
    elif connection.execute(_IS_LOCATED, {"id": caf_file_id}).scalar_one():
        connection.execute(_END_SKIP, {"id": caf_file_id})
        connection.execute(_END_CLAIM, {"all": parts})
    return True
