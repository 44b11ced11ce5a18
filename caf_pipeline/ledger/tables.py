"""The ledger's tables for SQLAlchemy: names, types and keys, as `sql/` creates them.

A test compares both. Comments, defaults, checks and indexes are in `sql/` alone.
"""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    Uuid,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TIMESTAMP

METADATA: Final = MetaData()

TEXT_C: Final = Text(collation="C")
TIMESTAMPTZ: Final = TIMESTAMP(timezone=True)

SOURCES: Final = Table(
    "sources",
    METADATA,
    Column("source_id", Integer, primary_key=True),
    Column("name", TEXT_C),
    Column("archive_id", Text),
    Column("address", Text),
    Column("created_at", TIMESTAMPTZ),
    Column("ids_set_aside", ARRAY(Text)),
)

POST_KEYS: Final = Table(
    "post_keys",
    METADATA,
    Column("source_id", Integer, ForeignKey("sources.source_id"), primary_key=True),
    Column("key", LargeBinary),
)

PLANS: Final = Table(
    "plans",
    METADATA,
    Column("plan_id", BigInteger, primary_key=True),
    Column("source_id", Integer, ForeignKey("sources.source_id")),
    Column("name", TEXT_C),
    Column("sha256", LargeBinary),
    Column("snapshot", Text),
    Column("folder", Text),
    Column("object_count", BigInteger),
    Column("object_bytes", BigInteger),
    Column("created_at", TIMESTAMPTZ),
)

CAF_FILES: Final = Table(
    "caf_files",
    METADATA,
    Column("caf_file_id", BigInteger, primary_key=True),
    Column("name", TEXT_C),
    Column("source_id", Integer, ForeignKey("sources.source_id")),
    Column("plan_id", BigInteger, ForeignKey("plans.plan_id")),
    Column("number", Integer),
    Column("state", Text),
    Column("reason", Text),
    Column("epoch", BigInteger),
    Column("attempts", Integer),
    Column("failures", ARRAY(Text)),
    Column("object_count", BigInteger),
    Column("object_bytes", BigInteger),
    Column("expected_size_bytes", BigInteger),
    Column("caf_size_bytes", BigInteger),
    Column("stored_size_bytes", BigInteger),
    Column("member_count", BigInteger),
    Column("member_bytes", BigInteger),
    Column("skipped_count", BigInteger),
    Column("released_count", BigInteger),
    Column("located_count", BigInteger),
    Column("row_count", BigInteger),
    Column("row_set", Uuid),
    Column("samples", JSONB),
    Column("unread", JSONB),
    Column("tail_start", BigInteger),
    Column("tail_sha256", LargeBinary),
    Column("has_log_times", Boolean),
    Column("from_unknown_post", Boolean),
    Column("created_at", TIMESTAMPTZ),
    Column("updated_at", TIMESTAMPTZ),
    Column("sealed_at", TIMESTAMPTZ),
    Column("located_at", TIMESTAMPTZ),
    Column("restored_at", TIMESTAMPTZ),
    Column("adopted_at", TIMESTAMPTZ),
    Column("header", LargeBinary),
    Column("nonce", LargeBinary),
    Column("recipients", ARRAY(Text)),
)

CHUNK_COPIES: Final = Table(
    "chunk_copies",
    METADATA,
    Column("caf_file_id", BigInteger, ForeignKey("caf_files.caf_file_id"), primary_key=True),
    Column("store", TEXT_C, primary_key=True),
    Column("state", Text),
    Column("damage", Text),
    Column("merkle_root", LargeBinary),
    Column("proof_type", SmallInteger),
    Column("archive_id", Text),
    Column("owner", Text),
    Column("start", BigInteger),
    Column("updated_at", TIMESTAMPTZ),
    Column("posted_at", TIMESTAMPTZ),
    Column("verified_at", TIMESTAMPTZ),
    Column("checked_at", TIMESTAMPTZ),
    Column("look_again_at", TIMESTAMPTZ),
    Column("suspected_at", TIMESTAMPTZ),
    Column("unanswered_at", TIMESTAMPTZ),
    Column("expires_at", TIMESTAMPTZ),
)

LEASES: Final = Table(
    "leases",
    METADATA,
    Column("name", TEXT_C, primary_key=True),
    Column("epoch", BigInteger),
    Column("run", Text),
    Column("boot_id", Text),
    Column("pid", BigInteger),
    Column("process_started", Double),
    Column("expires_at", TIMESTAMPTZ),
)

RUN_PROGRESS: Final = Table(
    "run_progress",
    METADATA,
    Column("run", Text, primary_key=True),
    Column("boot_id", Text, primary_key=True),
    Column("pid", BigInteger, primary_key=True),
    Column("process_started", Double, primary_key=True),
    Column("source", TEXT_C, primary_key=True),
    Column("chunk", TEXT_C),
    Column("packed_objects", BigInteger),
    Column("packed_bytes", BigInteger),
    Column("read_bytes", BigInteger),
    Column("sent_bytes", BigInteger),
    Column("waits", JSONB),
    Column("expires_at", TIMESTAMPTZ),
)

STAGING_RESERVATIONS: Final = Table(
    "staging_reservations",
    METADATA,
    Column("caf_file_id", BigInteger, ForeignKey("caf_files.caf_file_id"), primary_key=True),
    Column("folder", Text),
    Column("size_bytes", BigInteger),
)

PACKING_SECRETS: Final = Table(
    "packing_secrets",
    METADATA,
    Column("caf_file_id", BigInteger, ForeignKey("caf_files.caf_file_id"), primary_key=True),
    Column("secret", LargeBinary),
)

CLAIMS: Final = Table(
    "claims",
    METADATA,
    Column("source_id", Integer, primary_key=True),
    Column("file_path", TEXT_C, primary_key=True),
    Column("version_id", TEXT_C, primary_key=True),
    Column("etag", TEXT_C, primary_key=True),
    Column("size_bytes", BigInteger, primary_key=True),
    Column("rewritten_at", TIMESTAMPTZ, primary_key=True),
    Column("caf_file_id", BigInteger),
    Column("last_modified", TIMESTAMPTZ),
)

HEADER_SETS: Final = Table(
    "header_sets",
    METADATA,
    Column("header_set", LargeBinary, primary_key=True),
    Column("content_type", Text),
    Column("content_encoding", Text),
    Column("content_language", Text),
    Column("content_disposition", Text),
    Column("cache_control", Text),
    Column("expires", Text),
    Column("user_metadata", JSONB),
)

FILE_LOCATIONS: Final = Table(
    "file_locations",
    METADATA,
    Column("caf_file_id", BigInteger),
    Column("start_byte", BigInteger),
    Column("end_byte", BigInteger),
    Column("size_bytes", BigInteger),
    Column("last_modified", TIMESTAMPTZ),
    Column("rewritten_at", TIMESTAMPTZ),
    Column("source_id", Integer),
    Column("part", Integer),
    Column("file_path", TEXT_C),
    Column("version_id", TEXT_C),
    Column("etag", TEXT_C),
    Column("sha256", LargeBinary),
    Column("crc64nvme", LargeBinary),
    Column("s3_checksum", Text),
    Column("header_set", LargeBinary),
    PrimaryKeyConstraint(
        "source_id", "file_path", "version_id", "etag", "size_bytes", "rewritten_at", "part"
    ),
)

PENDING_LOCATIONS: Final = Table(
    "pending_locations",
    METADATA,
    *(Column(column.name, column.type) for column in FILE_LOCATIONS.columns),
)

OBJECT_PARTS: Final = Table(
    "object_parts",
    METADATA,
    Column("caf_file_id", BigInteger, ForeignKey("caf_files.caf_file_id"), primary_key=True),
    Column("plan_id", BigInteger, ForeignKey("plans.plan_id")),
    Column("source_id", Integer, ForeignKey("sources.source_id")),
    Column("file_path", TEXT_C),
    Column("version_id", TEXT_C),
    Column("etag", TEXT_C),
    Column("object_bytes", BigInteger),
    Column("rewritten_at", TIMESTAMPTZ),
    Column("part", Integer),
    Column("part_count", Integer),
    Column("start_byte", BigInteger),
    Column("end_byte", BigInteger),
    Column("location_part", Integer),
    Column("abandoned", Boolean),
)

SKIPPED_OBJECTS: Final = Table(
    "skipped_objects",
    METADATA,
    Column("source_id", Integer, ForeignKey("sources.source_id"), primary_key=True),
    Column("file_path", TEXT_C, primary_key=True),
    Column("version_id", TEXT_C, primary_key=True),
    Column("etag", TEXT_C, primary_key=True),
    Column("size_bytes", BigInteger, primary_key=True),
    Column("rewritten_at", TIMESTAMPTZ, primary_key=True),
    Column("reason", Text),
    Column("detail", Text),
    Column("last_modified", TIMESTAMPTZ),
    Column("caf_file_id", BigInteger, ForeignKey("caf_files.caf_file_id")),
    Column("times", Integer),
    Column("first_at", TIMESTAMPTZ),
    Column("last_at", TIMESTAMPTZ),
    Column("retry_at", TIMESTAMPTZ),
)

READ_FAILURES: Final = Table(
    "read_failures",
    METADATA,
    Column("caf_file_id", BigInteger, ForeignKey("caf_files.caf_file_id"), primary_key=True),
    Column("file_path", TEXT_C, primary_key=True),
    Column("object_version", TEXT_C, primary_key=True),
    Column("times", Integer),
    Column("last_run", Text),
)

LOG_TIMES: Final = Table(
    "log_times",
    METADATA,
    Column("caf_file_id", BigInteger, primary_key=True),
    Column("start_byte", BigInteger, primary_key=True),
    Column("first_ms", BigInteger),
    Column("last_ms", BigInteger),
)

INVENTORIES: Final = Table(
    "inventories",
    METADATA,
    Column("source_id", Integer, ForeignKey("sources.source_id"), primary_key=True),
    Column("name", TEXT_C, primary_key=True),
    Column("taken_at", TIMESTAMPTZ),
    Column("after_key", LargeBinary),
    Column("until_key", LargeBinary),
    Column("all_versions", Boolean),
    Column("current_objects", BigInteger),
    Column("older_objects", BigInteger),
    Column("gone_objects", BigInteger),
    Column("counted_at", TIMESTAMPTZ),
    Column("beside", JSONB(none_as_null=True)),
    Column("left_out", JSONB),
)

CURRENT_EXCEPTIONS: Final = Table(
    "current_exceptions",
    METADATA,
    Column("source_id", Integer, primary_key=True),
    Column("file_path", TEXT_C, primary_key=True),
    Column("stated_at", TIMESTAMPTZ, primary_key=True),
    Column("object_version", TEXT_C),
    Column("inventory", TEXT_C),
    Column("last_modified", TIMESTAMPTZ),
)

NOTICED_KEYS: Final = Table(
    "noticed_keys",
    METADATA,
    Column("source_id", Integer, ForeignKey("sources.source_id"), primary_key=True),
    Column("file_path", LargeBinary, primary_key=True),
    Column("sequencer", TEXT_C),
    Column("listing", TEXT_C),
    Column("noticed_at", TIMESTAMPTZ),
    Column("restored", Boolean),
)

MESSAGES_SET_APART: Final = Table(
    "messages_set_apart",
    METADATA,
    Column("source_id", Integer, ForeignKey("sources.source_id"), primary_key=True),
    Column("message_id", TEXT_C, primary_key=True),
    Column("body", LargeBinary),
    Column("reason", Text),
    Column("set_apart_at", TIMESTAMPTZ),
)

QUEUE_READS: Final = Table(
    "queue_reads",
    METADATA,
    Column("source_id", Integer, ForeignKey("sources.source_id"), primary_key=True),
    Column("read_at", TIMESTAMPTZ),
)

REBUILDS: Final = Table(
    "rebuilds",
    METADATA,
    Column("source_id", Integer, ForeignKey("sources.source_id"), primary_key=True),
    Column("began_at", TIMESTAMPTZ),
)

REPLICAS: Final = Table(
    "replicas",
    METADATA,
    Column("caf_file_id", BigInteger, primary_key=True),
    Column("store", TEXT_C, primary_key=True),
    Column("provider", Text, primary_key=True),
    Column("proof", Text),
    Column("checked_at", TIMESTAMPTZ),
    Column("listed", Boolean),
    Column("last_proven", BigInteger),
    Column("last_window", BigInteger),
    Column("windows", Integer),
    Column("fault", Text),
    ForeignKeyConstraint(
        ["caf_file_id", "store"], ["chunk_copies.caf_file_id", "chunk_copies.store"]
    ),
)

FULL_READS: Final = Table(
    "full_reads",
    METADATA,
    Column("caf_file_id", BigInteger, primary_key=True),
    Column("store", TEXT_C, primary_key=True),
    Column("provider", Text),
    Column("read_at", TIMESTAMPTZ),
    Column("opened_with", Text),
    Column("merkle_root", LargeBinary),
    Column("tail_sha256", LargeBinary),
    Column("agreed_sha256", LargeBinary),
    ForeignKeyConstraint(
        ["caf_file_id", "store"], ["chunk_copies.caf_file_id", "chunk_copies.store"]
    ),
)

PROVIDERS: Final = Table(
    "providers",
    METADATA,
    Column("provider", TEXT_C, primary_key=True),
    Column("upload_rate", Double),
    Column("download_rate", Double),
    Column("failures", Integer),
    Column("failed_at", TIMESTAMPTZ),
)

TRANSACTIONS: Final = Table(
    "transactions",
    METADATA,
    Column("hash", Text, primary_key=True),
    Column("account", TEXT_C),
    Column("sequence", BigInteger),
    Column("timeout_height", BigInteger),
    Column("body", LargeBinary),
    Column("purpose", Text),
    Column("cost", BigInteger),
    Column("cost_told", Boolean),
    Column("outcome", Text),
    Column("created_at", TIMESTAMPTZ),
    Column("settled_at", TIMESTAMPTZ),
)

POSTS: Final = Table(
    "posts",
    METADATA,
    Column("caf_file_id", BigInteger, ForeignKey("caf_files.caf_file_id"), primary_key=True),
    Column("account", TEXT_C, primary_key=True),
    Column("message", LargeBinary),
    Column("charged_bytes", BigInteger),
    Column("asked_at", TIMESTAMPTZ),
    Column("epoch", BigInteger),
)

TRANSACTION_POSTS: Final = Table(
    "transaction_posts",
    METADATA,
    Column("hash", Text, primary_key=True),
    Column("account", TEXT_C),
    Column("position", Integer, primary_key=True),
    Column("caf_file_id", BigInteger, ForeignKey("caf_files.caf_file_id")),
    Column("start", BigInteger),
    Column("live", Boolean),
    ForeignKeyConstraint(["hash", "account"], ["transactions.hash", "transactions.account"]),
)

CHAIN_HEIGHTS: Final = Table(
    "chain_heights",
    METADATA,
    Column("chain_id", TEXT_C, primary_key=True),
    Column("height", BigInteger),
)

STORAGE_PLANS: Final = Table(
    "storage_plans",
    METADATA,
    Column("account", TEXT_C, primary_key=True),
    Column("read_at", TIMESTAMPTZ),
    Column("balance", BigInteger),
    Column("space_bytes", BigInteger),
    Column("used_bytes", BigInteger),
    Column("starts_at", TIMESTAMPTZ),
    Column("ends_at", TIMESTAMPTZ),
    Column("latest_end", TIMESTAMPTZ),
    Column("latest_end_space", BigInteger),
)

STORE_LOOKS: Final = Table(
    "store_looks",
    METADATA,
    Column("source_id", Integer, ForeignKey("sources.source_id"), primary_key=True),
    Column("account", TEXT_C, primary_key=True),
    Column("sequence", BigInteger),
    Column("unknown", Integer),
    Column("looked_at", TIMESTAMPTZ),
)

ARCHIVE_LOOKS: Final = Table(
    "archive_looks",
    METADATA,
    Column("account", TEXT_C, primary_key=True),
    Column("sequence", BigInteger),
    Column("archives", ARRAY(Text)),
    Column("looked_at", TIMESTAMPTZ),
)

LEFT_POSTS: Final = Table(
    "left_posts",
    METADATA,
    Column("source_id", Integer, ForeignKey("sources.source_id"), primary_key=True),
    Column("merkle_root", LargeBinary, primary_key=True),
    Column("superseded", Boolean),
    Column("left_at", TIMESTAMPTZ),
)

CHAIN_LISTINGS: Final = Table(
    "chain_listings",
    METADATA,
    Column("store", Text, primary_key=True),
    Column("next_at", TIMESTAMPTZ),
    Column("whole_at", TIMESTAMPTZ),
)

FOLDER_STORE: Final = Table(
    "folder_store",
    METADATA,
    Column("only_row", Boolean, primary_key=True),
    Column("id", Text),
)

ORDERS: Final = Table(
    "orders",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("value", Text),
    Column("ordered_at", TIMESTAMPTZ),
)
