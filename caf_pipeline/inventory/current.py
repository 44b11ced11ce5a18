"""What is current in the bucket: the identities of an inventory's objects, and where LastModified
does not tell what is current.

    identify         the snapshot, each object under the identity that it is, or will be, archived
    as find_exceptions  keys whose current content is not their located content of greatest
    LastModified

Locations are ordered by LastModified. An exception is the statement of an inventory: at this time
the key had this identity, or was gone. Of both, the latest holds. All of it is files in, files out,
in memory bounded by windows of keys.

Source: "Which objects are to be archived" in docs/explanation/design.md;
docs/decisions/0014-what-is-current.md.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.errors import IntegrityError
from caf_pipeline.inventory.filters import NO_FILTER, ObjectFilter
from caf_pipeline.inventory.key_windows import KeyWindow, bounded, key_windows
from caf_pipeline.inventory.keyed_rows import KeyedRows
from caf_pipeline.inventory.ledger_rows import EXCEPTION_SCHEMA
from caf_pipeline.inventory.objects import TIME_FORMAT, CurrentException
from caf_pipeline.inventory.snapshot import (
    SNAPSHOT_SCHEMA,
    TAKE_AGAIN,
    Snapshot,
    has_rows,
    inventory_query,
    require_whole,
)
from caf_pipeline.system.ahead import one_ahead
from caf_pipeline.system.parquet import (
    DEFAULT_BUDGET,
    Query,
    QueryBudget,
    WholeParquet,
    files_of,
    translate_errors,
    write_whole,
)

_Flags = np.ndarray[Any, np.dtype[np.bool_]]

KeyRange = tuple[bytes, bytes | None]
"""Keys greater than the first, up to and including the second; all that follow where that is
None.
"""

ROWS_READ: Final = 8_192
"""Exceptions that are in memory, where they are read one by one."""

_WITH_TIME: Final = (
    "listed.object_version || ':' || "
    f"strftime(make_timestamp(epoch_us(listed.last_modified)), '{TIME_FORMAT}')"
)

_BYTES: Final = r"regexp_replace(object_version, ':\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$', '')"
"""An identity without the LastModified that it may hold."""

# Objects whose bytes are located, and were written again: listed without version id, under another
# LastModified. What is under way is looked at once it is located, and what is skipped once the skip
# is due.
_REWRITTEN: Final = f"""WITH archived AS (SELECT *, {_BYTES} AS bytes FROM standing), known AS (
        SELECT key, object_version, bool_or(standing = 'located') AS located, bool_or(standing =
            'claimed') AS claimed,
            bool_or(standing = 'skipped' AND NOT due) AS skipped, max(last_modified) FILTER
                (standing = 'located')
            AS last_modified
        FROM standing GROUP BY key, object_version
    ), located AS (SELECT DISTINCT key, bytes FROM archived WHERE standing = 'located'), equal AS (
        SELECT key, last_modified, {_BYTES} AS bytes, arg_max(object_version, stated_at) AS
            object_version FROM exception
        WHERE last_modified IS NOT NULL AND object_version IS NOT NULL GROUP BY ALL
    ), again AS (
        SELECT listed.*, {_WITH_TIME} AS with_time FROM snapshot AS listed
        JOIN located ON located.key = listed.key AND located.bytes = listed.object_version
        LEFT JOIN known AS first ON first.key = listed.key AND first.object_version =
            listed.object_version
        WHERE listed.version_id IS NULL AND NOT coalesce(first.claimed, false)
            AND first.last_modified IS DISTINCT FROM listed.last_modified
    )
    SELECT again.* EXCLUDE (object_version, with_time), again.object_version AS bytes,
        CASE WHEN same.located AND NOT coalesce(own.located OR own.claimed, false) THEN
            same.object_version
            ELSE with_time END AS object_version,
        NOT coalesce(own.located OR own.claimed OR own.skipped, false) AND NOT
            coalesce(same.located, false) AS to_compare
    FROM again
    LEFT JOIN known AS own ON own.key = again.key AND own.object_version = with_time
    LEFT JOIN equal ON equal.key = again.key AND equal.last_modified = again.last_modified AND
        equal.bytes = again.object_version
    LEFT JOIN known AS same ON same.key = again.key AND same.object_version = equal.object_version
    ORDER BY again.key, again.last_modified"""

_REWRITTEN_SCHEMA: Final = SNAPSHOT_SCHEMA.append(
    pa.field("bytes", pa.string(), nullable=False)
).append(pa.field("to_compare", pa.bool_(), nullable=False))

_KEYS: Final = pa.schema([SNAPSHOT_SCHEMA.field("key")])

_FACTS: Final = pa.schema(
    [
        SNAPSHOT_SCHEMA.field("key"),
        pa.field("object_version", pa.string()),
        pa.field("last_modified", pa.timestamp("us", tz="UTC")),
        pa.field("sound", pa.bool_(), nullable=False),  # current in the bucket, or located
    ]
)
"""What is listed, known or stated of a key, a row each."""

_TOLD: Final = ("key", "object_version", "last_modified")

_WindowFacts = tuple[KeyWindow, pa.Table, pa.Table]
"""Some keys, what is listed of them, and what is known or stated (_FACTS)."""

_IDENTIFIED: Final = """SELECT listed.* REPLACE (coalesce(rewritten.object_version,
    listed.object_version) AS object_version)
    FROM listed LEFT JOIN rewritten ON rewritten.key = listed.key AND rewritten.bytes =
        listed.object_version
        AND rewritten.last_modified = listed.last_modified AND listed.version_id IS NULL AND NOT
            listed.is_delete_marker
    ORDER BY listed.key, listed.last_modified, object_version"""


@dataclass(frozen=True, slots=True)
class Identified:
    """A snapshot's objects under their identities (SNAPSHOT_SCHEMA): the snapshot's own file where
    none is another.

    Attributes: to_compare: a file of those whose headers are to be compared with the archived ones
        (SNAPSHOT_SCHEMA). Until that is
            done they have an identity of their own, as if they differed; so have those that the
            filters leave out.
        to_compare_count: how many these are.
        unsettled: a file of the same form that has all of these objects but those of settled keys,
        see `_write_unsettled`.
        settled_count: how many these are: all are located, and current. 0 where none was looked
        for.
        unsettled_keys: a file of the keys that are not settled; None where none was looked for: any
        may be.
    """

    path: Path
    to_compare: Path
    to_compare_count: int
    unsettled: Path
    settled_count: int = 0
    unsettled_keys: Path | None = None


def identify(
    snapshot: Snapshot,
    standing: Path,
    exceptions: Path,
    out: Path,
    *,
    filters: ObjectFilter = NO_FILTER,
    budget: QueryBudget = DEFAULT_BUDGET,
) -> Identified:
    """Find the identity of each object of a snapshot.

    Nothing is looked for of keys that it does not cover.

    An object without a version id may have been written again with the same ETag and size. It keeps
    its identity if an exception says that bytes and headers are the archived ones. Else its
    LastModified is part of the identity.

    Where every key is settled, each file is read once. Else all of the snapshot is read before, and
    its checksums compared.

    Args:
        snapshot: its file is sorted by key.
        standing: a file of STANDING_SCHEMA.
        exceptions: one of EXCEPTION_SCHEMA.
        out: gets the snapshot, where an identity changed; more files are written beside it.
        filters: what they leave out is not to be compared.
        budget: bounds the memory.

    Raises: StagingError: a file cannot be written. IntegrityError: a file cannot be read, or the
        snapshot is damaged.
    """
    rewritten, to_compare = (
        out.with_name(f"{out.stem}.{kind}.parquet") for kind in ("rewritten", "to_compare")
    )
    unsettled, settled_count, unsettled_keys = snapshot.path, 0, None
    with _query(snapshot.path, standing, exceptions, out, budget) as query:

        def found() -> Iterator[pa.RecordBatch]:
            for window in key_windows(snapshot.path, snapshot.keys):
                if _hold(query, window):
                    yield from query.batches(_REWRITTEN)

        if _has_located(query):
            unsettled, unsettled_keys = (
                out.with_name(f"{out.stem}.{kind}.parquet")
                for kind in ("unsettled", "unsettled_keys")
            )
            settled_count = _write_unsettled(
                query, snapshot, (standing, exceptions), unsettled, unsettled_keys
            )
            query.table("whole_unsettled", unsettled_keys)
        else:
            require_whole(snapshot.path)
        changed = write_whole(found() if unsettled_keys else (), rewritten, _REWRITTEN_SCHEMA)
        query.table("whole_rewritten", rewritten)
        comparing = f"SELECT * FROM whole_rewritten WHERE to_compare AND {filters.sql} IS NULL"
        waiting = write_whole(query.batches(comparing), to_compare, SNAPSHOT_SCHEMA)
        if not changed.row_count:
            return Identified(
                snapshot.path, to_compare, 0, unsettled, settled_count, unsettled_keys
            )

        def identified(path: Path) -> Iterator[pa.RecordBatch]:
            query.table("whole_listed", path)
            for window in key_windows(path):
                query.view("listed", f"SELECT * FROM whole_listed WHERE {bounded(window)}")
                query.view("rewritten", f"SELECT * FROM whole_rewritten WHERE {bounded(window)}")
                yield from query.batches(_IDENTIFIED)

        write_whole(identified(snapshot.path), out, SNAPSHOT_SCHEMA)
        write_whole(identified(unsettled), unsettled, SNAPSHOT_SCHEMA)
    return Identified(out, to_compare, waiting.row_count, unsettled, settled_count, unsettled_keys)


# A key that is not listed, or whose latest version is a delete marker, is gone: ''. Where
# LastModified cannot order what is known of a key (two of the same time), nothing but a statement
# tells what is current. It does not order versions by itself: an upload in parts has the time at
# which it began. So every version that this inventory may have archived counts as known; one that a
# filter leaves out does not, and what is located is not current beside it.
_EXCEPTIONS: Final = """WITH listed AS (
        SELECT key, arg_max(object_version, last_modified) FILTER (is_latest) AS object_version,
            max(last_modified) FILTER (is_latest) AS last_modified
        FROM snapshot GROUP BY key
    ), known AS (
        SELECT key, object_version, last_modified FROM standing WHERE standing <> 'skipped'
        UNION SELECT key, object_version, last_modified FROM snapshot WHERE {left_out} IS NULL
            AND NOT EXISTS (SELECT 1 FROM standing WHERE standing.key = snapshot.key
            AND standing.object_version = snapshot.object_version AND standing <> 'skipped')
    ), latest AS (
        SELECT key, max(last_modified) AS last_modified, arg_max(object_version, last_modified) AS
            object_version
        FROM known GROUP BY key
    ), ties AS (
        SELECT key FROM known JOIN latest USING (key, last_modified) GROUP BY key HAVING
            count(DISTINCT known.object_version) > 1
    ), said AS (
        SELECT key, max(stated_at) AS said_at, arg_max(coalesce(object_version, ''), stated_at) AS
            object_version
        FROM exception GROUP BY key
    ), judged AS (
        SELECT latest.key, latest.last_modified AS latest_modified, said_at, listed.last_modified,
            coalesce(listed.object_version, '') AS object_version,
            listed.key IS NOT NULL AND listed.object_version IS NULL AS without_latest,
            CASE WHEN said_at >= latest.last_modified THEN said.object_version
                WHEN ties.key IS NULL THEN latest.object_version END AS believed
        FROM latest LEFT JOIN listed USING (key) LEFT JOIN said USING (key) LEFT JOIN ties USING
            (key)
    )
    SELECT key, greatest(TIMESTAMPTZ '{taken_at}', latest_modified, said_at, last_modified) AS
        stated_at,
        nullif(object_version, '') AS object_version, NULL AS last_modified
    FROM judged WHERE object_version IS DISTINCT FROM believed
        AND (NOT without_latest OR key IN (SELECT key FROM marker WHERE is_latest))
        {unless} ORDER BY key"""

# A report may lack what was written or found out shortly before its time, and was not there to see
# what came later. What it lists it has seen.
_SETTLED: Final = """AND key NOT IN (SELECT key FROM standing ANTI JOIN snapshot USING (key,
    object_version)
            WHERE standing <> 'skipped' AND standing.last_modified >= TIMESTAMPTZ '{silent_from}')
        AND coalesce(said_at < TIMESTAMPTZ '{silent_from}', true)"""


def find_exceptions(
    snapshot: Snapshot,
    identified: Identified,
    standing: Path,
    exceptions: Path,
    out: Path,
    *,
    superseded: Sequence[KeyRange] = (),
    filters: ObjectFilter = NO_FILTER,
    budget: QueryBudget = DEFAULT_BUDGET,
) -> int:
    """Write the exceptions that this inventory is to add (EXCEPTION_SCHEMA); return how many there
    are.

    An exception is never earlier than a LastModified known of its key: all that is known was listed
    before. A report, which may be taken long after its time, adds none of a key of which something
    as late as the report is known.

    Args: snapshot: of the inventory. identified: its objects under their identities, by the same
        standing and exceptions. standing: of STANDING_SCHEMA; what is claimed counts as if it were
        located, since it may be at any time. exceptions: of EXCEPTION_SCHEMA, those that are known.
        out: replaced where it exists. superseded: ranges of keys that later inventories cover: of
        these keys this one tells nothing. filters: what leaves objects out of this inventory's
        plan. budget: bounds the memory.

    Raises:
        StagingError: a file cannot be written. IntegrityError: a file cannot be read.
    """
    if identified.unsettled_keys and not has_rows(
        identified.unsettled_keys
    ):  # as where nothing is new
        with translate_errors(out):
            return write_whole((), out, EXCEPTION_SCHEMA).row_count
    within = "".join(f" AND NOT ({bounded((after, until))})" for after, until in superseded)
    silent_from = snapshot.silent_from
    unless = _SETTLED.replace("{silent_from}", silent_from.isoformat()) if silent_from else ""
    statement = _EXCEPTIONS.replace("{taken_at}", snapshot.taken_at.isoformat()).replace(
        "{unless}", unless
    )
    statement = statement.replace("{left_out}", filters.sql)
    with _query(identified.path, standing, exceptions, out, budget) as query:
        if identified.unsettled_keys:
            query.table("whole_unsettled", identified.unsettled_keys)
        else:
            query.view(
                "whole_unsettled",
                "SELECT key FROM whole_snapshot UNION ALL SELECT key FROM whole_standing",
            )

        def found() -> Iterator[pa.RecordBatch]:
            for window in key_windows(identified.path, snapshot.keys):
                if _hold(query, window, f"AND is_supported(key){within}"):
                    yield from query.batches(statement)

        return write_whole(found() if _has_known(query) else (), out, EXCEPTION_SCHEMA).row_count


def read_exceptions(path: Path) -> Iterator[CurrentException]:
    """Yield what `find_exceptions` wrote, some rows in memory."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_READ):
            for row in batch.to_pylist():
                yield CurrentException(**{**row, "key": row["key"].decode()})


@contextmanager
def _query(
    snapshot: Path, standing: Path, exceptions: Path, out: Path, budget: QueryBudget
) -> Iterator[Query]:
    """Open a query over the files, as `whole_snapshot`, `whole_standing` and `whole_exception`; it
    is for `out`.
    """
    with translate_errors(out), inventory_query(out, budget) as query:
        query.table("whole_snapshot", snapshot)
        query.table("whole_standing", standing)
        query.table("whole_exception", exceptions)
        yield query


def _write_unsettled(
    query: Query,
    snapshot: Snapshot,
    files: tuple[Path, Path],
    unsettled: Path,
    unsettled_keys: Path,
) -> int:
    """Write all objects of the snapshot but those of settled keys (SNAPSHOT_SCHEMA), and which keys
    are not settled (_KEYS).

    Returns the number of settled keys, each of one object. A key is settled that is listed once,
    known once and of which nothing was stated: it is located as it is listed, so that neither its
    identity nor what is current is another than it seems. In most inventories nearly all keys are
    settled: their columns are read here with their checksums, which DuckDB does not compare.
    """
    rest = WholeParquet(unsettled, SNAPSHOT_SCHEMA, durable=False)
    listed_count = 0

    def keys() -> Iterator[pa.RecordBatch]:
        nonlocal listed_count
        is_whole = False
        for window, listed, known in one_ahead(_facts(snapshot, *files)):
            listed_count += len(listed)
            some = pa.table({"key": _not_settled(listed, known)})
            if not len(some):
                continue
            if not is_whole:
                require_whole(snapshot.path)
                is_whole = True
            query.rows_of("found", some)
            for batch in query.batches(
                f"SELECT * FROM whole_snapshot WHERE {bounded(window)} AND key IN (FROM found)"
                " ORDER BY key, last_modified, object_version"
            ):
                rest.write(batch.select(SNAPSHOT_SCHEMA.names).cast(SNAPSHOT_SCHEMA))
            yield from query.batches("SELECT key FROM found WHERE is_supported(key)")
        if listed_count != snapshot.row_count:
            raise IntegrityError(
                f"{snapshot.path} declares {snapshot.row_count} rows, and has {listed_count}",
                hint=TAKE_AGAIN,
            )

    try:
        write_whole(keys(), unsettled_keys, _KEYS)
        rest.close({})
        rest.publish()
    finally:
        rest.abort()
    return listed_count - rest.row_count


def _facts(snapshot: Snapshot, standing: Path, exceptions: Path) -> Iterator[_WindowFacts]:
    """Yield what is listed, and what is known or stated, of all keys that the snapshot covers."""
    with ExitStack() as stack:
        listing = stack.enter_context(
            KeyedRows(snapshot.path, (*_TOLD, "is_latest", "is_delete_marker"))
        )
        stating = stack.enter_context(KeyedRows(exceptions, ("key",)))
        knowing = [
            stack.enter_context(KeyedRows(path, (*_TOLD, "standing")))
            for path in files_of(standing)
        ]
        for window in key_windows(snapshot.path, snapshot.keys, known=standing):
            listed, stated = listing.read(window), stating.read(window)["key"]
            known = [rows.read(window) for rows in knowing]
            nothing = pa.nulls(len(stated))
            yield (
                window,
                _as_facts(listed, pc.and_not(listed["is_latest"], listed["is_delete_marker"])),
                pa.concat_tables(
                    [
                        *(_as_facts(rows, pc.equal(rows["standing"], "located")) for rows in known),
                        pa.table(
                            [stated, nothing, nothing, pa.repeat(False, len(stated))], _FACTS.names
                        ).cast(_FACTS),
                    ]
                ),
            )


def _as_facts(rows: pa.Table, sound: pa.ChunkedArray) -> pa.Table:
    return rows.select(_TOLD).append_column("sound", sound).cast(_FACTS)


def _not_settled(listed: pa.Table, known: pa.Table) -> pa.ChunkedArray:
    """Return the keys, each once, that are not settled, by all _FACTS of some keys in any order."""
    if (
        listed["key"].equals(known["key"])
        and pc.all(pc.less(listed["key"][:-1], listed["key"][1:]), min_count=0).as_py()
    ):
        return listed["key"].filter(pa.array(~_agree(listed, known)))
    order = pc.sort_indices(pa.concat_tables([listed, known]), [("key", "ascending")])
    facts = pa.concat_tables([listed, known]).take(order)
    is_listed = order.to_numpy() < len(listed)
    one, two = facts[:-1], facts[1:]
    follows = np.concatenate(
        [[False], pc.equal(one["key"], two["key"]).to_numpy(), [False]]
    )  # the fact before is of its key
    alone = ~follows[:-2] & ~follows[2:]
    pairs = alone & _agree(one, two) & (is_listed[:-1] != is_listed[1:])
    settled = np.concatenate([pairs, [False]]) | np.concatenate([[False], pairs])
    return facts["key"].filter(pa.array(~settled & ~follows[:-1]))


def _agree(one: pa.Table, two: pa.Table) -> _Flags:
    """Tell of each two rows whether both are sound and say the same."""
    agree = pc.and_(one["sound"], two["sound"])
    for name in _TOLD:
        if one[name].null_count or not one[name].equals(
            two[name]
        ):  # whole columns are compared in a fraction of the time
            agree = pc.and_(agree, pc.fill_null(pc.equal(one[name], two[name]), False))
    flags: _Flags = agree.to_numpy()
    return flags


def _hold(query: Query, window: KeyWindow, supported: str = "") -> bool:
    """Let `snapshot`, `marker`, `standing` and `exception` be the rows of the keys of a window that
    are not settled.

    Tells whether there are any. `supported`: what else keys must meet.
    """
    within = f"{bounded(window)} {supported}"
    if not query.hold("unsettled", f"SELECT DISTINCT key FROM whole_unsettled WHERE {within}"):
        return False
    within = f"{bounded(window)} AND key IN (FROM unsettled)"
    for name, kind in (("snapshot", "NOT is_delete_marker"), ("marker", "is_delete_marker")):
        query.hold(name, f"SELECT * FROM whole_snapshot WHERE {kind} AND {within}")
    query.hold(
        "standing",
        f"SELECT * FROM whole_standing WHERE {within} AND reason IS DISTINCT FROM "
        "'unsupported_key'",
    )
    query.hold("exception", f"SELECT * FROM whole_exception WHERE {within}")
    return True


def _has_located(query: Query) -> bool:
    return bool(
        query.rows("SELECT EXISTS (SELECT 1 FROM whole_standing WHERE standing = 'located')")[0][0]
    )


def _has_known(query: Query) -> bool:
    facts = (
        "whole_standing WHERE standing <> 'skipped'",
        "whole_exception",
        "whole_snapshot WHERE NOT is_latest AND NOT is_delete_marker",
    )
    asked = f"SELECT {' OR '.join(f'EXISTS (SELECT 1 FROM {fact})' for fact in facts)}"
    return bool(query.rows(asked)[0][0])
