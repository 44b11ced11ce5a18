"""What the ledger keeps of the bucket's current content: inventories that were planned, and exceptions to the LastModified.

Source: "Which objects are to be archived" in docs/design.md.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Row

from caf_pipeline.chunk_state import GOOD
from caf_pipeline.inventory.objects import CurrentException, S3Object, VersionCounts, rewritten_version
from caf_pipeline.ledger.copy import copy_rows
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.records import Content, InventoryRecord, LocatedVersion, recorded_key

KEYS_PER_QUESTION: Final = 10_000  # a few MB of parameters

_EXCEPTION: Final = {"file_path": "text", "stated_at": "timestamptz", "object_version": "text", "last_modified": "timestamptz"}

_NEW_INVENTORY = """
    INSERT INTO inventories (source_id, name, taken_at, after_key, until_key, all_versions, beside)
    VALUES (%(source_id)s, %(name)s, %(taken_at)s, %(after)s, %(until)s, %(all_versions)s, CAST(%(beside)s AS jsonb))
    ON CONFLICT (source_id, name) DO NOTHING
    """
_LATER = (
    "SELECT after_key, until_key FROM inventories WHERE source_id = %(source_id)s AND (taken_at, name) > (%(taken_at)s, %(name)s)"
)
# A later statement of the same moment stands for both. That headers were compared stays said as long as the identity is the same.
_TAKE_EXCEPTIONS = """
    INSERT INTO current_exceptions AS old (source_id, file_path, stated_at, object_version, last_modified, inventory)
    SELECT %(source_id)s, file_path, stated_at, object_version, last_modified, %(inventory)s FROM stating
    ON CONFLICT (source_id, file_path, stated_at) DO UPDATE SET
        inventory = excluded.inventory, object_version = excluded.object_version,
        last_modified = CASE WHEN old.object_version = excluded.object_version
            THEN coalesce(excluded.last_modified, old.last_modified) ELSE excluded.last_modified END
    """
_COUNT = """
    UPDATE inventories SET current_objects = %(current)s, older_objects = %(older)s, gone_objects = %(gone)s,
        left_out = CAST(%(left_out)s AS jsonb), counted_at = now()
    WHERE source_id = %(source_id)s AND name = %(name)s
    """
# What was located since of the inventory's own plans is current where it lists current objects only.
_CONTENT = """
    SELECT name, taken_at, counted_at, all_versions, beside, left_out,
        older_objects AS older, gone_objects AS gone, current_objects AS current,
        (SELECT coalesce(sum(member_count), 0) FROM chunks JOIN plans USING (plan_id)
            WHERE chunks.source_id = %(source_id)s AND plans.snapshot = inventories.name AND located_at > counted_at
            AND state = ANY(%(good)s) AND NOT EXISTS (SELECT FROM object_parts
                WHERE object_parts.caf_file_id = chunks.caf_file_id))
        + (SELECT count(*) FROM objects_in_parts AS whole JOIN plans USING (plan_id)
            WHERE whole.source_id = %(source_id)s AND plans.snapshot = inventories.name AND located_at > counted_at)
            AS located_since
    FROM inventories
    WHERE source_id = %(source_id)s AND counted_at IS NOT NULL AND after_key = '' AND until_key IS NULL
    ORDER BY taken_at DESC, name DESC LIMIT 1
    """
# Of chunks of the counted inventory's own plan, `_CONTENT` knows more, unless that lists older versions, too.
_LOCATED_SINCE_COUNT = """
    WITH counted AS (SELECT name, taken_at, counted_at, all_versions FROM inventories
        WHERE source_id = %(source_id)s AND counted_at IS NOT NULL AND after_key = '' AND until_key IS NULL
        ORDER BY taken_at DESC, name DESC LIMIT 1)
    SELECT EXISTS (SELECT FROM counted CROSS JOIN chunks JOIN plans USING (plan_id)
        JOIN inventories ON inventories.source_id = chunks.source_id AND inventories.name = plans.snapshot
        WHERE chunks.source_id = %(source_id)s AND located_at > counted.counted_at
        AND inventories.taken_at <= counted.taken_at AND (inventories.name <> counted.name OR counted.all_versions))
    """
_VERSIONS = """
    WITH in_parts AS MATERIALIZED (SELECT * FROM objects_in_parts
        WHERE source_id = %(source_id)s AND file_path = ANY(CAST(%(keys)s AS text[])))
    SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at) AS object_version, etag, size_bytes, sha256,
        crc64nvme, s3_checksum, parts, header_set, chunks.name AS chunk
    FROM unnest(CAST(%(keys)s AS text[])) AS asked (key) CROSS JOIN LATERAL (
        SELECT file_path, version_id, etag, size_bytes, rewritten_at, sha256, crc64nvme, s3_checksum, NULL::jsonb AS parts,
            header_set, caf_file_id FROM file_locations
        WHERE source_id = %(source_id)s AND file_path = asked.key AND part = 0
        UNION ALL SELECT file_path, version_id, etag, size_bytes, rewritten_at, NULL, NULL, NULL, parts, header_set, caf_file_id
        FROM in_parts WHERE file_path = asked.key) AS found
    JOIN chunks USING (caf_file_id) WHERE state = ANY(%(good)s) AND version_id = ''
    """
# LATERAL with LIMIT keeps the planner to one look-up a key: left to itself it may read all of a table of 10^8 rows.
_SETTLED = """
    WITH asked (key, version, with_time, modified, has_version_id, is_latest) AS (SELECT * FROM unnest(CAST(%(keys)s AS text[]),
        CAST(%(versions)s AS text[]), CAST(%(with_times)s AS text[]), CAST(%(times)s AS timestamptz[]),
        CAST(%(have_ids)s AS boolean[]), CAST(%(are_latest)s AS boolean[]))),
    in_parts AS MATERIALIZED (SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at) AS object_version,
            last_modified FROM objects_in_parts
        WHERE source_id = %(source_id)s AND file_path = ANY(CAST(%(keys)s AS text[])))
    SELECT key, version FROM asked
    LEFT JOIN LATERAL (SELECT true AS yes FROM claims WHERE source_id = %(source_id)s AND file_path = key
        AND object_version(version_id, etag, size_bytes, rewritten_at) IN (version, with_time) LIMIT 1) AS claimed ON true
    LEFT JOIN LATERAL (SELECT true AS yes FROM skipped_objects WHERE source_id = %(source_id)s AND file_path = key
        AND object_version(version_id, etag, size_bytes, rewritten_at) IN (version, with_time)
        AND retry_at > now() LIMIT 1) AS skipped ON true
    LEFT JOIN LATERAL (SELECT stated_at, object_version FROM current_exceptions
        WHERE source_id = %(source_id)s AND file_path = key ORDER BY stated_at DESC LIMIT 1) AS said ON true
    LEFT JOIN LATERAL (SELECT object_version FROM current_exceptions WHERE source_id = %(source_id)s AND file_path = key
        AND last_modified = modified AND starts_with(object_version, version) ORDER BY stated_at DESC LIMIT 1) AS compared ON true
    LEFT JOIN LATERAL (
        SELECT max(known.last_modified) AS latest, max(known.last_modified) FILTER (WHERE is_it) AS last_modified,
            max(known.object_version) FILTER (WHERE is_it) AS object_version
        FROM (SELECT object_version(version_id, etag, size_bytes, rewritten_at) AS object_version, last_modified
            FROM file_locations JOIN chunks USING (caf_file_id)
            WHERE file_locations.source_id = %(source_id)s AND file_path = key AND part = 0 AND state = ANY(%(good)s)
            UNION ALL SELECT object_version, last_modified FROM in_parts WHERE file_path = key) AS known
        CROSS JOIN LATERAL (SELECT known.object_version IN (with_time, compared.object_version)
            OR known.object_version = version AND (has_version_id OR known.last_modified = modified) AS is_it) AS identity
        ) AS located ON true
    WHERE claimed.yes OR skipped.yes OR CASE WHEN NOT is_latest THEN located.object_version IS NOT NULL
        WHEN said.stated_at >= latest THEN said.object_version = located.object_version ELSE located.last_modified = latest END
    """


def last_whole(source_id: str) -> str:
    """Return the query of when the latest whole inventory that is planned was taken; `source_id` is SQL for its source's."""
    whole = "after_key = '' AND until_key IS NULL"
    return f"SELECT max(taken_at) FROM inventories WHERE inventories.source_id = {source_id} AND {whole}"


def still_skipped(source_id: str) -> str:
    """Return the condition of rows of `skipped_objects` that tell of what is skipped now; `source_id` is SQL for their source's.

    The plan of a whole inventory claims each object of it that is due again, and lets those be due that it did not list
    (`end_skips`). Where one that was due was not claimed, it was not listed any more: it was deleted or overwritten, and its row
    is history.
    """
    return f"reason <> 'waiting' AND retry_at > least(coalesce(({last_whole(source_id)}), '-infinity'), now())"


class CurrentContent(LedgerPart):
    """What inventories said of the bucket's current content."""

    def later_inventories(self, inventory: InventoryRecord) -> Sequence[tuple[bytes, bytes | None]]:
        """Return the ranges of keys (greater than, up to and including) of planned inventories that were taken after this one."""
        with self._of_source(inventory.source) as (connection, source_id):
            values = {"source_id": source_id, "name": inventory.name, "taken_at": inventory.taken_at}
            rows = connection.exec_driver_sql(_LATER, values).fetchall()
        return [(row.after_key, row.until_key) for row in rows]

    def last_inventory(self, source: str) -> datetime | None:
        """Return when the latest whole inventory that is planned was taken; None where none was."""
        with self._of_source(source) as (connection, source_id):
            found: datetime | None = connection.exec_driver_sql(
                last_whole("%(source_id)s"), {"source_id": source_id}
            ).scalar_one_or_none()
        return found

    def is_planned(self, source: str, inventory: str) -> bool:
        """Tell whether an inventory of this name is planned."""
        with self._of_source(source) as (connection, source_id):
            statement = "SELECT EXISTS (SELECT FROM inventories WHERE source_id = %(source_id)s AND name = %(name)s)"
            return bool(connection.exec_driver_sql(statement, {"source_id": source_id, "name": inventory}).scalar_one())

    def record_planned(self, inventory: InventoryRecord, exceptions: Iterable[CurrentException]) -> None:
        """Write that an inventory is planned, and the exceptions that it states, at once; as `record_exceptions`."""
        with self._of_source(inventory.source) as (connection, source_id):
            beside = json.dumps(asdict(inventory.beside)) if inventory.beside else None
            connection.exec_driver_sql(_NEW_INVENTORY, {**asdict(inventory), "beside": beside, "source_id": source_id})
            _record_exceptions(connection, source_id, inventory, exceptions)

    def record_exceptions(self, inventory: InventoryRecord, exceptions: Iterable[CurrentException]) -> None:
        """Write exceptions that an inventory states; one of the same key and time is replaced."""
        with self._of_source(inventory.source) as (connection, source_id):
            _record_exceptions(connection, source_id, inventory, exceptions)

    def record_content(
        self, inventory: InventoryRecord, *, current: int, older: int, gone: int, left_out: Mapping[str, int]
    ) -> None:
        """Write how many located objects were current, older and gone as of an inventory that is planned.

        `left_out`: how many of its objects each filter leaves out.
        """
        with self._of_source(inventory.source) as (connection, source_id):
            counts = {"current": current, "older": older, "gone": gone, "left_out": json.dumps(dict(left_out))}
            connection.exec_driver_sql(_COUNT, {"source_id": source_id, "name": inventory.name, **counts})

    def located_since_count(self, source: str) -> bool:
        """Tell whether chunks of the counted inventory, or of an earlier one, were located after it was counted."""
        with self._of_source(source) as (connection, source_id):
            return bool(connection.exec_driver_sql(_LOCATED_SINCE_COUNT, {"source_id": source_id}).scalar_one())

    def located_versions(self, source: str, keys: Sequence[str]) -> Sequence[LocatedVersion]:
        """Return every identity without a version id that is located of these keys, in chunks in good standing."""
        with self._of_source(source) as (connection, source_id):
            rows = connection.exec_driver_sql(_VERSIONS, {"source_id": source_id, "keys": list(keys), "good": GOOD}).fetchall()
        return [
            LocatedVersion(
                row.file_path, row.object_version, row.etag, int(row.size_bytes), row.chunk, _checksums(row), row.header_set
            )
            for row in rows
        ]

    def settled_objects(self, source: str, listed: Sequence[S3Object]) -> set[tuple[str, str]]:
        """Of these, return (key as recorded, object version) of those of which a plan has nothing to do.

        They are claimed, skipped and not due, or located, with the listed LastModified or headers that were compared; the latest
        version of a key is also what a look-up of the key gives out.
        """
        found: set[tuple[str, str]] = set()
        with self._of_source(source) as (connection, source_id):
            for at in range(0, len(listed), KEYS_PER_QUESTION):
                some = listed[at : at + KEYS_PER_QUESTION]
                values = {
                    "source_id": source_id,
                    "keys": [recorded_key(one) for one in some],
                    "versions": [one.object_version for one in some],
                    "with_times": [rewritten_version(one.object_version, one.last_modified) for one in some],
                    "times": [one.last_modified for one in some],
                    "have_ids": [one.version_id is not None for one in some],
                    "are_latest": [one.is_latest for one in some],
                    "good": GOOD,
                }
                found |= {(key, version) for key, version in connection.exec_driver_sql(_SETTLED, values)}
        return found


def _checksums(row: Row[Any]) -> Mapping[str, bytes]:
    """Return the digests of a whole object by algorithm. A digest that packing computed takes precedence over S3's."""
    if row.parts is None:
        computed = {"sha256": row.sha256, "crc64nvme": row.crc64nvme}
        return _from_s3(row.s3_checksum) | {name: bytes(digest) for name, digest in computed.items() if digest is not None}
    of_parts = {part["s3_checksum"] for part in row.parts}
    digests = _from_s3(of_parts.pop()) if len(of_parts) == 1 else {}
    if all(part["crc64nvme"] for part in row.parts):
        from caf_pipeline.inventory.checksums import combine_crc64nvme  # noqa: PLC0415 - a look-up needs no awscrt

        parts = [(bytes.fromhex(part["crc64nvme"]), part["end_byte"] - part["start_byte"]) for part in row.parts]
        digests["crc64nvme"] = combine_crc64nvme(parts)
    return digests


def _from_s3(checksum: str | None) -> dict[str, bytes]:
    """Return S3's own checksum (`Checksum.text`) as a digest by its algorithm; nothing if there is none that can be read."""
    fields = re.fullmatch(r"([a-z0-9]+):((?:[0-9a-f]{2})+)", checksum or "")
    return {fields[1]: bytes.fromhex(fields[2])} if fields else {}


def _record_exceptions(
    connection: Connection, source_id: int, inventory: InventoryRecord, exceptions: Iterable[CurrentException]
) -> None:
    connection.exec_driver_sql(
        'CREATE TEMPORARY TABLE stating (file_path text COLLATE "C", stated_at timestamptz, object_version text COLLATE "C",'
        " last_modified timestamptz) ON COMMIT DROP"
    )
    rows = ((one.key, one.stated_at, one.object_version, one.last_modified) for one in exceptions)
    if copy_rows(connection, "stating", _EXCEPTION, rows):
        connection.exec_driver_sql(_TAKE_EXCEPTIONS, {"source_id": source_id, "inventory": inventory.name})


def content(connection: Connection, source_id: int, located: int) -> Content | None:
    """Return the counts as of the last whole inventory that was counted, of so many located objects; None where there is none."""
    row = connection.exec_driver_sql(_CONTENT, {"source_id": source_id, "good": GOOD}).fetchone()
    if row is None:
        return None
    current = int(row.current) + (0 if row.all_versions else int(row.located_since))
    return Content(
        inventory=row.name,
        taken_at=row.taken_at,
        counted_at=row.counted_at,
        current_objects=current,
        older_objects=int(row.older),
        gone_objects=int(row.gone),
        uncounted_objects=max(0, located - current - int(row.older) - int(row.gone)),
        left_out=row.left_out,
        all_versions=row.all_versions,
        beside=VersionCounts(**row.beside) if row.beside else None,
    )
