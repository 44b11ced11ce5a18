"""Decides which objects of a fresh inventory may be deleted at their source, and why others not.

It joins inventory, locations, standings and chunk assessments. Memory is bounded by windows of
keys.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
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
        AND epoch_us(located.last_modified) = epoch_us(manifest.last_modified)
        AND located.version_id IS NOT DISTINCT FROM manifest.version_id
        AND (located.crc64nvme IS NULL OR located.crc64nvme = manifest.crc64nvme)
        AND (located.s3_checksum IS NULL OR located.s3_checksum = manifest.s3_checksum)
        AND located.header_set = {_HEADER_SET}
        AND located.end_byte - located.start_byte
            = coalesce(manifest.part_end_byte - manifest.part_start_byte, manifest.size_bytes)
    WHERE manifest.key IS NULL
"""


# The export has a chunk's rows in any order, e.g. of concurrent scans or loads.
_BY_CHUNK: Final = """
    SELECT *
    FROM located
    ORDER BY caf_file_id, start_byte, end_byte, key, object_version, part
"""
_DIGEST_RULE: Final = b"rows 1"
"""Change it with what `_DIFFERING` compares: agreements by another rule do not count."""


class LocatedRows:
    """The exported locations (LOCATED_SCHEMA) by chunk, which are sorted once. Safe in threads."""

    def __init__(self, located: Path) -> None:
        """A sorted copy is written beside `located`."""
        self._path = located.with_name(f"{located.stem}.by-chunk.parquet")
        self._rows: dict[int, tuple[int, int]] = {}
        self._digests: dict[int, bytes] = {}
        with translate_errors(located), inventory_query(located) as query:
            query.table("located", located)
            write_whole(self._digested(query.batches(_BY_CHUNK)), self._path, LOCATED_SCHEMA)
            with pq.ParquetFile(self._path) as file:
                self._metadata = file.metadata

    def _digested(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        chunk, first, position, digest = None, 0, 0, _RowsDigest()
        for batch in batches:
            rows = batch.select(LOCATED_SCHEMA.names).cast(LOCATED_SCHEMA)
            ids = rows["caf_file_id"].to_numpy()
            begins = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist()] if len(ids) else []
            for begin, end in pairwise([*begins, len(ids)]):
                if ids[begin] != chunk:
                    self._end_chunk(chunk, first, position + begin, digest)
                    chunk, first, digest = int(ids[begin]), position + begin, _RowsDigest()
                digest.update(rows.slice(begin, end - begin))
            position += len(ids)
            yield rows
        self._end_chunk(chunk, first, position, digest)

    def _end_chunk(self, chunk: int | None, first: int, end: int, digest: "_RowsDigest") -> None:
        if chunk is not None:
            self._rows[chunk], self._digests[chunk] = (first, end), digest.digest()

    def digest(self, caf_file_id: int) -> bytes:
        """Return the SHA-256 of all columns of the chunk's rows."""
        return self._digests.get(caf_file_id, _RowsDigest().digest())

    def _batches(self, caf_file_id: int) -> Iterator[pa.RecordBatch]:
        first, end = self._rows.get(caf_file_id, (0, 0))
        position = 0
        with pq.ParquetFile(self._path, metadata=self._metadata) as file:
            for number in range(self._metadata.num_row_groups):
                count = self._metadata.row_group(number).num_rows
                begin = max(first - position, 0)
                if begin < count and position < end:
                    group = file.read_row_group(number)
                    yield from group.slice(begin, end - position - begin).to_batches()
                position += count

    def ranges(self, caf_file_id: int) -> Iterator[tuple[int, int, bytes]]:
        """Yield start, end (exclusive) and SHA-256 of the chunk's rows, by start."""
        with translate_errors(self._path):
            for batch in self._batches(caf_file_id):
                columns = batch.select(["start_byte", "end_byte", "sha256"]).columns
                yield from zip(*(column.to_pylist() for column in columns), strict=True)

    def differing(self, caf_file_id: int, manifest: Path) -> int:
        """Return how many rows of the chunk its manifest lacks or contradicts.

        The chunk's rows are written beside `manifest`.
        """
        rows = manifest.with_name("rows.parquet")
        with translate_errors(rows), inventory_query(rows) as query:
            write_whole(self._batches(caf_file_id), rows, LOCATED_SCHEMA)
            query.table("located", rows)
            query.table("manifest", manifest)
            return int(query.rows(_DIFFERING)[0][0])


class _RowsDigest:
    """SHA-256 of rows: their number, and lengths (NULL: -1) and bytes of each column."""

    def __init__(self) -> None:
        self._count = 0
        self._columns = [(hashlib.sha256(), hashlib.sha256()) for _ in LOCATED_SCHEMA]

    def update(self, rows: pa.RecordBatch) -> None:
        self._count += rows.num_rows
        for (lengths, values), column in zip(self._columns, rows.columns, strict=True):
            if pa.types.is_integer(column.type) or pa.types.is_timestamp(column.type):
                fixed = column.cast(pa.int64())
                lengths.update(pc.if_else(fixed.is_valid(), 8, -1).cast(pa.int32()).to_numpy())
                values.update(fixed.fill_null(0).to_numpy())
            else:
                texts = column.cast(pa.binary())
                lengths.update(pc.binary_length(texts).fill_null(-1).to_numpy())
                joined = pa.ListArray.from_arrays([0, len(texts)], texts.fill_null(b""))
                values.update(pc.binary_join(joined, b"")[0].as_buffer())

    def digest(self) -> bytes:
        whole = hashlib.sha256(_DIGEST_RULE + self._count.to_bytes(8, "big"))
        for lengths, values in self._columns:
            whole.update(lengths.digest() + values.digest())
        return whole.digest()


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
