"""What the ledger takes in by the million: claims, locations and skips, by COPY inside the caller's transaction.

All in COPY's binary form. Rows that Python has are written one by one; claims and locations come as Arrow batches and are
made COPY's form as columns, without an object a row. Memory is a batch, or psycopg's buffer.
Source: COPY in the PostgreSQL 18 manual.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import psycopg
from sqlalchemy import Connection

from caf_pipeline.chunk_state import GOOD
from caf_pipeline.errors import ClaimConflict, LedgerError
from caf_pipeline.inventory.objects import MAX_RETRY_AFTER, RETRY_AFTER, is_rewritten, version_id_of
from caf_pipeline.ledger.engine import driver_connection
from caf_pipeline.ledger.records import Skip
from caf_pipeline.system.ahead import one_ahead

if TYPE_CHECKING:
    import pyarrow as pa

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
KEY: Final = "file_path, version_id, etag, size_bytes, rewritten_at"
"""The columns that identify an object of a source in claims, skips and locations."""


def copy_rows(connection: Connection, table: str, columns: Mapping[str, str], rows: Iterable[tuple[Any, ...]]) -> int:
    """COPY rows into a table, columns and their types in the order of the rows; return how many they were."""
    count = 0
    statement = f"COPY {table} ({', '.join(columns)}) FROM STDIN (FORMAT binary)"
    with driver_connection(connection).cursor() as cursor, cursor.copy(statement) as copy:
        copy.set_types(list(columns.values()))
        for row in rows:
            copy.write_row(row)
            count += 1
    return count


def copy_location_batches(
    connection: Connection, table: str, source_id: int, caf_file_id: int, batches: "Iterable[pa.RecordBatch]"
) -> int:
    """COPY the locations of a chunk's objects, in batches of LOCATION_SCHEMA, into a table like `file_locations`.

    Returns how many they were.
    """
    from caf_pipeline.ledger.arrow import LOCATION, location_batches  # noqa: PLC0415 - a look-up needs no pyarrow

    same = {"source_id": _int4(source_id), "caf_file_id": _int8(caf_file_id)}
    return copy_batches(connection, table, same, LOCATION, location_batches(batches))


def copy_batches(
    connection: Connection, table: str, same: Mapping[str, bytes], columns: Sequence[str], batches: "Iterable[pa.RecordBatch]"
) -> int:
    """COPY rows into a table: columns that are the same in all rows, then these of the batches; return how many they were."""
    count = 0
    from caf_pipeline.ledger.arrow import SIGNATURE, TRAILER, as_rows  # noqa: PLC0415 - as above

    statement = f"COPY {table} ({', '.join([*same, *columns])}) FROM STDIN (FORMAT binary)"
    with driver_connection(connection).cursor() as cursor, cursor.copy(statement) as copy:
        copy.write(SIGNATURE)
        for size, rows in one_ahead((batch.num_rows, as_rows(list(same.values()), batch)) for batch in batches):
            copy.write(rows)
            count += size
        copy.write(TRAILER)
    return count


def _int4(value: int) -> bytes:
    return value.to_bytes(4, "big", signed=True)


def _int8(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=True)


def copy_claims(connection: Connection, source_id: int, chunks: Mapping[int, int], claims: "Iterable[pa.RecordBatch]") -> None:
    """Load claims, batches as of `plan.read_identities`; `chunks` has the `caf_file_id` of each chunk number.

    Raises:
        ClaimConflict: an object is claimed already; the transaction can only be rolled back.
    """
    from caf_pipeline.ledger.arrow import CLAIM, claim_batches  # noqa: PLC0415 - as above

    try:
        copy_batches(connection, "claims", {"source_id": _int4(source_id)}, CLAIM, claim_batches(chunks, claims))
    except psycopg.errors.UniqueViolation as error:
        raise ClaimConflict(
            f"'{_duplicate(error)}' is claimed by a chunk under way", hint="plan again: a new plan leaves it out"
        ) from error


_HAS_LOCATED = (
    "SELECT EXISTS (SELECT FROM chunks WHERE source_id = %(source_id)s AND chunk_state = 'located' AND state = ANY(%(good)s))"
)
# LATERAL with LIMIT: one look-up a claim. Without statistics on the claims just loaded, the planner would read all locations.
_CLAIMED_BUT_LOCATED = """
    SELECT claims.file_path, located.name
    FROM caf_files AS planned
    JOIN claims ON claims.caf_file_id = planned.caf_file_id
    CROSS JOIN LATERAL (
        SELECT chunks.name FROM file_locations AS known JOIN chunks ON chunks.caf_file_id = known.caf_file_id
        WHERE known.source_id = claims.source_id AND known.file_path = claims.file_path AND known.version_id = claims.version_id
            AND known.etag = claims.etag AND known.size_bytes = claims.size_bytes AND known.rewritten_at = claims.rewritten_at
            AND known.part = 0 AND chunks.state = ANY(%(good)s)
        LIMIT 1) AS located
    WHERE planned.plan_id = %(plan_id)s
    LIMIT 1
    """


# Asked of the objects in parts, which are few, and not of the claims.
_CLAIMED_BUT_IN_PARTS = """
    SELECT file_path, located.name FROM objects_in_parts AS whole
    JOIN claims USING (source_id, file_path, version_id, etag, size_bytes, rewritten_at)
    JOIN caf_files AS planned ON planned.caf_file_id = claims.caf_file_id
    JOIN caf_files AS located ON located.caf_file_id = whole.caf_file_id
    WHERE claims.source_id = %(source_id)s AND planned.plan_id = %(plan_id)s LIMIT 1
    """


def refuse_located(connection: Connection, source_id: int, plan_id: int) -> None:
    """Raise ClaimConflict where an object that the plan claims is located in a chunk in good standing."""
    if not connection.exec_driver_sql(_HAS_LOCATED, {"source_id": source_id, "good": GOOD}).scalar_one():
        return
    found = connection.exec_driver_sql(_CLAIMED_BUT_LOCATED, {"plan_id": plan_id, "good": GOOD}).fetchone()
    if found is None:
        found = connection.exec_driver_sql(_CLAIMED_BUT_IN_PARTS, {"source_id": source_id, "plan_id": plan_id}).fetchone()
    if found is not None:
        raise ClaimConflict(
            f"'{found.file_path}' is located in chunk {found.name} already", hint="plan again: a new plan leaves it out"
        )


# A row of a chunk that is no longer in good standing gives way.
_TAKE_OVER = f"""
    ON CONFLICT (source_id, {KEY}, part) DO UPDATE SET
        caf_file_id = excluded.caf_file_id, start_byte = excluded.start_byte, end_byte = excluded.end_byte,
        last_modified = excluded.last_modified, sha256 = excluded.sha256, crc64nvme = excluded.crc64nvme,
        s3_checksum = excluded.s3_checksum, header_set = excluded.header_set
    WHERE NOT EXISTS (SELECT FROM chunks WHERE chunks.caf_file_id = old.caf_file_id AND state = ANY(%(good)s))
    """
LOCATE_RESTORED: Final = f"INSERT INTO file_locations AS old SELECT * FROM restoring {_TAKE_OVER}"
# In the order of the key, so that a new chunk fills the index from one page to the next.
_LOCATE_PENDING = f"""
    INSERT INTO file_locations AS old SELECT * FROM pending_locations WHERE caf_file_id = %(caf_file_id)s
    ORDER BY source_id, {KEY}, part {_TAKE_OVER}
    """


def locate_pending(connection: Connection, caf_file_id: int) -> int:
    """Move a chunk's rows from `pending_locations` to `file_locations`; return how many were written.

    Rows that a chunk no longer in good standing left there are replaced. An object that is located in another chunk in good
    standing is not written.

    Raises:
        LedgerError: the chunk has an object twice; the transaction can only be rolled back.
    """
    values = {"caf_file_id": caf_file_id, "good": GOOD}
    try:
        written = connection.exec_driver_sql(_LOCATE_PENDING, values).rowcount
    except psycopg.errors.CardinalityViolation as error:
        raise LedgerError("the chunk has an object twice", hint=TWICE) from error
    forget_pending(connection, caf_file_id)
    return written


def forget_pending(connection: Connection, caf_file_id: int) -> int:
    """Delete the rows that the seal of a chunk wrote; return how many there were."""
    return connection.exec_driver_sql("DELETE FROM pending_locations WHERE caf_file_id = %(id)s", {"id": caf_file_id}).rowcount


TWICE: Final = "two chunks have this object: report it as a bug, with what 'caf status' shows of the source"


_DOUBLINGS: Final = 16  # an hour doubled so often is far past the cap, and far below what an interval holds
_UPSERT_SKIPS = f"""
    INSERT INTO skipped_objects AS old (source_id, {KEY}, reason, detail, last_modified, caf_file_id, retry_at)
    SELECT DISTINCT ON ({KEY}) %(source_id)s, {KEY}, reason, detail, last_modified, %(caf_file_id)s,
        CASE WHEN reason = 'cold_storage' AND EXISTS (SELECT FROM noticed_keys WHERE noticed_keys.source_id = %(source_id)s
            AND noticed_keys.file_path = convert_to(skipping.file_path, 'UTF8') AND restored) THEN now()
            ELSE coalesce(now() + retry_after, 'infinity') END
    FROM skipping
    ON CONFLICT (source_id, {KEY}) DO UPDATE SET
        reason = excluded.reason, detail = excluded.detail,
        last_modified = excluded.last_modified, caf_file_id = excluded.caf_file_id, times = old.times + 1, last_at = now(),
        retry_at = CASE WHEN excluded.retry_at = 'infinity' THEN excluded.retry_at
            ELSE now() + least((excluded.retry_at - now()) * power(2, least(old.times, %(doublings)s)), %(longest)s) END
    """
_END_SKIPPED_CLAIMS = f"DELETE FROM claims WHERE caf_file_id = %(caf_file_id)s AND ({KEY}) IN (SELECT {KEY} FROM skipping)"
_END_RELEASED_CLAIMS = (
    "DELETE FROM claims USING releasing WHERE claims.caf_file_id = %(caf_file_id)s"
    " AND claims.file_path = releasing.file_path"
    " AND object_version(claims.version_id, claims.etag, claims.size_bytes, claims.rewritten_at) = releasing.object_version"
)


def record_skips(connection: Connection, source_id: int, caf_file_id: int | None, skips: Iterable[Skip]) -> None:
    """Write skips, a newer one in place of the older; end the claims that the chunk has on them."""
    if load_skips(connection, skips):
        values = {"source_id": source_id, "caf_file_id": caf_file_id, "doublings": _DOUBLINGS, "longest": MAX_RETRY_AFTER}
        connection.exec_driver_sql(_UPSERT_SKIPS, values)
        if caf_file_id is not None:
            connection.exec_driver_sql(_END_SKIPPED_CLAIMS, {"caf_file_id": caf_file_id})


_TAKE_WAITING = f"""
    INSERT INTO skipped_objects AS old (source_id, {KEY}, reason, detail, last_modified, times, retry_at)
    SELECT %(source_id)s, {KEY}, reason, detail, last_modified, 0, %(until)s FROM skipping
    ON CONFLICT (source_id, {KEY}) DO UPDATE SET
        reason = excluded.reason, detail = excluded.detail, last_modified = excluded.last_modified,
        caf_file_id = NULL, last_at = now(), retry_at = excluded.retry_at
    """
# Those that a chunk claims stay until it is located: should it skip them, how often they were skipped before counts.
_END_OLD_WAITING = """
    DELETE FROM skipped_objects AS old WHERE source_id = %(source_id)s AND reason = 'waiting' AND last_at < now()
        AND NOT EXISTS (SELECT FROM claims WHERE claims.source_id = old.source_id AND claims.file_path = old.file_path
            AND claims.version_id = old.version_id AND claims.etag = old.etag AND claims.size_bytes = old.size_bytes
            AND claims.rewritten_at = old.rewritten_at)
    """


def record_waiting(connection: Connection, source_id: int, skips: Iterable[Skip], until: datetime | None, *, whole: bool) -> None:
    """Write which objects wait for the next plan, at most until then; where `whole`, no others of the source wait any more."""
    if load_skips(connection, skips):
        connection.exec_driver_sql(_TAKE_WAITING, {"source_id": source_id, "until": until})
    if whole:
        connection.exec_driver_sql(_END_OLD_WAITING, {"source_id": source_id})


_WAITING_SINCE: Final = f"""
    SELECT min(first_at) FROM skipping JOIN skipped_objects AS old USING ({KEY})
    WHERE source_id = %(source_id)s AND old.reason = 'waiting'
    """


def waiting_since(connection: Connection, source_id: int, skips: Iterable[Skip]) -> datetime | None:
    """Return when the first of these objects began to wait that waits already; None where none does."""
    load_skips(connection, skips)
    since: datetime | None = connection.exec_driver_sql(_WAITING_SINCE, {"source_id": source_id}).scalar_one()
    return since


_END_SKIPS: Final = """
    UPDATE skipped_objects SET retry_at = %(listed_at)s
    FROM unnest(CAST(%(keys)s AS text[]), CAST(%(versions)s AS text[])) AS gone (key, version)
    WHERE source_id = %(source_id)s AND file_path = gone.key
        AND object_version(version_id, etag, size_bytes, rewritten_at) = gone.version
        AND retry_at > %(listed_at)s AND coalesce(last_modified, last_at) < %(silent_from)s
    """


def end_skips(
    connection: Connection, source_id: int, skips: Sequence[tuple[str, str]], *, listed_at: datetime, silent_from: datetime
) -> None:
    """Let skips (key, object version) be due since `listed_at`, but for objects that were modified from `silent_from` on."""
    keys, versions = [key for key, _ in skips], [version for _, version in skips]
    values = {"source_id": source_id, "keys": keys, "versions": versions, "listed_at": listed_at, "silent_from": silent_from}
    connection.exec_driver_sql(_END_SKIPS, values)


def load_skips(connection: Connection, skips: Iterable[Skip]) -> int:
    """Load skips into `skipping`, a table of the transaction's own with the columns of `SKIP`. Returns their number."""
    connection.exec_driver_sql(
        'CREATE TEMPORARY TABLE skipping (file_path text COLLATE "C", version_id text COLLATE "C", etag text COLLATE "C",'
        " size_bytes bigint, rewritten_at timestamptz, reason text, detail text, last_modified timestamptz,"
        " retry_after interval) ON COMMIT DROP"
    )
    rows = (
        (
            skip.key,
            version_id_of(skip.object_version),
            skip.etag,
            skip.size_bytes,
            skip.last_modified if is_rewritten(skip.object_version, skip.etag, skip.size_bytes) else None,
            skip.reason.value,
            skip.detail,
            skip.last_modified,
            RETRY_AFTER[skip.reason],
        )
        for skip in skips
    )
    count = copy_rows(connection, "skipping", SKIP, rows)
    # psycopg cannot send -infinity.
    connection.exec_driver_sql("UPDATE skipping SET rewritten_at = '-infinity' WHERE rewritten_at IS NULL")
    return count


def end_claims(connection: Connection, caf_file_id: int) -> int:
    """End all claims of a chunk; return their number. The claim on an object in parts is not one chunk's to end (`parts`)."""
    statement = (
        "DELETE FROM claims WHERE caf_file_id = %(id)s AND NOT EXISTS (SELECT FROM object_parts WHERE caf_file_id = %(id)s)"
    )
    return connection.exec_driver_sql(statement, {"id": caf_file_id}).rowcount


# What a claim told of its key stays known: else an older content that is located would be called the current one until the next
# inventory. Where another content is current, an inventory has stated so, at a later time.
_STATE_RELEASED = """
    INSERT INTO current_exceptions (source_id, file_path, stated_at, object_version, inventory)
    SELECT claims.source_id, claims.file_path, claims.last_modified,
        object_version(claims.version_id, claims.etag, claims.size_bytes, claims.rewritten_at), plans.snapshot
    FROM claims JOIN caf_files AS own USING (caf_file_id) JOIN plans USING (plan_id) {released}
    WHERE claims.caf_file_id = ANY(%(caf_file_ids)s) AND EXISTS (
        SELECT FROM file_locations AS known JOIN chunks ON chunks.caf_file_id = known.caf_file_id
        WHERE known.source_id = claims.source_id AND known.file_path = claims.file_path
            AND known.last_modified < claims.last_modified AND chunks.state = ANY(%(good)s))
    ON CONFLICT DO NOTHING
"""
_STATE_ALL_RELEASED = _STATE_RELEASED.format(released="")
_STATE_SOME_RELEASED = _STATE_RELEASED.format(
    released="""JOIN releasing ON releasing.file_path = claims.file_path AND releasing.object_version
        = object_version(claims.version_id, claims.etag, claims.size_bytes, claims.rewritten_at)"""
)


def withdraw_claims(connection: Connection, caf_file_ids: Sequence[int]) -> None:
    """End all claims of these chunks, which were given up: their objects may be planned again.

    First, that a claimed content was the newest of its key is recorded as an exception, where an older one is located: else that
    one would be called current.
    """
    connection.exec_driver_sql(_STATE_ALL_RELEASED, {"caf_file_ids": caf_file_ids, "good": GOOD})
    connection.exec_driver_sql("DELETE FROM claims WHERE caf_file_id = ANY(%(ids)s)", {"ids": caf_file_ids})


def release_claims(connection: Connection, caf_file_id: int, released: Iterable[tuple[str, str]]) -> None:
    """End the chunk's claims on these (key, object version), which may then be planned again."""
    connection.exec_driver_sql(
        'CREATE TEMPORARY TABLE releasing (file_path text COLLATE "C", object_version text COLLATE "C") ON COMMIT DROP'
    )
    if copy_rows(connection, "releasing", _RELEASED, released):
        connection.exec_driver_sql(_STATE_SOME_RELEASED, {"caf_file_ids": [caf_file_id], "good": GOOD})
        connection.exec_driver_sql(_END_RELEASED_CLAIMS, {"caf_file_id": caf_file_id})


def _duplicate(error: psycopg.errors.UniqueViolation) -> str:
    """Return the object's key of a unique key at fault, the second of the values that the server lists."""
    detail = error.diag.message_detail or ""  # reads `Key (source_id, …)=(1, <key>, …) already exists` in any language
    values = detail.partition(")=(")[2].rpartition(")")[0]
    # A version id, an ETag, a size and a time hold no ", ", which a key may.
    fields = re.fullmatch(r"\d+, (.*), [^,]*, [^,]*, \d+, [^,]*(?:, \d+)?", values, re.DOTALL)
    return fields[1] if fields else "an object"
