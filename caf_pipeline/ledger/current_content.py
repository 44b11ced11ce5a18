"""The bucket's current content: planned inventories, and exceptions to LastModified.

Source: "Which objects are archived" in docs/explanation/design.md.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, exists, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert

from caf_pipeline.chunk_state import GOOD
from caf_pipeline.inventory.objects import (
    CurrentException,
    S3Object,
    VersionCounts,
    rewritten_version,
)
from caf_pipeline.ledger.claims import copy_rows
from caf_pipeline.ledger.engine import LedgerPart
from caf_pipeline.ledger.records import Content, InventoryRecord, LocatedVersion, recorded_key
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.ledger.tables import INVENTORIES
from caf_pipeline.ledger.views import LAST_WHOLE_INVENTORIES

KEYS_PER_QUERY: Final = 10_000  # a few MB of parameters

_CREATE_STATING: Final = """
    CREATE TEMPORARY TABLE stating (
        file_path text COLLATE "C", stated_at timestamptz, object_version text COLLATE "C",
        last_modified timestamptz
    ) ON COMMIT DROP
    """
_EXCEPTION: Final = {
    "file_path": "text",
    "stated_at": "timestamptz",
    "object_version": "text",
    "last_modified": "timestamptz",
}

_NEW_INVENTORY: Final = insert(INVENTORIES).on_conflict_do_nothing(
    index_elements=["source_id", "name"]
)
_LATER: Final = select(INVENTORIES.c.after_key, INVENTORIES.c.until_key).where(
    INVENTORIES.c.source_id == bindparam("source_id"),
    tuple_(INVENTORIES.c.taken_at, INVENTORIES.c.name)
    > tuple_(
        bindparam("taken_at", type_=INVENTORIES.c.taken_at.type),
        bindparam("name", type_=INVENTORIES.c.name.type),
    ),
)
_COUNT: Final = (
    update(INVENTORIES)
    .where(
        INVENTORIES.c.source_id == bindparam("of_source"),
        INVENTORIES.c.name == bindparam("of_name"),
    )
    .values(
        current_objects=bindparam("current"),
        older_objects=bindparam("older"),
        gone_objects=bindparam("gone"),
        left_out=bindparam("left_out"),
        counted_at=func.now(),
    )
)
_LAST_WHOLE: Final = select(LAST_WHOLE_INVENTORIES.c.taken_at).where(
    LAST_WHOLE_INVENTORIES.c.source_id == bindparam("source_id")
)
_IS_PLANNED: Final = select(
    exists().where(
        INVENTORIES.c.source_id == bindparam("source_id"), INVENTORIES.c.name == bindparam("name")
    )
)


class CurrentContent(LedgerPart):
    """Statements of inventories about the bucket's current content."""

    def later_inventories(self, inventory: InventoryRecord) -> Sequence[tuple[bytes, bytes | None]]:
        """Key ranges of planned inventories that were taken after this one."""
        with self._of_source(inventory.source) as (connection, source_id):
            values = {
                "source_id": source_id,
                "name": inventory.name,
                "taken_at": inventory.taken_at,
            }
            rows = connection.execute(_LATER, values).fetchall()
        return [(row.after_key, row.until_key) for row in rows]

    def last_inventory(self, source: str) -> datetime | None:
        with self._of_source(source) as (connection, source_id):
            taken_at: datetime | None = connection.execute(
                _LAST_WHOLE, {"source_id": source_id}
            ).scalar_one_or_none()
        return taken_at

    def is_planned(self, source: str, inventory: str) -> bool:
        with self._of_source(source) as (connection, source_id):
            return bool(
                connection.execute(
                    _IS_PLANNED, {"source_id": source_id, "name": inventory}
                ).scalar_one()
            )

    def record_planned(
        self, inventory: InventoryRecord, exceptions: Iterable[CurrentException]
    ) -> None:
        with self._of_source(inventory.source) as (connection, source_id):
            columns = {
                "source_id": source_id,
                "name": inventory.name,
                "taken_at": inventory.taken_at,
                "after_key": inventory.after,
                "until_key": inventory.until,
                "all_versions": inventory.all_versions,
                "beside": asdict(inventory.beside) if inventory.beside else None,
            }
            connection.execute(_NEW_INVENTORY, columns)
            _record_exceptions(connection, source_id, inventory, exceptions)

    def record_exceptions(
        self, inventory: InventoryRecord, exceptions: Iterable[CurrentException]
    ) -> None:
        """An exception for the same key and time is replaced."""
        with self._of_source(inventory.source) as (connection, source_id):
            _record_exceptions(connection, source_id, inventory, exceptions)

    def record_content(
        self,
        inventory: InventoryRecord,
        *,
        current: int,
        older: int,
        gone: int,
        left_out: Mapping[str, int],
    ) -> None:
        """Counts are of located objects. `left_out` counts listed objects by filter."""
        with self._of_source(inventory.source) as (connection, source_id):
            counts = {"current": current, "older": older, "gone": gone, "left_out": dict(left_out)}
            connection.execute(
                _COUNT, {"of_source": source_id, "of_name": inventory.name, **counts}
            )

    def located_versions(self, source: str, keys: Sequence[str]) -> Sequence[LocatedVersion]:
        """Located identities of these keys without version id."""
        with self._of_source(source) as (connection, source_id):
            values = {"source_id": source_id, "keys": list(keys), "good": GOOD}
            rows = connection.exec_driver_sql(query("located_identities"), values).fetchall()
        return [
            LocatedVersion(
                row.file_path,
                row.object_version,
                row.etag,
                int(row.size_bytes),
                row.chunk,
                _checksums(row),
                row.header_set,
            )
            for row in rows
        ]

    def settled_objects(self, source: str, listed: Sequence[S3Object]) -> set[tuple[str, str]]:
        """Return (recorded key, object version) of the listed objects that need no plan.

        They are claimed; or skipped and not due; or located with the listed LastModified, or with
        headers that were compared. A key's latest version must also be the version that a lookup
        returns.
        """
        settled: set[tuple[str, str]] = set()
        with self._of_source(source) as (connection, source_id):
            for first in range(0, len(listed), KEYS_PER_QUERY):
                batch = listed[first : first + KEYS_PER_QUERY]
                values = {
                    "source_id": source_id,
                    "keys": [recorded_key(obj) for obj in batch],
                    "versions": [obj.object_version for obj in batch],
                    "with_times": [
                        rewritten_version(obj.object_version, obj.last_modified) for obj in batch
                    ],
                    "times": [obj.last_modified for obj in batch],
                    "have_ids": [obj.version_id is not None for obj in batch],
                    "are_latest": [obj.is_latest for obj in batch],
                    "good": GOOD,
                }
                rows = connection.exec_driver_sql(query("settled_objects"), values)
                settled |= {(key, version) for key, version in rows}
        return settled


def _checksums(row: Row[Any]) -> Mapping[str, bytes]:
    if row.parts is None:
        computed = {"sha256": row.sha256, "crc64nvme": row.crc64nvme}
        return _from_s3(row.s3_checksum) | {
            name: bytes(digest) for name, digest in computed.items() if digest is not None
        }
    checksums = {part["s3_checksum"] for part in row.parts}
    digests = _from_s3(checksums.pop()) if len(checksums) == 1 else {}
    if all(part["crc64nvme"] for part in row.parts):
        from caf_pipeline.inventory.checksums import combine_crc64nvme  # noqa: PLC0415 - a lookup needs no awscrt

        parts = [
            (bytes.fromhex(part["crc64nvme"]), part["end_byte"] - part["start_byte"])
            for part in row.parts
        ]
        digests["crc64nvme"] = combine_crc64nvme(parts)
    return digests


def _from_s3(checksum: str | None) -> dict[str, bytes]:
    fields = re.fullmatch(r"([a-z0-9]+):((?:[0-9a-f]{2})+)", checksum or "")
    return {fields[1]: bytes.fromhex(fields[2])} if fields else {}


def _record_exceptions(
    connection: Connection,
    source_id: int,
    inventory: InventoryRecord,
    exceptions: Iterable[CurrentException],
) -> None:
    connection.exec_driver_sql(_CREATE_STATING)
    rows = ((row.key, row.stated_at, row.object_version, row.last_modified) for row in exceptions)
    if copy_rows(connection, "stating", _EXCEPTION, rows):
        connection.exec_driver_sql(
            query("take_exceptions"), {"source_id": source_id, "inventory": inventory.name}
        )


def content(connection: Connection, source_id: int, located: int) -> Content | None:
    """Return the counts of the last counted whole inventory."""
    row = connection.exec_driver_sql(
        query("counted_content"), {"source_id": source_id, "good": GOOD}
    ).fetchone()
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
