"""Which objects of a source the members of another program's CAF file are: files in, files out.

A member is an object where key and size are equal, and the object's ETag is the MD5 of the member's
bytes. S3 gives no such ETag for an upload in several parts, nor for an object that it encrypts with
a key of KMS: nothing tells then that both are the same. Memory is bounded by windows of keys.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.inventory.headers import HEADERS
from caf_pipeline.inventory.key_windows import KeyWindow, bounded
from caf_pipeline.inventory.manifest import LOCATION_SCHEMA
from caf_pipeline.inventory.snapshot import inventory_query
from caf_pipeline.system.parquet import (
    DEFAULT_BUDGET,
    Query,
    QueryBudget,
    sum_of,
    translate_errors,
    write_whole,
)


class RejectReason(StrEnum):
    """Why a member is not taken over as an object of the source."""

    NOT_LISTED = "not_in_inventory"
    OTHER_SIZE = "other_size"
    OTHER_CONTENT = "other_content"
    NOT_COMPARABLE = "not_comparable"
    LOCATED = "archived_already"
    CLAIMED = "under_way"
    REPEATED = "repeated"
    OVERLAPPING = "overlapping"
    UNSUPPORTED_KEY = "unsupported_key"


MEMBER_SCHEMA: Final = pa.schema(
    [
        pa.field("member", pa.string(), nullable=False),  # as the index has it
        pa.field("key", pa.binary(), nullable=False),  # of the object that it may be
        pa.field("start_byte", pa.int64(), nullable=False),
        pa.field("end_byte", pa.int64(), nullable=False),  # exclusive
        pa.field("md5", pa.string(), nullable=False),  # lower-case hex, as an ETag has it
        pa.field("sha256", pa.binary(), nullable=False),
        pa.field("left_out", pa.string()),  # why it is not an object, whatever the inventory lists
    ]
)
"""The members of a CAF file, in the order of their bytes."""

WINDOW_MEMBERS: Final = 100_000
"""Members that a query works on at once: some 100 MB with what a join needs.

A file may have a million, and more.
"""

_SAMPLED: Final = 1_000  # keys by which windows are cut: they differ in size by some per cent

_HEADERS: Final = (*HEADERS, "user_metadata")
"""The columns of LOCATION_SCHEMA that are not known of an adopted file, its last ones."""

_DECIDED_SCHEMA: Final = pa.schema(
    [
        pa.field("member", pa.string(), nullable=False),
        pa.field("left_out", pa.string()),  # null: it is an object
        *(field.with_nullable(True) for field in LOCATION_SCHEMA if field.name not in _HEADERS),
    ]
)

# An ETag of 32 hex digits may be an MD5; one with a dash is of parts. Of several versions with
# these bytes the newest one counts.
_CANDIDATES: Final = r"""WITH told AS (SELECT here.member, listed.*,
            CASE WHEN listed.size_bytes <> here.end_byte - here.start_byte THEN 3 WHEN listed.etag =
                here.md5 THEN 0
                WHEN regexp_full_match(listed.etag, '[0-9a-f]{{32}}') THEN 2 ELSE 1 END AS fault
        FROM listed JOIN here ON listed.key = here.key
        WHERE here.left_out IS NULL AND NOT listed.is_delete_marker AND listed.{within})
    SELECT member, unnest(arg_min({{key: key, object_version: object_version, version_id:
        version_id, etag: etag,
        last_modified: last_modified, fault: fault}}, (2 * fault + (NOT is_latest)::INT) *
            100_000_000_000_000_000
        - epoch_us(last_modified))) FROM told GROUP BY member"""

_KNOWN: Final = """SELECT standing.key, standing.object_version, max(standing) AS standing FROM
    standing
    JOIN candidates ON candidates.key = standing.key AND candidates.object_version =
        standing.object_version
    WHERE standing IN ('located', 'claimed') AND standing.{within} GROUP BY ALL"""

_DECIDED: Final = """WITH told AS (SELECT here.member, here.key, here.start_byte, here.end_byte,
    here.sha256,
            candidates.object_version, version_id, etag, last_modified,
            CASE WHEN candidates.object_version <> coalesce(version_id, concat_ws(':', 'etag', etag,
                end_byte - start_byte))
                THEN last_modified END AS rewritten_at,
            CASE WHEN here.left_out IS NOT NULL THEN here.left_out WHEN fault IS NULL THEN
                'not_in_inventory'
                WHEN fault = 3 THEN 'other_size' WHEN fault = 2 THEN 'other_content' WHEN fault = 1
                    THEN 'not_comparable'
                WHEN standing = 'located' THEN 'archived_already' WHEN standing = 'claimed' THEN
                    'under_way' END AS left_out
        FROM here LEFT JOIN candidates USING (member)
        LEFT JOIN known ON known.key = here.key AND known.object_version =
            candidates.object_version)
    SELECT * EXCLUDE (object_version) REPLACE (decode(key) AS key,
            CASE WHEN left_out IS NULL AND row_number() OVER again > 1 THEN 'repeated' ELSE left_out
                END AS left_out),
        NULL::BLOB AS crc64nvme, NULL::VARCHAR AS s3_checksum
    FROM told WINDOW again AS (PARTITION BY key, object_version, left_out ORDER BY start_byte,
        member)"""


@dataclass(frozen=True, slots=True)
class Adoption:
    """What was decided on the members of a file.

    Attributes:
        objects: members that are objects of the source, none of which is archived or under way.
        object_bytes: of these.
        left_out: the others, by reason.
        decided: a file with a row for each member.
    """

    objects: int
    object_bytes: int
    left_out: Mapping[RejectReason, int]
    decided: Path

    def locations(self) -> Iterator[pa.RecordBatch]:
        """Yield the objects' locations in batches of LOCATION_SCHEMA."""
        names = [name for name in LOCATION_SCHEMA.names if name not in _HEADERS]
        for batch in _batches(self.decided, ["left_out", *names]):
            kept = batch.filter(pc.is_null(batch["left_out"])).select(names)
            unknown = [
                pa.nulls(kept.num_rows, LOCATION_SCHEMA.field(name).type) for name in _HEADERS
            ]
            yield pa.RecordBatch.from_arrays([*kept.columns, *unknown], schema=LOCATION_SCHEMA)

    def rejected_members(self) -> Iterator[tuple[str, RejectReason]]:
        """Yield the other members, each with its reason."""
        for batch in _batches(self.decided, ["member", "left_out"]):
            kept = batch.filter(pc.is_valid(batch["left_out"]))
            yield from zip(
                kept["member"].to_pylist(),
                map(RejectReason, kept["left_out"].to_pylist()),
                strict=True,
            )


def decide(
    members: Path,
    snapshot: Path,
    standing: Path,
    out: Path,
    *,
    window: int = WINDOW_MEMBERS,
    budget: QueryBudget = DEFAULT_BUDGET,
) -> Adoption:
    """Decide on each member, and write that to a file in the order of windows of keys.

    Args:
        members: a file of MEMBER_SCHEMA.
        snapshot: of the source.
        standing: a file or folder of STANDING_SCHEMA.
        out: where what was decided goes.
        window: members at once.
        budget: for DuckDB, which spills beside `out`.

    Raises:
        IntegrityError: a file is damaged. StagingError: there is no room.
    """
    counts: Counter[str | None] = Counter()
    object_bytes = 0

    def told(query: Query) -> Iterator[pa.RecordBatch]:
        nonlocal object_bytes
        for batch in _decided(query, window):
            counts.update(batch["left_out"].to_pylist())
            kept = batch.filter(pc.is_null(batch["left_out"]))
            object_bytes += sum_of(kept, "end_byte") - sum_of(kept, "start_byte")
            yield batch

    with translate_errors(out), inventory_query(out, budget) as query:
        query.table("members", members)
        query.table("listed", snapshot)
        query.table("standing", standing)
        write_whole(told(query), out, _DECIDED_SCHEMA)
    objects = counts.pop(None, 0)
    return Adoption(
        objects,
        object_bytes,
        {RejectReason(str(reason)): counts[reason] for reason in sorted(counts, key=str)},
        out,
    )


def _decided(query: Query, window: int) -> Iterator[pa.RecordBatch]:
    for within in _windows(query, window):
        if not query.hold("here", f"SELECT * FROM members WHERE {bounded(within)}"):
            continue
        ((first, last),) = query.rows("SELECT min(key), max(key) FROM here")
        # all else of sorted files is passed over
        keys = f"key BETWEEN from_hex('{first.hex()}') AND from_hex('{last.hex()}')"
        query.hold("candidates", _CANDIDATES.format(within=keys))
        query.hold("known", _KNOWN.format(within=keys))
        yield from query.batches(_DECIDED)


def _windows(query: Query, window: int) -> Iterator[KeyWindow]:
    """Yield windows that cover all keys, each of about so many members; equal keys are in one."""
    ((count,),) = query.rows("SELECT count(*) FROM members")
    ends: list[bytes] = []
    if count > window:
        sampled = sorted(
            key
            for (key,) in query.rows(
                f"SELECT key FROM members USING SAMPLE reservoir({_SAMPLED} ROWS)"
            )
        )
        step = max(1, len(sampled) * window // count)
        ends = sorted(set(sampled[step::step]))
    after: bytes | None = None
    for until in (*ends, None):
        yield after, until
        after = until


def _batches(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(columns=columns)
