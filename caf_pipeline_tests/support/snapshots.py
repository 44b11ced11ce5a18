"""Snapshots and standings of few rows, as files."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote_from_bytes

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from caf_pipeline.inventory import key_windows, remaining
from caf_pipeline.inventory.ledger_rows import EXCEPTION_SCHEMA, STANDING_SCHEMA
from caf_pipeline.inventory.objects import S3Object, SkipReason, is_supported
from caf_pipeline.inventory.snapshot import Snapshot, SnapshotWriter
from caf_pipeline.system import parquet

MOMENT = datetime(2026, 11, 1, 12, 30, 15, 123456, UTC)

ODD_KEYS = [
    b"\xff", b"%FF", b"a\xffb", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xf5",
    b"\xe2\x82", b"a\0b", b"\0", b"x" * 1024, b"x" * 1025, "é".encode() * 512, "é".encode() * 513,
    "\U0001f600".encode(), b"\xef\xbf\xbf", b"'", b"\\", b"\\xff", b"\\x41", b'"', b"`", b"$$",
    b";--", b"\n", b" ", b"%", b"%25", b"a/", b"/", b"..", b"NULL",
]  # fmt: skip


@dataclass(frozen=True)
class StandingRow:
    """A row of a standing (STANDING_SCHEMA)."""

    key: bytes
    object_version: str
    standing: str
    reason: str | None = None
    due: bool = False
    last_modified: datetime | None = MOMENT


def thing(
    key: bytes, *, etag: str = "e", size: int = 1, version: str | None = None, minute: int = 0
) -> S3Object:
    return S3Object(key, version, etag, size, MOMENT + timedelta(minutes=minute))


def write_standing(path: Path, rows: list[StandingRow]) -> Path:
    columns = {name: [getattr(row, name) for row in rows] for name in STANDING_SCHEMA.names}
    pq.write_table(pa.table(columns, schema=STANDING_SCHEMA), path)
    return path


def write_exceptions(path: Path, *rows: Mapping[str, object]) -> Path:
    pq.write_table(pa.Table.from_pylist([*rows], schema=EXCEPTION_SCHEMA), path)
    return path


def write_snapshot(path: Path, *pages: list[S3Object], **bounds: bytes) -> Snapshot:
    with SnapshotWriter(path, source="demo", listed_at=MOMENT, **bounds) as writer:
        for page in pages:
            writer.add(page)
        return writer.finish()


def damage_page(path: Path, column: str) -> None:
    """Change the last byte of a column's last page in the first row group."""
    group = pq.read_metadata(path).row_group(0)
    [chunk] = [
        column_chunk
        for column_chunk in map(group.column, range(group.num_columns))
        if column_chunk.path_in_schema == column
    ]
    data = bytearray(path.read_bytes())
    data[
        (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size - 1
    ] ^= 0x10
    path.write_bytes(data)


def recorded_key(obj: S3Object) -> bytes:
    return obj.key if is_supported(obj.key) else quote_from_bytes(obj.key).encode()


def use_small_windows(patch: pytest.MonkeyPatch) -> None:
    """Use row groups of two rows and windows of four, so that a short snapshot has several."""
    patch.setattr(parquet, "ROWS_PER_GROUP", 2)
    for module in (key_windows, remaining):
        patch.setattr(module, "WINDOW_ROWS", 4)


some_keys = st.one_of(st.sampled_from(ODD_KEYS), st.binary(min_size=1, max_size=4))
versions = st.sampled_from([None, "v1", "v'2"])


@st.composite
def sources(draw: st.DrawFn) -> tuple[list[S3Object], list[StandingRow]]:
    """Draw the objects of a snapshot, and standing rows of these and other objects."""
    keys = draw(st.lists(some_keys, max_size=10, unique=True))
    objects = [
        thing(key, version=draw(versions), size=draw(st.integers(0, 3))) for key in sorted(keys)
    ]
    rows = []
    for obj in [*objects, thing(b"elsewhere")]:
        for standing in draw(
            st.lists(
                st.sampled_from(["located", "claimed", "skipped", "skipped due", "other version"]),
                max_size=2,
            )
        ):
            if not is_supported(obj.key):
                rows.append(
                    StandingRow(recorded_key(obj), obj.object_version, "skipped", "unsupported_key")
                )
            elif standing == "other version":
                rows.append(StandingRow(obj.key, "v9", "located"))
            elif standing.startswith("skipped"):
                reason = draw(st.sampled_from(["deleted", "cold_storage", "too_large"]))
                rows.append(
                    StandingRow(
                        obj.key,
                        obj.object_version,
                        "skipped",
                        reason,
                        due=standing == "skipped due",
                    )
                )
            else:
                rows.append(StandingRow(obj.key, obj.object_version, standing))
    return objects, rows


def rows_about(obj: S3Object, rows: list[StandingRow]) -> list[StandingRow]:
    encoded = not is_supported(obj.key)
    return [
        row
        for row in rows
        if (row.key, row.object_version) == (recorded_key(obj), obj.object_version)
        and (row.reason == SkipReason.UNSUPPORTED_KEY) == encoded
    ]
