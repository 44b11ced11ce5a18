"""The ledger's views for SQLAlchemy, with the types of the tables' columns. `sql/` creates them."""

from typing import Any, Final

from sqlalchemy import Boolean, Column, MetaData, Table, Text
from sqlalchemy.dialects.postgresql import JSONB

from caf_pipeline.ledger.tables import (
    CAF_FILES,
    CHUNK_COPIES,
    FILE_LOCATIONS,
    INVENTORIES,
    OBJECT_PARTS,
    SKIPPED_OBJECTS,
)

VIEWS: Final = MetaData()


def _columns(table: Table, names: str) -> list[Column[Any]]:
    return [Column(name, table.c[name].type) for name in names.split()]


CHUNKS: Final = Table(
    "chunks",
    VIEWS,
    Column("state", Text),
    Column("chunk_state", Text),
    Column("copy_state", Text),
    Column("encrypted", Boolean),
    *_columns(
        CAF_FILES,
        "caf_file_id name source_id plan_id number reason epoch attempts failures "
        "object_count object_bytes expected_size_bytes caf_size_bytes stored_size_bytes "
        "member_count member_bytes skipped_count released_count samples unread tail_start "
        "tail_sha256 has_log_times from_unknown_post created_at updated_at sealed_at located_at "
        "restored_at adopted_at",
    ),
    *_columns(
        CHUNK_COPIES,
        "store merkle_root proof_type owner start posted_at verified_at checked_at look_again_at "
        "suspected_at unanswered_at",
    ),
)
LAST_WHOLE_INVENTORIES: Final = Table(
    "last_whole_inventories", VIEWS, *_columns(INVENTORIES, "source_id taken_at")
)
CURRENT_SKIPS: Final = Table(
    "current_skips",
    VIEWS,
    *(Column(column.name, column.type) for column in SKIPPED_OBJECTS.columns),
)
OBJECTS_IN_PARTS: Final = Table(
    "objects_in_parts",
    VIEWS,
    *_columns(
        FILE_LOCATIONS,
        "source_id file_path version_id etag size_bytes rewritten_at last_modified header_set",
    ),
    *_columns(OBJECT_PARTS, "plan_id part_count caf_file_id"),
    *_columns(CAF_FILES, "located_at from_unknown_post"),
    Column("parts", JSONB),
)
