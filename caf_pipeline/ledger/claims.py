"""Claims, locations and skips of objects, with their headers, log times and failed reads.

Bulk writes are COPYs in the caller's transaction. Arrow batches are converted by column, without a
Python object for each row. Memory is one batch, or psycopg's buffer. Source: COPY in the PostgreSQL
18 manual.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
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
    update,
)
from sqlalchemy.exc import ProgrammingError

from caf_pipeline.chunk_state import GOOD
from caf_pipeline.errors import ClaimConflict, LedgerError
from caf_pipeline.inventory.manifest import LogTimes, PartLocation
from caf_pipeline.inventory.objects import MAX_RETRY_AFTER, RETRY_AFTER, is_rewritten, version_id_of
from caf_pipeline.ledger.arrow import (
    CLAIM,
    HEADER_SET,
    LOCATION,
    SIGNATURE,
    TRAILER,
    as_rows,
    batch_of_headers,
    claim_batches,
    header_set_batches,
    location_batches,
)
from caf_pipeline.ledger.engine import LedgerPart, driver_connection
from caf_pipeline.ledger.records import ReadFailures, Skip
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.ledger.tables import (
    CAF_FILES,
    CLAIMS,
    LOG_TIMES,
    OBJECT_PARTS,
    PENDING_LOCATIONS,
    READ_FAILURES,
    SKIPPED_OBJECTS,
)
from caf_pipeline.ledger.views import CHUNKS, OBJECTS_IN_PARTS
from caf_pipeline.system.pipeline_threads import prefetch_next

_CREATE_SKIPPING: Final = """
    CREATE TEMPORARY TABLE skipping (
        file_path text COLLATE "C", version_id text COLLATE "C", etag text COLLATE "C",
        size_bytes bigint, rewritten_at timestamptz, reason text, detail text,
        last_modified timestamptz, retry_after interval
    ) ON COMMIT DROP
    """
_CREATE_RELEASING: Final = """
    CREATE TEMPORARY TABLE releasing (
        file_path text COLLATE "C", object_version text COLLATE "C"
    ) ON COMMIT DROP
    """
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
"""Identifies an object."""


def same_object(left: FromClause, right: FromClause) -> ColumnElement[bool]:
    """The condition that rows of two tables belong to one object."""
    return and_(*(left.c[name] == right.c[name] for name in KEY))


def copy_rows(
    connection: Connection, table: str, columns: Mapping[str, str], rows: Iterable[tuple[Any, ...]]
) -> int:
    """COPY rows; return their number. `columns` maps names to types."""
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
    """COPY batches of LOCATION_SCHEMA into a table like `file_locations`."""
    same = {
        "source_id": _int4(source_id),
        "caf_file_id": caf_file_id.to_bytes(8, "big", signed=True),
    }
    return copy_batches(connection, table, same, LOCATION, location_batches(batches))


def copy_batches(
    connection: Connection,
    table: str,
    same: Mapping[str, bytes],
    columns: Sequence[str],
    batches: Iterable[pa.RecordBatch],
) -> int:
    """COPY batches with the values `same` in all rows; return the number of rows."""
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


def copy_claims(
    connection: Connection,
    source_id: int,
    chunks: Mapping[int, int],
    claims: Iterable[pa.RecordBatch],
) -> None:
    """COPY claims from batches of `plan.read_identities`.

    `chunks` maps chunk numbers to `caf_file_id`. After ClaimConflict the transaction must be rolled
    back.
    """
    same = {"source_id": _int4(source_id)}
    try:
        copy_batches(connection, "claims", same, CLAIM, claim_batches(chunks, claims))
    except psycopg.errors.UniqueViolation as error:
        # In any language the detail is `Key (source_id, …)=(1, <key>, …) already exists`.
        detail = error.diag.message_detail or ""
        values = detail.partition(")=(")[2].rpartition(")")[0]
        # Version id, ETag, size and time contain no ", ", but a key may.
        fields = re.fullmatch(r"\d+, (.*), [^,]*, [^,]*, \d+, [^,]*(?:, \d+)?", values, re.DOTALL)
        raise ClaimConflict(
            f"'{fields[1] if fields else 'an object'}' is claimed by a chunk under way",
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
# Objects in parts are few, so the query begins with them and not with the claims.
_CLAIMED_BUT_IN_PARTS: Final = (
    select(CLAIMS.c.file_path, _LOCATED.c.name)
    .join_from(OBJECTS_IN_PARTS, CLAIMS, same_object(OBJECTS_IN_PARTS, CLAIMS))
    .join(_PLANNED, _PLANNED.c.caf_file_id == CLAIMS.c.caf_file_id)
    .join(_LOCATED, _LOCATED.c.caf_file_id == OBJECTS_IN_PARTS.c.caf_file_id)
    .where(
        CLAIMS.c.source_id == bindparam("source_id"),
        _PLANNED.c.plan_id == bindparam("plan_id"),
        ~OBJECTS_IN_PARTS.c.from_unknown_post,
    )
    .limit(1)
)


def refuse_located(connection: Connection, source_id: int, plan_id: int) -> None:
    """Raise ClaimConflict if a chunk in good standing has an object that the plan claims."""
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
            f"'{claim.file_path}' is already located in chunk {claim.name}",
            hint="plan again: a new plan leaves it out",
        )


def write_locations(connection: Connection, caf_file_id: int, *, twice: LedgerError) -> int:
    """Copy a chunk's pending locations to `file_locations` and return their number.

    Replaces rows of chunks out of good standing, and skips objects of other chunks in good
    standing. Raises `twice` if the chunk has an object twice.
    """
    try:
        written = connection.exec_driver_sql(
            query("locate_pending"), {"caf_file_id": caf_file_id, "good": GOOD}
        ).rowcount
    except ProgrammingError as error:
        if not isinstance(error.orig, psycopg.errors.CardinalityViolation):
            raise
        raise twice from error
    if connection.exec_driver_sql(query("needs_statistics"), {"written": written}).scalar_one():
        # Another process may make them: then this load does not wait.
        connection.exec_driver_sql("ANALYZE (SKIP_LOCKED) file_locations")
    return written


def locate_pending(connection: Connection, caf_file_id: int) -> int:
    """Like `write_locations`, and delete the pending rows."""
    written = write_locations(
        connection, caf_file_id, twice=LedgerError("the chunk has an object twice", hint=TWICE)
    )
    forget_pending(connection, caf_file_id)
    return written


def forget_pending(connection: Connection, caf_file_id: int) -> int:
    """Delete a chunk's pending locations; return their number."""
    return connection.execute(
        delete(PENDING_LOCATIONS).where(PENDING_LOCATIONS.c.caf_file_id == caf_file_id)
    ).rowcount


TWICE: Final = "two chunks have this object: report it as a bug, with the output of 'caf status'"

_DOUBLINGS: Final = 16  # an hour doubled so often is past the cap, and fits an interval


def record_skips(
    connection: Connection, source_id: int, caf_file_id: int | None, skips: Iterable[Skip]
) -> None:
    """Write skips, replacing older ones, and end the chunk's claims on them."""
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


def load_skips(connection: Connection, skips: Iterable[Skip]) -> int:
    """Load skips into the temporary table `skipping`."""
    connection.exec_driver_sql(_CREATE_SKIPPING)
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
    """End a chunk's claims, except on an object in parts; return their number."""
    return connection.execute(_END_CLAIMS, {"id": caf_file_id}).rowcount


_WITHDRAW_CLAIMS: Final = delete(CLAIMS).where(
    CLAIMS.c.caf_file_id == any_(bindparam("ids", type_=ARRAY(BigInteger)))
)


def withdraw_claims(connection: Connection, caf_file_ids: Sequence[int]) -> None:
    """End all claims of chunks that were given up."""
    connection.exec_driver_sql(query("state_withdrawn"), {"ids": list(caf_file_ids)})
    connection.execute(_WITHDRAW_CLAIMS, {"ids": caf_file_ids})


def release_claims(
    connection: Connection, caf_file_id: int, released: Iterable[tuple[str, str]]
) -> None:
    """End claims on (key, object version), to be planned again."""
    connection.exec_driver_sql(_CREATE_RELEASING)
    if copy_rows(connection, "releasing", _RELEASED, released):
        connection.exec_driver_sql(query("state_released"), {"caf_file_id": caf_file_id})
        connection.exec_driver_sql(query("end_released_claims"), {"caf_file_id": caf_file_id})


# Skips of claimed objects stay until the chunk is located. If it skips them again, the earlier
# skips count.
_END_OLD_WAITING: Final = delete(SKIPPED_OBJECTS).where(
    SKIPPED_OBJECTS.c.source_id == bindparam("source_id"),
    SKIPPED_OBJECTS.c.reason == "waiting",
    SKIPPED_OBJECTS.c.last_at < func.now(),
    ~exists().where(same_object(CLAIMS, SKIPPED_OBJECTS)),
)


class Skips(LedgerPart):
    """Writes skips that belong to no chunk."""

    def record(self, source: str, skips: Iterable[Skip]) -> None:
        """A skip of the same object is replaced."""
        with self._of_source(source) as (connection, source_id):
            record_skips(connection, source_id, None, skips)

    def end(
        self,
        source: str,
        skips: Sequence[tuple[str, str]],
        *,
        listed_at: datetime,
        silent_from: datetime,
    ) -> None:
        """End skips of objects that a whole inventory did not list. Listed again, they are planned.

        `skips` are recorded keys and object versions. Skips of objects modified from `silent_from`
        on stay:
        the inventory may lack them.
        """
        with self._of_source(source) as (connection, source_id):
            values = {
                "source_id": source_id,
                "keys": [key for key, _ in skips],
                "versions": [version for _, version in skips],
                "listed_at": listed_at,
                "silent_from": silent_from,
            }
            connection.exec_driver_sql(query("end_skips"), values)

    def record_waiting(
        self, source: str, skips: Iterable[Skip], until: datetime | None, *, whole: bool
    ) -> None:
        """Write objects that wait for the next plan, as skips of reason `waiting`.

        The sensor takes them as new at `until`. If `whole`, no other object of the source waits.
        """
        with self._of_source(source) as (connection, source_id):
            values = {"source_id": source_id}
            if load_skips(connection, skips):
                connection.exec_driver_sql(query("record_waiting"), {**values, "until": until})
            if whole:
                connection.execute(_END_OLD_WAITING, values)

    def waiting_since(self, source: str, skips: Iterable[Skip]) -> datetime | None:
        with self._of_source(source) as (connection, source_id):
            load_skips(connection, skips)
            since: datetime | None = connection.exec_driver_sql(
                query("waiting_since"), {"source_id": source_id}
            ).scalar_one()
        return since


_FAILURES_OF_CHUNK: Final = (
    select(
        READ_FAILURES.c.file_path,
        READ_FAILURES.c.object_version,
        READ_FAILURES.c.times,
        READ_FAILURES.c.last_run,
    )
    .join_from(READ_FAILURES, CAF_FILES)
    .where(CAF_FILES.c.name == bindparam("chunk"))
)


class FailedReads(LedgerPart):
    """Counts the runs that failed on an object."""

    def list(self, chunk: str) -> Mapping[tuple[str, str], ReadFailures]:
        """By key and version."""
        rows = self._rows(_FAILURES_OF_CHUNK, chunk=chunk)
        return {
            (row.file_path, row.object_version): ReadFailures(row.times, row.last_run)
            for row in rows
        }

    def count(self, chunk: str, objects: Sequence[tuple[str, str]], run: str) -> None:
        """Objects are (key, version). Each counts once for a run."""
        keys, versions = [key for key, _ in objects], [version for _, version in objects]
        values = {"chunk": chunk, "keys": keys, "versions": versions, "run": run}
        self._execute(query("count_read_failures"), **values)


Batches = Callable[[], Iterable[pa.RecordBatch]]
"""Returns an iterator over all batches, from the first, at each call."""

_CREATE_NAMING: Final = """
    CREATE TEMPORARY TABLE naming (
        header_set bytea, content_type text, content_encoding text, content_language text,
        content_disposition text, cache_control text, expires text, user_metadata text
    ) ON COMMIT DROP
    """


def record_header_sets(
    connection: Connection, batches: Iterable[pa.RecordBatch], part: PartLocation | None = None
) -> None:
    """Insert the header sets of a chunk's objects and of its part. Existing sets stay.

    `batches` have the columns of LOCATION_SCHEMA.
    """
    of_part = [batch_of_headers(part.headers)] if part is not None else []
    connection.exec_driver_sql(_CREATE_NAMING)
    if copy_batches(
        connection, "naming", {}, HEADER_SET, header_set_batches(chain(of_part, batches))
    ):
        connection.exec_driver_sql(query("insert_header_sets"))


_LOG_TIME: Final = {
    "caf_file_id": "int8",
    "start_byte": "int8",
    "first_ms": "int8",
    "last_ms": "int8",
}
_LOGS_CHUNK: Final = CAF_FILES.c.caf_file_id == bindparam("id")
_HAS_TIMES: Final = update(CAF_FILES).where(_LOGS_CHUNK).values(has_log_times=True)
_HAS_NO_TIMES: Final = (
    update(CAF_FILES).where(_LOGS_CHUNK, CAF_FILES.c.has_log_times).values(has_log_times=False)
)


def record_log_times(
    connection: Connection, caf_file_id: int, logs: Collection[LogTimes] | None
) -> None:
    """Write a chunk's log times. None: its packing did not look for logs."""
    if logs is not None:
        connection.execute(_HAS_TIMES, {"id": caf_file_id})
    if logs:
        copy_rows(connection, "log_times", _LOG_TIME, ((caf_file_id, *times) for times in logs))


def forget_log_times(connection: Connection, caf_file_id: int) -> None:
    """Delete the times of a chunk's logs."""
    connection.execute(delete(LOG_TIMES).where(LOG_TIMES.c.caf_file_id == caf_file_id))
    connection.execute(_HAS_NO_TIMES, {"id": caf_file_id})
