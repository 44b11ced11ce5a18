"""Decides which objects of a fresh inventory may be deleted at their source, and why others not.

It joins inventory, locations, standings and chunk assessments. Memory is bounded by windows of
keys.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.inventory.filters import ObjectFilter
from caf_pipeline.inventory.headers import HEADERS, ID_BYTES
from caf_pipeline.inventory.key_windows import key_windows
from caf_pipeline.inventory.ledger_rows import LOCATED_SCHEMA, STANDING_SCHEMA
from caf_pipeline.inventory.objects import TIME_FORMAT
from caf_pipeline.inventory.snapshot import SNAPSHOT_SCHEMA, inventory_query
from caf_pipeline.steps.compare_headers import REWRITTEN_SCHEMA
from caf_pipeline.system.parquet import Query, translate_errors, write_whole


class Unsafe(StrEnum):
    """Why an object may not be deleted at its source."""

    NOT_PLANNED = "not_planned"
    CLAIMED = "claimed"
    LEFT_OUT = "left_out"
    SKIPPED = "skipped"
    CHANGED = "changed"
    METADATA_CHANGED = "metadata_changed"
    REWRITTEN = "rewritten"
    DAMAGED = "damaged"
    TOO_FEW_COPIES = "too_few_copies"
    ONE_WINDOW = "one_window"
    NOT_LOOKED_AT = "not_looked_at"
    NOT_READ_BACK = "not_read_back"
    NOT_OPENED = "not_opened"
    DISAGREES = "disagrees"
    ADOPTED = "adopted"
    NOT_TOLD_APART = "not_told_apart"
    NOT_EXPRESSIBLE = "not_expressible"


@dataclass(frozen=True, slots=True)
class ChunkAssessment:
    """Objects of the chunk may be safe if `reason` is None."""

    caf_file_id: int
    chunk: str
    reason: Unsafe | None
    detail: str = ""


DECISION_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("version_id", pa.string()),
        pa.field("etag", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("last_modified", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("encoded_key", pa.string(), nullable=False),  # as by `quote_from_bytes`
        pa.field("chunk", pa.string()),
        pa.field("reason", pa.string()),  # null: safe
        pa.field("detail", pa.string(), nullable=False),
    ]
)

_ASSESSMENT_SCHEMA: Final = pa.schema(
    [
        pa.field("caf_file_id", pa.int64(), nullable=False),
        pa.field("chunk", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string(), nullable=False),
    ]
)

# A key listed twice without version ids changed during the listing: it is unknown which object is
# there now. An empty or weak ETag (RFC 9110, 8.8.1) may stay while the bytes change. A version id
# with other characters would need encoding, and S3 does not document whether it decodes that
# column. A split object is as safe as the worst of its chunks: it needs all parts, and they must
# add up to its size.
_DECIDED: Final = """
    WITH listed AS (
        SELECT *, {left_out} AS left_out, version_id IS NULL
            AND count(*) FILTER (version_id IS NULL) OVER (PARTITION BY key) > 1 AS twice
        FROM snapshot
    ), known AS (
        SELECT key, object_version, bool_or(standing = 'claimed') AS claimed,
            max(reason) FILTER (standing = 'skipped') AS skipped
        FROM standing
        WHERE reason IS DISTINCT FROM 'unsupported_key'
        GROUP BY key, object_version
    ), elsewhere AS (
        SELECT DISTINCT key FROM located
    ), whole AS (
        SELECT key, object_version, version_id, etag, caf_file_id,
            end_byte - start_byte AS size_bytes
        FROM located
        WHERE part = 0
        UNION ALL
        SELECT key, object_version, min(version_id), min(etag),
            arg_max(located.caf_file_id, CASE
                WHEN assessment.caf_file_id IS NULL THEN 2
                WHEN assessment.reason IS NOT NULL THEN 1
                ELSE 0 END),
            sum(end_byte - start_byte)::BIGINT
        FROM located
        LEFT JOIN assessment ON assessment.caf_file_id = located.caf_file_id
        WHERE part > 0
        GROUP BY key, object_version
        HAVING count(*) = max(part_count)
            AND min(part_count) = max(part_count)
            AND count(DISTINCT part) = max(part_count)
            AND min(part) = 1
            AND max(part) = max(part_count)
            AND min(etag) = max(etag)
            AND min(coalesce(version_id, '')) = max(coalesce(version_id, ''))
    ), not_proven AS (
        SELECT key, last_modified, min(detail) AS detail
        FROM rewritten
        GROUP BY key, last_modified
    ), same_bytes AS (
        SELECT DISTINCT key, etag, size_bytes FROM whole WHERE version_id IS NULL
    ), decided AS (
        SELECT listed.*, assessment.chunk,
            CASE
                WHEN NOT is_supported(listed.key) THEN 'skipped'
                WHEN twice THEN 'changed'
                WHEN whole.key IS NOT NULL THEN CASE
                    WHEN whole.etag <> listed.etag
                        OR whole.version_id IS DISTINCT FROM listed.version_id THEN 'changed'
                    WHEN assessment.caf_file_id IS NULL THEN 'not_looked_at'
                    WHEN assessment.reason IS NOT NULL THEN assessment.reason
                    WHEN whole.size_bytes <> listed.size_bytes THEN 'disagrees'
                    WHEN listed.version_id IS NULL
                        AND (listed.etag = '' OR starts_with(listed.etag, 'W/'))
                        THEN 'not_told_apart'
                    WHEN NOT regexp_full_match(
                        coalesce(listed.version_id, ''), '[A-Za-z0-9._~-]*'
                    ) THEN 'not_expressible' END
                WHEN known.claimed THEN 'claimed'
                WHEN known.skipped IS NOT NULL THEN 'skipped'
                WHEN not_proven.key IS NOT NULL THEN 'rewritten'
                WHEN same_bytes.key IS NOT NULL AND listed.version_id IS NULL
                    THEN 'metadata_changed'
                WHEN left_out IS NOT NULL THEN 'left_out'
                WHEN elsewhere.key IS NOT NULL AND listed.is_latest THEN 'changed'
                ELSE 'not_planned' END AS reason,
            CASE
                WHEN NOT is_supported(listed.key) THEN 'unsupported_key'
                WHEN twice THEN 'it was listed twice, with different ETags'
                WHEN whole.key IS NOT NULL THEN assessment.detail
                WHEN known.claimed THEN NULL
                ELSE coalesce(known.skipped, not_proven.detail) END AS explanation
        FROM listed
        LEFT JOIN whole
            ON whole.key = listed.key AND whole.object_version = listed.object_version
        LEFT JOIN assessment ON assessment.caf_file_id = whole.caf_file_id
        LEFT JOIN known
            ON known.key = listed.key AND known.object_version = listed.object_version
        LEFT JOIN elsewhere ON elsewhere.key = listed.key
        LEFT JOIN same_bytes
            ON same_bytes.key = listed.key
            AND same_bytes.etag = listed.etag
            AND same_bytes.size_bytes = listed.size_bytes
        LEFT JOIN not_proven
            ON not_proven.key = listed.key
            AND not_proven.last_modified = listed.last_modified
            AND listed.version_id IS NULL
    )
    SELECT key, version_id, etag, size_bytes, last_modified,
        CASE WHEN is_supported(key) THEN replace(url_encode(decode(key)), '%2F', '/')
            ELSE percent_encode(key) END AS encoded_key,
        chunk,
        reason,
        CASE WHEN reason = 'left_out' THEN concat('by ', left_out)
            WHEN reason = 'changed' AND NOT twice OR explanation IS NULL THEN ''
            ELSE explanation END AS detail
    FROM decided
    ORDER BY key, last_modified, object_version
"""

_GONE: Final = """
    SELECT DISTINCT key
    FROM located
    WHERE NOT EXISTS (SELECT 1 FROM snapshot WHERE snapshot.key = located.key)
"""


class Decisions:
    """The decisions about a snapshot. Finally, `gone_count` counts located keys it lacks."""

    def __init__(
        self,
        snapshot: Path,
        located: Path,
        standing: Path,
        rewritten: Path,
        assessments: Iterable[ChunkAssessment],
        *,
        filters: ObjectFilter,
    ) -> None:
        """Sorted copies are written beside `located`. `filters` are those of the source now.

        Objects have identities (`current.identify`), which change with rewritten headers.
        """
        self._snapshot = snapshot
        self._located = located
        self._standing = standing
        self._rewritten = rewritten
        self._statement = _DECIDED.format(left_out=filters.sql)
        fields = _ASSESSMENT_SCHEMA.names
        self._assessments = pa.Table.from_pylist(
            [{name: getattr(entry, name) for name in fields} for entry in assessments],
            schema=_ASSESSMENT_SCHEMA,
        )
        self.gone_count = 0
        self.gone_examples: list[bytes] = []

    def batches(self, *, examples: int = 5) -> Iterator[pa.RecordBatch]:
        """Yield DECISION_SCHEMA in the snapshot's order, each object once."""
        with (
            translate_errors(self._located),
            inventory_query(self._located) as query,
        ):
            located, standing = (
                _sorted(query, self._located, LOCATED_SCHEMA),
                _sorted(query, self._standing, STANDING_SCHEMA),
            )
            with (
                _Ascending(self._snapshot, SNAPSHOT_SCHEMA) as listed_rows,
                _Ascending(located, LOCATED_SCHEMA) as located_rows,
                _Ascending(standing, STANDING_SCHEMA) as standing_rows,
                _Ascending(self._rewritten, REWRITTEN_SCHEMA) as rewritten_rows,
            ):
                query.connection.register("assessment", self._assessments)
                for _, until in key_windows(self._snapshot):
                    rows = listed_rows.until(until)
                    rows = rows.filter(pc.invert(rows["is_delete_marker"]))
                    query.connection.register("snapshot", rows)
                    query.connection.register("located", located_rows.until(until))
                    query.connection.register("standing", standing_rows.until(until))
                    query.connection.register("rewritten", rewritten_rows.until(until))
                    for batch in query.batches(self._statement):
                        yield batch.select(DECISION_SCHEMA.names).cast(DECISION_SCHEMA)
                    ((count, keys),) = query.rows(
                        f"SELECT count(*), min(key, {examples}) FROM ({_GONE})"
                    )
                    self.gone_count += count
                    missing = examples - len(self.gone_examples)
                    self.gone_examples += [bytes(key) for key in keys or ()][:missing]


def _sorted(query: Query, path: Path, schema: pa.Schema) -> Path:
    query.table("unsorted", path)
    ordered = path.with_name(f"{path.stem}.by-key.parquet")
    write_whole(query.batches("SELECT * FROM unsorted ORDER BY key"), ordered, schema)
    return ordered


class _Ascending:
    """Reads a Parquet file sorted by key in windows, each row once."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._file = pq.ParquetFile(path)
        self._batches = self._file.iter_batches()
        self._rest: pa.RecordBatch | None = None

    def __enter__(self) -> "_Ascending":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def until(self, key: bytes | None) -> pa.Table:
        window: list[pa.RecordBatch] = []
        while (batch := self._rest or next(self._batches, None)) is not None:
            self._rest = None
            if key is None:
                window.append(batch)
                continue
            within = int(
                pc.sum(pc.less_equal(batch.column("key"), pa.scalar(key, pa.binary()))).as_py() or 0
            )
            window.append(batch.slice(0, within))
            if within < batch.num_rows:
                self._rest = batch.slice(within)
                break
        return pa.Table.from_batches(window, self._schema)


# --- a chunk's rows and its manifest

_PAIRS: Final = """list_transform(
    map_entries(manifest.user_metadata),
    lambda pair: concat(pair.key, chr(0), pair.value, chr(0))
)"""
# As by `ObjectHeaders.id`: a manifest has the user metadata sorted by name.
_HEADER_SET: Final = (
    f"unhex(left(sha256(concat({', '.join(f'manifest.{name}, chr(0)' for name in HEADERS)}, "
    f"array_to_string({_PAIRS}, ''))), {2 * ID_BYTES}))"
)
_DIFFERING: Final = f"""
    SELECT count(*)
    FROM located
    LEFT JOIN manifest
        ON located.key = encode(manifest.key)
        AND located.object_version = coalesce(
                manifest.version_id, concat('etag:', manifest.etag, ':', manifest.size_bytes)
            ) || coalesce(
                ':' || strftime(make_timestamp(epoch_us(manifest.rewritten_at)), '{TIME_FORMAT}'),
                ''
            )
        AND manifest.skip_reason IS NULL
        AND located.part = coalesce(manifest.part, 0)
        AND located.start_byte = manifest.start_byte
        AND located.end_byte = manifest.end_byte
        AND located.sha256 = manifest.sha256
        AND located.etag = manifest.etag
        AND located.version_id IS NOT DISTINCT FROM manifest.version_id
        AND (located.crc64nvme IS NULL OR located.crc64nvme = manifest.crc64nvme)
        AND (located.s3_checksum IS NULL OR located.s3_checksum = manifest.s3_checksum)
        AND located.header_set = {_HEADER_SET}
        AND located.end_byte - located.start_byte
            = coalesce(manifest.part_end_byte - manifest.part_start_byte, manifest.size_bytes)
    WHERE located.caf_file_id = {{}} AND manifest.key IS NULL
"""


class LocatedRows:
    """The exported locations (LOCATED_SCHEMA) by chunk."""

    def __init__(self, located: Path) -> None:
        self._located = located

    def ranges(self, caf_file_id: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield start, end (exclusive) and SHA-256 of the chunk's rows, by start."""
        with (
            translate_errors(self._located),
            inventory_query(self._located) as query,
        ):
            query.table("located", self._located)
            statement = (
                "SELECT start_byte, end_byte, sha256 FROM located "
                f"WHERE caf_file_id = {caf_file_id:d} ORDER BY 1, 2"
            )
            for batch in query.batches(statement):
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def differing(self, caf_file_id: int, manifest: Path) -> int:
        """Return how many rows of the chunk its manifest lacks or contradicts."""
        with (
            translate_errors(self._located),
            inventory_query(self._located) as query,
        ):
            query.table("located", self._located)
            query.table("manifest", manifest)
            return int(query.rows(_DIFFERING.format(int(caf_file_id)))[0][0])


def tallied(batches: Sequence[pa.RecordBatch]) -> list[tuple[str | None, str, int, int]]:
    """Return (reason, skip reason, objects, bytes)."""
    table = pa.Table.from_batches(batches, DECISION_SCHEMA)
    skips = pc.if_else(
        pc.fill_null(pc.equal(table["reason"], Unsafe.SKIPPED), False), table["detail"], ""
    )
    sums = (
        table.append_column("skip", skips)
        .group_by(["reason", "skip"])
        .aggregate([("size_bytes", "sum"), ("key", "count")])
    )
    return [
        (row["reason"], row["skip"], int(row["key_count"]), int(row["size_bytes_sum"] or 0))
        for row in sums.to_pylist()
    ]
