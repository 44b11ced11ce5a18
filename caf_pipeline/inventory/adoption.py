"""Decides which objects of a source the members of another program's CAF file are.

Key and size must be equal, and the ETag the MD5 of the bytes. Multipart uploads and objects
encrypted with a KMS key have no such ETag.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.inventory.headers import HEADERS
from caf_pipeline.inventory.key_windows import bounded
from caf_pipeline.inventory.manifest import LOCATION_SCHEMA
from caf_pipeline.inventory.snapshot import inventory_query
from caf_pipeline.system.parquet import (
    Query,
    sum_of,
    translate_errors,
    write_whole,
)


class RejectReason(StrEnum):
    """Why a member is not adopted."""

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
        pa.field("member", pa.string(), nullable=False),  # the name in the index
        pa.field("key", pa.binary(), nullable=False),  # of the matching object
        pa.field("start_byte", pa.int64(), nullable=False),
        pa.field("end_byte", pa.int64(), nullable=False),  # exclusive
        pa.field("md5", pa.string(), nullable=False),  # lower-case hex, like an ETag
        pa.field("sha256", pa.binary(), nullable=False),
        pa.field("left_out", pa.string()),  # a RejectReason that does not depend on the inventory
    ]
)

WINDOW_MEMBERS: Final = 100_000
"""Members in one query: some 100 MB with a join."""

_SAMPLED: Final = 1_000

_HEADERS: Final = (*HEADERS, "user_metadata")
"""Unknown for an adopted file."""

_DECIDED_SCHEMA: Final = pa.schema(
    [
        pa.field("member", pa.string(), nullable=False),
        pa.field("left_out", pa.string()),  # null: adopted
        *(field.with_nullable(True) for field in LOCATION_SCHEMA if field.name not in _HEADERS),
    ]
)

# Chooses the best listed version for each member: fewest differences, latest first, newest first.
# An ETag of 32 hex digits may be an MD5; an ETag with a dash belongs to a multipart upload.
_CANDIDATES: Final = r"""
    WITH compared AS (
        SELECT
            window_members.member,
            listed.*,
            CASE
                WHEN listed.size_bytes <> window_members.end_byte - window_members.start_byte
                    THEN 3
                WHEN listed.etag = window_members.md5
                    THEN 0
                WHEN regexp_full_match(listed.etag, '[0-9a-f]{{32}}')
                    THEN 2
                ELSE 1
            END AS difference
        FROM listed
        JOIN window_members ON listed.key = window_members.key
        WHERE window_members.left_out IS NULL
            AND NOT listed.is_delete_marker
            AND listed.{within}
    )
    SELECT
        member,
        unnest(arg_min(
            {{
                key: key,
                object_version: object_version,
                version_id: version_id,
                etag: etag,
                last_modified: last_modified,
                difference: difference
            }},
            (2 * difference + (NOT is_latest)::INT) * 100_000_000_000_000_000
                - epoch_us(last_modified)
        ))
    FROM compared
    GROUP BY member"""

_CANDIDATE_STANDING: Final = """
    SELECT standing.key, standing.object_version, max(standing) AS standing
    FROM standing
    JOIN candidates
        ON candidates.key = standing.key
        AND candidates.object_version = standing.object_version
    WHERE standing IN ('located', 'claimed')
        AND standing.{within}
    GROUP BY ALL"""

_DECIDED: Final = """
    WITH decided AS (
        SELECT
            window_members.member,
            window_members.key,
            window_members.start_byte,
            window_members.end_byte,
            window_members.sha256,
            candidates.object_version,
            version_id,
            etag,
            last_modified,
            CASE
                WHEN candidates.object_version <> coalesce(
                    version_id, concat_ws(':', 'etag', etag, end_byte - start_byte)
                ) THEN last_modified
            END AS rewritten_at,
            CASE
                WHEN window_members.left_out IS NOT NULL THEN window_members.left_out
                WHEN difference IS NULL THEN 'not_in_inventory'
                WHEN difference = 3 THEN 'other_size'
                WHEN difference = 2 THEN 'other_content'
                WHEN difference = 1 THEN 'not_comparable'
                WHEN standing = 'located' THEN 'archived_already'
                WHEN standing = 'claimed' THEN 'under_way'
            END AS left_out
        FROM window_members
        LEFT JOIN candidates USING (member)
        LEFT JOIN candidate_standing
            ON candidate_standing.key = window_members.key
            AND candidate_standing.object_version = candidates.object_version
    )
    SELECT
        * EXCLUDE (object_version)
        REPLACE (
            decode(key) AS key,
            CASE
                WHEN left_out IS NULL AND row_number() OVER same_object > 1 THEN 'repeated'
                ELSE left_out
            END AS left_out
        ),
        NULL::BLOB AS crc64nvme,
        NULL::VARCHAR AS s3_checksum
    FROM decided
    WINDOW same_object AS (
        PARTITION BY key, object_version, left_out
        ORDER BY start_byte, member
    )"""


@dataclass(frozen=True, slots=True)
class Adoption:
    """The decisions about a file's members: `decided` is a file with a row for each."""

    objects: int
    object_bytes: int
    left_out: Mapping[RejectReason, int]
    decided: Path

    def locations(self) -> Iterator[pa.RecordBatch]:
        names = [name for name in LOCATION_SCHEMA.names if name not in _HEADERS]
        for batch in _batches(self.decided, ["left_out", *names]):
            kept = batch.filter(pc.is_null(batch["left_out"])).select(names)
            unknown = [
                pa.nulls(kept.num_rows, LOCATION_SCHEMA.field(name).type) for name in _HEADERS
            ]
            yield pa.RecordBatch.from_arrays([*kept.columns, *unknown], schema=LOCATION_SCHEMA)

    def rejected_members(self) -> Iterator[tuple[str, RejectReason]]:
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
) -> Adoption:
    """Decide about each member, and write the decisions to `out` in the order of windows.

    `members` has MEMBER_SCHEMA, `standing` STANDING_SCHEMA. Raises IntegrityError and StagingError.
    """
    counts: Counter[str | None] = Counter()
    object_bytes = 0

    def counted(query: Query) -> Iterator[pa.RecordBatch]:
        nonlocal object_bytes
        for batch in _decisions(query, window):
            counts.update(batch["left_out"].to_pylist())
            adopted = batch.filter(pc.is_null(batch["left_out"]))
            object_bytes += sum_of(adopted, "end_byte") - sum_of(adopted, "start_byte")
            yield batch

    with translate_errors(out), inventory_query(out) as query:
        query.table("members", members)
        query.table("listed", snapshot)
        query.table("standing", standing)
        write_whole(counted(query), out, _DECIDED_SCHEMA)
    objects = counts.pop(None, 0)
    return Adoption(
        objects,
        object_bytes,
        {RejectReason(str(reason)): counts[reason] for reason in sorted(counts, key=str)},
        out,
    )


def _decisions(query: Query, window: int) -> Iterator[pa.RecordBatch]:
    ((count,),) = query.rows("SELECT count(*) FROM members")
    ends: list[bytes] = []
    if count > window:
        sample = query.rows(f"SELECT key FROM members USING SAMPLE reservoir({_SAMPLED} ROWS)")
        keys = sorted(key for (key,) in sample)
        step = max(1, len(keys) * window // count)
        ends = sorted(set(keys[step::step]))
    for key_window in pairwise([None, *ends, None]):
        if not query.hold("window_members", f"SELECT * FROM members WHERE {bounded(key_window)}"):
            continue
        ((first, last),) = query.rows("SELECT min(key), max(key) FROM window_members")
        # Lets DuckDB skip the row groups of other keys.
        within = f"key BETWEEN from_hex('{first.hex()}') AND from_hex('{last.hex()}')"
        query.hold("candidates", _CANDIDATES.format(within=within))
        query.hold("candidate_standing", _CANDIDATE_STANDING.format(within=within))
        yield from query.batches(_DECIDED)


def _batches(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(columns=columns)
