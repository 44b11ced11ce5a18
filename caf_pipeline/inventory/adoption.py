"""Which objects of a source the members of another program's CAF file are: files in, files out.

A member is an object where key and size are equal, and the object's ETag is the MD5 of the member's bytes. S3 gives no such ETag
for an upload in several parts, nor for an object that it encrypts with a key of KMS: nothing tells then that both are the same.
Memory is bounded by the members, of which a file has an index in memory anyhow.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import pyarrow as pa

from caf_pipeline.inventory.manifest import LOCATION_SCHEMA
from caf_pipeline.inventory.snapshot import inventory_query, show_snapshot
from caf_pipeline.system.parquet import DEFAULT_BUDGET, Query, QueryBudget, translate_errors


class LeftOut(StrEnum):
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
        pa.field("left_out", pa.string()),  # why it is no object, whatever the inventory lists
    ]
)
"""The members of a CAF file, in the order of their bytes."""

# An ETag of 32 hex digits may be an MD5; one with a dash is of parts. Of several versions with these bytes the newest one counts.
_CANDIDATES: Final = r"""SELECT members.start_byte, members.member, listed.object_version, listed.version_id, listed.etag,
        listed.last_modified, CASE WHEN listed.size_bytes <> members.end_byte - members.start_byte THEN 'other_size'
            WHEN listed.etag = members.md5 THEN '' WHEN regexp_full_match(listed.etag, '[0-9a-f]{32}') THEN 'other_content'
            ELSE 'not_comparable' END AS fault
    FROM listed JOIN members ON listed.key = members.key
    WHERE members.left_out IS NULL AND NOT listed.is_delete_marker
    QUALIFY row_number() OVER (PARTITION BY members.member ORDER BY
        list_position(['', 'not_comparable', 'other_content', 'other_size'], fault), listed.is_latest DESC,
        listed.last_modified DESC) = 1"""

_DECIDED: Final = """WITH known AS (SELECT key, object_version, max(standing) AS standing FROM standing
        WHERE standing IN ('located', 'claimed') AND key IN (SELECT key FROM members) GROUP BY key, object_version
    ), told AS (SELECT members.* EXCLUDE (left_out), candidates.* EXCLUDE (start_byte, member, fault),
            CASE WHEN members.left_out IS NOT NULL THEN members.left_out WHEN fault IS NULL THEN 'not_in_inventory'
                WHEN fault <> '' THEN fault WHEN standing = 'located' THEN 'archived_already'
                WHEN standing = 'claimed' THEN 'under_way' END AS left_out
        FROM members LEFT JOIN candidates USING (member)
        LEFT JOIN known ON known.key = members.key AND known.object_version = candidates.object_version)
    SELECT * REPLACE (CASE WHEN left_out IS NULL AND row_number() OVER again > 1 THEN 'repeated' ELSE left_out END AS left_out)
    FROM told WINDOW again AS (PARTITION BY key, object_version, left_out ORDER BY start_byte, member)"""

_LOCATIONS: Final = """SELECT decode(key) AS key, object_version, version_id, start_byte, end_byte, etag, last_modified, sha256
    FROM decided WHERE left_out IS NULL ORDER BY start_byte, member"""


_LEFT_OUT: Final = "SELECT member, left_out FROM decided WHERE left_out IS NOT NULL ORDER BY start_byte, member"

_SUMS: Final = "SELECT left_out, count(*), sum(end_byte - start_byte) FROM decided GROUP BY left_out"


@dataclass(frozen=True, slots=True)
class Adoption:
    """What was decided on the members of a file.

    Attributes:
        objects: members that are objects of the source, none of which is archived or under way.
        object_bytes: of these.
        left_out: the others, by reason.
    """

    objects: int
    object_bytes: int
    left_out: Mapping[LeftOut, int]
    _query: Query

    def locations(self) -> Iterator[pa.RecordBatch]:
        """Yield the objects' locations in batches of LOCATION_SCHEMA, by start."""
        for batch in self._query.batches(_LOCATIONS):
            columns = [column.cast(field.type) for column, field in zip(batch.columns, LOCATION_SCHEMA, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=LOCATION_SCHEMA)

    def members_left_out(self) -> Iterator[tuple[str, LeftOut]]:
        """Yield the other members by start, each with its reason."""
        for batch in self._query.batches(_LEFT_OUT):
            yield from zip(batch["member"].to_pylist(), map(LeftOut, batch["left_out"].to_pylist()), strict=True)


@contextmanager
def decided(members: Path, snapshot: Path, standing: Path, *, budget: QueryBudget = DEFAULT_BUDGET) -> Iterator[Adoption]:
    """Decide on each member; what was decided can be read while the context lasts.

    Args:
        members: a file of MEMBER_SCHEMA.
        snapshot: of the source.
        standing: a file or folder of STANDING_SCHEMA.
        budget: for DuckDB, which spills beside `members`.

    Raises:
        IntegrityError: a file is damaged. StagingError: there is no room.
    """
    with translate_errors(members), inventory_query(members, budget) as query:
        query.table("members", members)
        show_snapshot(query, "listed", snapshot)
        query.table("standing", standing)
        query.hold("candidates", _CANDIDATES)
        query.hold("decided", _DECIDED)
        sums = {reason: (count, int(size_bytes or 0)) for reason, count, size_bytes in query.rows(_SUMS)}
        objects, object_bytes = sums.pop(None, (0, 0))
        left_out = {LeftOut(reason): count for reason, (count, _) in sorted(sums.items())}
        yield Adoption(objects, object_bytes, left_out, query)
