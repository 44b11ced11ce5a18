"""What the ledger takes in by the million: claims, locations and skips, by COPY inside the caller's
transaction.

All in COPY's binary form. Rows that Python has are written one by one; claims and locations come as
Arrow batches and are made COPY's form as columns, without an object a row. Memory is a batch, or
psycopg's buffer. Source: COPY in the PostgreSQL 18 manual.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import psycopg
import pyarrow as pa
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
    select,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import ProgrammingError

from caf_pipeline.chunk_state import GOOD
from caf_pipeline.errors import ClaimConflict, LedgerError
from caf_pipeline.inventory.objects import MAX_RETRY_AFTER, RETRY_AFTER, is_rewritten, version_id_of
from caf_pipeline.ledger.arrow import (
    CLAIM,
    LOCATION,
    SIGNATURE,
    TRAILER,
    as_rows,
    claim_batches,
    location_batches,
)
from caf_pipeline.ledger.engine import driver_connection
from caf_pipeline.ledger.query_files import query
from caf_pipeline.ledger.records import Skip
from caf_pipeline.ledger.tables import (
    CAF_FILES,
    CLAIMS,
    CURRENT_EXCEPTIONS,
    OBJECT_PARTS,
    PENDING_LOCATIONS,
    SKIPPED_OBJECTS,
)
from caf_pipeline.ledger.views import CHUNKS, NEWER_CLAIMS, OBJECTS_IN_PARTS
from caf_pipeline.system.pipeline_threads import prefetch_next

_RELEASED: Final = {"file_path": "text", "object_version": "text"}
SKIP: Final = {
    "file_path": "text",
    "version_id": "text",
    "etag": "text",
    "size_bytes": "int8",
    "rewritten_at": "timestamptz",
    "reason": "text",
    "detail": "text",
    "last_modified": "timestamptz",
    "retry_after": "interval",
}
KEY: Final = ("source_id", "file_path", "version_id", "etag", "size_bytes", "rewritten_at")
"""The columns that identify an object in claims, skips and locations."""


def same_object(left: FromClause, right: FromClause) -> ColumnElement[bool]:
    """Return the condition that rows of two tables are of one object."""
    return and_(*(left.c[name] == right.c[name] for name in KEY))


def copy_rows(
    connection: Connection, table: str, columns: Mapping[str, str], rows: Iterable[tuple[Any, ...]]
) -> int:
    """COPY rows into a table, columns and their types in the order of the rows; return how many
    they were.
    """
    count = 0
    statement = f"COPY {table} ({', '.join(columns)}) FROM STDIN (FORMAT binary)"
    with driver_connection(connection).cursor() as cursor, cursor.copy(statement) as copy:
        copy.set_types(list(columns.values()))
        for row in rows:
            copy.write_row(row)
            count += 1
    return count


def copy_location_batches(
    connection: Connection,
    table: str,
    source_id: int,
    caf_file_id: int,
    batches: Iterable[pa.RecordBatch],
) -> int:
    """COPY the locations of a chunk's objects, in batches of LOCATION_SCHEMA, into a table like
    `file_locations`.

    Returns how many they were.
    """
    same = {"source_id": _int4(source_id), "caf_file_id": _int8(caf_file_id)}
    return copy_batches(connection, table, same, LOCATION, location_batches(batches))


def copy_batches(
    connection: Connection,
    table: str,
    same: Mapping[str, bytes],
    columns: Sequence[str],
    batches: Iterable[pa.RecordBatch],
) -> int:
    """COPY rows into a table: columns that are the same in all rows, then these of the batches;
    return how many they were.
    """
    count = 0
    statement = f"COPY {table} ({', '.join([*same, *columns])}) FROM STDIN (FORMAT binary)"
    with driver_connection(connection).cursor() as cursor, cursor.copy(statement) as copy:
        copy.write(SIGNATURE)
        for size, rows in prefetch_next(
            (batch.num_rows, as_rows(list(same.values()), batch)) for batch in batches
        ):
            copy.write(rows)
            count += size
        copy.write(TRAILER)
    return count


def _int4(value: int) -> bytes:
    return value.to_bytes(4, "big", signed=True)


def _int8(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=True)


def copy_claims(
    connection: Connection,
    source_id: int,
    chunks: Mapping[int, int],
    claims: Iterable[pa.RecordBatch],
) -> None:
    """Load claims, batches as of `plan.read_identities`; `chunks` has the `caf_file_id` of each
    chunk number.

    Raises:
        ClaimConflict: an object is claimed already; the transaction can only be rolled back.
    """
    try:
        copy_batches(
            connection,
            "claims",
            {"source_id": _int4(source_id)},
            CLAIM,
            claim_batches(chunks, claims),
        )
    except psycopg.errors.UniqueViolation as error:
        raise ClaimConflict(
            f"'{_duplicate(error)}' is claimed by a chunk under way",
            hint="plan again: a new plan leaves it out",
        ) from error


_HAS_LOCATED: Final = select(
    exists().where(
        CHUNKS.c.source_id == bindparam("source_id"),
        CHUNKS.c.chunk_state == "located",
        CHUNKS.c.state.in_(GOOD),
    )
)
_PLANNED: Final = CAF_FILES.alias("planned")
_LOCATED: Final = CAF_FILES.alias("located")
# The objects in parts are few: they are compared with the claims, and not the other way round.
_CLAIMED_BUT_IN_PARTS: Final = (
    select(CLAIMS.c.file_path, _LOCATED.c.name)
    .join_from(OBJECTS_IN_PARTS, CLAIMS, same_object(OBJECTS_IN_PARTS, CLAIMS))
    .join(_PLANNED, _PLANNED.c.caf_file_id == CLAIMS.c.caf_file_id)
    .join(_LOCATED, _LOCATED.c.caf_file_id == OBJECTS_IN_PARTS.c.caf_file_id)
    .where(CLAIMS.c.source_id == bindparam("source_id"), _PLANNED.c.plan_id == bindparam("plan_id"))
    .limit(1)
)


def refuse_located(connection: Connection, source_id: int, plan_id: int) -> None:
    """Raise ClaimConflict where an object that the plan claims is located in a chunk in good
    standing.
    """
    if not connection.execute(_HAS_LOCATED, {"source_id": source_id}).scalar_one():
        return
    claim = connection.exec_driver_sql(
        query("claimed_but_located"), {"plan_id": plan_id, "good": GOOD}
    ).one_or_none()
    if claim is None:
        claim = connection.execute(
            _CLAIMED_BUT_IN_PARTS, {"source_id": source_id, "plan_id": plan_id}
        ).one_or_none()
    if claim is not None:
        raise ClaimConflict(
            f"'{claim.file_path}' is located in chunk {claim.name} already",
            hint="plan again: a new plan leaves it out",
        )


_FORGET_PENDING: Final = delete(PENDING_LOCATIONS).where(
    PENDING_LOCATIONS.c.caf_file_id == bindparam("id")
)


def write_locations(connection: Connection, caf_file_id: int, *, twice: LedgerError) -> int:
    """Copy a chunk's rows of `pending_locations` to `file_locations`; return how many were written.

    Rows that a chunk no longer in good standing left there are replaced. An object that is located
    in another chunk in good standing is not written.

    Raises: LedgerError: `twice`, if the chunk has an object twice; the transaction can only be
        rolled back.
    """
    try:
        return connection.exec_driver_sql(
            query("locate_pending"), {"caf_file_id": caf_file_id, "good": GOOD}
        ).rowcount
    except ProgrammingError as error:
        if not isinstance(error.orig, psycopg.errors.CardinalityViolation):
            raise
        raise twice from error


def locate_pending(connection: Connection, caf_file_id: int) -> int:
    """Move a chunk's rows from `pending_locations` to `file_locations`; return how many were
    written. As `write_locations`.
    """
    written = write_locations(
        connection, caf_file_id, twice=LedgerError("the chunk has an object twice", hint=TWICE)
    )
    forget_pending(connection, caf_file_id)
    return written


def forget_pending(connection: Connection, caf_file_id: int) -> int:
    """Delete the rows that the seal of a chunk wrote; return how many there were."""
    return connection.execute(_FORGET_PENDING, {"id": caf_file_id}).rowcount


TWICE: Final = (
    "two chunks have this object: report it as a bug, with what 'caf status' shows of the source"
)


_DOUBLINGS: Final = (
    16  # an hour doubled so often is far past the cap, and far below what an interval holds
)


def record_skips(
    connection: Connection, source_id: int, caf_file_id: int | None, skips: Iterable[Skip]
) -> None:
    """Write skips, a newer one in place of the older; end the claims that the chunk has on them."""
    if load_skips(connection, skips):
        values = {
            "source_id": source_id,
            "caf_file_id": caf_file_id,
            "doublings": _DOUBLINGS,
            "longest": MAX_RETRY_AFTER,
        }
        connection.exec_driver_sql(query("record_skips"), values)
        if caf_file_id is not None:
            connection.exec_driver_sql(query("end_skipped_claims"), {"caf_file_id": caf_file_id})


# Those that a chunk claims stay until it is located: should it skip them, how often they were
# skipped before counts.
_END_OLD_WAITING: Final = delete(SKIPPED_OBJECTS).where(
    SKIPPED_OBJECTS.c.source_id == bindparam("source_id"),
    SKIPPED_OBJECTS.c.reason == "waiting",
    SKIPPED_OBJECTS.c.last_at < func.now(),
    ~exists().where(same_object(CLAIMS, SKIPPED_OBJECTS)),
)


def record_waiting(
    connection: Connection,
    source_id: int,
    skips: Iterable[Skip],
    until: datetime | None,
    *,
    whole: bool,
) -> None:
    """Write which objects wait for the next plan, at most until then; where `whole`, no others of
    the source wait any more.
    """
    if load_skips(connection, skips):
        connection.exec_driver_sql(
            query("record_waiting"), {"source_id": source_id, "until": until}
        )
    if whole:
        connection.execute(_END_OLD_WAITING, {"source_id": source_id})


def waiting_since(connection: Connection, source_id: int, skips: Iterable[Skip]) -> datetime | None:
    """Return when the first of these objects began to wait that waits already; None where none
    does.
    """
    load_skips(connection, skips)
    since: datetime | None = connection.exec_driver_sql(
        query("waiting_since"), {"source_id": source_id}
    ).scalar_one()
    return since


def end_skips(
    connection: Connection,
    source_id: int,
    skips: Sequence[tuple[str, str]],
    *,
    listed_at: datetime,
    silent_from: datetime,
) -> None:
    """Let skips (key, object version) be due since `listed_at`, but for objects that were modified
    from `silent_from` on.
    """
    keys, versions = [key for key, _ in skips], [version for _, version in skips]
    values = {
        "source_id": source_id,
        "keys": keys,
        "versions": versions,
        "listed_at": listed_at,
        "silent_from": silent_from,
    }
    connection.exec_driver_sql(query("end_skips"), values)


def load_skips(connection: Connection, skips: Iterable[Skip]) -> int:
    """Load skips into `skipping`, a table of the transaction's own with the columns of `SKIP`.

    Returns their number.
    """
    connection.exec_driver_sql(
        'CREATE TEMPORARY TABLE skipping (file_path text COLLATE "C", version_id text COLLATE "C", '
        'etag text COLLATE "C",'
        " size_bytes bigint, rewritten_at timestamptz, reason text, detail text, last_modified "
        "timestamptz,"
        " retry_after interval) ON COMMIT DROP"
    )
    rows = (
        (
            skip.key,
            version_id_of(skip.object_version),
            skip.etag,
            skip.size_bytes,
            skip.last_modified
            if is_rewritten(skip.object_version, skip.etag, skip.size_bytes)
            else None,
            skip.reason.value,
            skip.detail,
            skip.last_modified,
            RETRY_AFTER[skip.reason],
        )
        for skip in skips
    )
    count = copy_rows(connection, "skipping", SKIP, rows)
    # psycopg cannot send -infinity.
    connection.exec_driver_sql(
        "UPDATE skipping SET rewritten_at = '-infinity' WHERE rewritten_at IS NULL"
    )
    return count


_END_CLAIMS: Final = delete(CLAIMS).where(
    CLAIMS.c.caf_file_id == bindparam("id"),
    ~exists().where(OBJECT_PARTS.c.caf_file_id == bindparam("id")),
)


def end_claims(connection: Connection, caf_file_id: int) -> int:
    """End all claims of a chunk; return their number.

    The claim on an object in parts is not one chunk's to end (`parts`).
    """
    return connection.execute(_END_CLAIMS, {"id": caf_file_id}).rowcount


# What a claim told of its key stays known: else an older content that is located would be called
# the current one until the next inventory. Where another content is current, an inventory has
# stated so, at a later time.
_STATE_RELEASED: Final = (
    insert(CURRENT_EXCEPTIONS)
    .from_select(
        ["source_id", "file_path", "stated_at", "object_version", "inventory"],
        select(
            NEWER_CLAIMS.c.source_id,
            NEWER_CLAIMS.c.file_path,
            NEWER_CLAIMS.c.last_modified,
            NEWER_CLAIMS.c.object_version,
            NEWER_CLAIMS.c.snapshot,
        ).where(NEWER_CLAIMS.c.caf_file_id == any_(bindparam("ids", type_=ARRAY(BigInteger)))),
    )
    .on_conflict_do_nothing()
)
_WITHDRAW_CLAIMS: Final = delete(CLAIMS).where(
    CLAIMS.c.caf_file_id == any_(bindparam("ids", type_=ARRAY(BigInteger)))
)


def withdraw_claims(connection: Connection, caf_file_ids: Sequence[int]) -> None:
    """End all claims of these chunks, which were given up: their objects may be planned again.

    First, that a claimed content was the newest of its key is recorded as an exception, where an
    older one is located: else that one would be called current.
    """
    connection.execute(_STATE_RELEASED, {"ids": caf_file_ids})
    connection.execute(_WITHDRAW_CLAIMS, {"ids": caf_file_ids})


def release_claims(
    connection: Connection, caf_file_id: int, released: Iterable[tuple[str, str]]
) -> None:
    """End the chunk's claims on these (key, object version), which may then be planned again."""
    connection.exec_driver_sql(
        'CREATE TEMPORARY TABLE releasing (file_path text COLLATE "C", object_version text COLLATE '
        '"C") ON COMMIT DROP'
    )
    if copy_rows(connection, "releasing", _RELEASED, released):
        connection.exec_driver_sql(query("state_released"), {"caf_file_id": caf_file_id})
        connection.exec_driver_sql(query("end_released_claims"), {"caf_file_id": caf_file_id})


def _duplicate(error: psycopg.errors.UniqueViolation) -> str:
    """Return the object's key of a unique key at fault, the second of the values that the server
    lists.
    """
    detail = (
        error.diag.message_detail or ""
    )  # reads `Key (source_id, …)=(1, <key>, …) already exists` in any language
    values = detail.partition(")=(")[2].rpartition(")")[0]
    # A version id, an ETag, a size and a time hold no ", ", which a key may.
    fields = re.fullmatch(r"\d+, (.*), [^,]*, [^,]*, \d+, [^,]*(?:, \d+)?", values, re.DOTALL)
    return fields[1] if fields else "an object"
