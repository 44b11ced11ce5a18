"""The ledger's tables for SQLAlchemy, with a comment for each table and column.

`sql/` creates the tables; a test compares both. `make docs` writes docs/reference/schema.md from
the comments. Text that is compared as bytes has the collation "C": no locale may reorder keys.
"""

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TIMESTAMP

METADATA: Final = MetaData()
"""In the order of docs/reference/schema.md, without `schema_files`."""

REFERS_TO: Final = "refers_to"

TEXT_C: Final = Text(collation="C")
TIMESTAMPTZ: Final = TIMESTAMP(timezone=True)
NOW: Final = text("now()")
ZERO: Final = text("0")
ONE: Final = text("1")
EMPTY: Final = text("''")
TRUE: Final = text("true")
FALSE: Final = text("false")


def refers_to(column: str) -> dict[str, Any]:
    """Return a column's `info` instead of a foreign key."""
    return {REFERS_TO: column}


def rewritten_at(*, primary_key: bool = False) -> Column[Any]:
    """Return the column for the time of a rewrite, which is part of an identity."""
    comment = (
        "LastModified of an object archived again under the same ETag and size; else -infinity"
    )
    return Column(
        "rewritten_at",
        TIMESTAMPTZ,
        primary_key=primary_key,
        nullable=False,
        server_default=text("'-infinity'"),
        comment=comment,
    )


# Sources and plans

SOURCES: Final = Table(
    "sources",
    METADATA,
    Column(
        "source_id",
        Integer,
        Identity(always=True),
        primary_key=True,
        comment="id of the source in this ledger",
    ),
    Column("name", TEXT_C, nullable=False, unique=True, comment="name of the source in caf.toml"),
    Column(
        "archive_id",
        Text,
        nullable=False,
        comment="id in the note of each post, 32 random hexadecimal digits",
    ),
    Column(
        "address", Text, nullable=False, comment="endpoint, bucket and prefix, separated by slashes"
    ),
    Column(
        "created_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when the source was registered",
    ),
    Column(
        "ids_set_aside",
        ARRAY(Text),
        comment="archive ids that an operator set aside with --new-archive; NULL: none",
    ),
    comment="The buckets and prefixes that are archived.",
)

POST_KEYS: Final = Table(
    "post_keys",
    METADATA,
    Column(
        "source_id",
        Integer,
        ForeignKey("sources.source_id"),
        primary_key=True,
        comment="source whose posts have MACs by this key",
    ),
    Column(
        "key",
        LargeBinary,
        CheckConstraint("length(key) = 32"),
        nullable=False,
        comment="random secret of the MACs",
    ),
    comment="The secrets of the MACs in the notes of posts.",
)

INVENTORIES: Final = Table(
    "inventories",
    METADATA,
    Column(
        "source_id",
        Integer,
        ForeignKey("sources.source_id"),
        primary_key=True,
        comment="source that the inventory lists",
    ),
    Column("name", TEXT_C, primary_key=True, comment="name of the inventory's snapshot"),
    Column(
        "taken_at",
        TIMESTAMPTZ,
        nullable=False,
        comment="S3's time before the first page was requested",
    ),
    Column(
        "after_key",
        LargeBinary,
        nullable=False,
        comment="the inventory covers keys greater than this key",
    ),
    Column(
        "until_key",
        LargeBinary,
        comment="last key that the inventory covers, inclusive; NULL: no limit",
    ),
    Column(
        "all_versions",
        Boolean,
        nullable=False,
        server_default=FALSE,
        comment="whether older versions are objects, too",
    ),
    Column(
        "current_objects",
        BigInteger,
        comment="located objects that the inventory lists; NULL: not counted yet",
    ),
    Column(
        "older_objects",
        BigInteger,
        comment="located objects whose key now has another content; NULL: not counted yet",
    ),
    Column(
        "gone_objects",
        BigInteger,
        comment="located objects whose key is not listed; NULL: not counted yet",
    ),
    Column(
        "counted_at", TIMESTAMPTZ, comment="when the three counts were made; NULL: not counted yet"
    ),
    Column(
        "beside",
        JSONB(none_as_null=True),
        comment="numbers of older versions, delete markers and deleted keys; NULL: not counted",
    ),
    Column(
        "left_out",
        JSONB,
        comment="number of objects that each filter leaves out, by filter; NULL: not counted yet",
    ),
    Index("inventories_by_time", "source_id", "taken_at"),
    comment="Inventories that were planned, and how many located objects each listed.",
)

PLANS: Final = Table(
    "plans",
    METADATA,
    Column(
        "plan_id",
        BigInteger,
        Identity(always=True),
        primary_key=True,
        comment="id of the plan in this ledger",
    ),
    Column(
        "source_id",
        Integer,
        ForeignKey("sources.source_id"),
        nullable=False,
        comment="source that was planned",
    ),
    Column("name", TEXT_C, nullable=False, comment="first 8 or 12 hexadecimal digits of sha256"),
    Column(
        "sha256",
        LargeBinary,
        nullable=False,
        unique=True,
        comment="SHA-256 over everything that the plan contains",
    ),
    Column(
        "snapshot",
        Text,
        nullable=False,
        info=refers_to("inventories.name"),
        comment="name of the snapshot that was planned",
    ),
    Column("folder", Text, nullable=False, comment="folder of the plan's Parquet files"),
    Column("object_count", BigInteger, nullable=False, comment="objects in the plan"),
    Column("object_bytes", BigInteger, nullable=False, comment="total size of these objects"),
    Column(
        "created_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when the plan was registered",
    ),
    UniqueConstraint("source_id", "name"),
    comment="Plans: which new objects of an inventory go into which chunk.",
)

# Chunks

CAF_FILES: Final = Table(
    "caf_files",
    METADATA,
    Column(
        "caf_file_id",
        BigInteger,
        Identity(always=True),
        primary_key=True,
        comment="id of the chunk in this ledger",
    ),
    Column(
        "name",
        TEXT_C,
        nullable=False,
        unique=True,
        comment="name of the chunk, and of its partition in Dagster",
    ),
    Column(
        "source_id",
        Integer,
        ForeignKey("sources.source_id"),
        nullable=False,
        comment="source of the chunk's objects",
    ),
    Column(
        "plan_id",
        BigInteger,
        ForeignKey("plans.plan_id"),
        nullable=False,
        comment="plan that the chunk belongs to",
    ),
    Column("number", Integer, nullable=False, comment="number of the chunk in its plan"),
    Column(
        "state",
        Text,
        CheckConstraint(
            "state IN ('planned', 'packing', 'sealed', 'located', 'empty', 'parked', 'withdrawn', "
            "'abandoned')"
        ),
        nullable=False,
        server_default=text("'planned'"),
        comment="state of the chunk; chunk_state.py has the legal moves",
    ),
    Column(
        "reason",
        Text,
        nullable=False,
        server_default=EMPTY,
        comment="why the chunk is parked or withdrawn; else ''",
    ),
    Column(
        "epoch",
        BigInteger,
        nullable=False,
        server_default=ZERO,
        comment="epoch of the latest lease on the chunk",
    ),
    Column(
        "attempts",
        Integer,
        nullable=False,
        server_default=ZERO,
        comment="number of times that packing began",
    ),
    Column(
        "object_count",
        BigInteger,
        nullable=False,
        comment="objects that were planned for the chunk",
    ),
    Column("object_bytes", BigInteger, nullable=False, comment="total size of these objects"),
    Column(
        "expected_size_bytes",
        BigInteger,
        nullable=False,
        comment="expected size of the whole file, with its manifest",
    ),
    Column(
        "caf_size_bytes",
        BigInteger,
        nullable=False,
        server_default=ZERO,
        comment="size of the CAF file; 0 before the seal",
    ),
    Column(
        "stored_size_bytes",
        BigInteger,
        nullable=False,
        server_default=ZERO,
        comment="stored size; 0 before the seal",
    ),
    Column(
        "member_count",
        BigInteger,
        nullable=False,
        server_default=ZERO,
        comment="objects in the file, without head and manifest",
    ),
    Column(
        "member_bytes",
        BigInteger,
        nullable=False,
        server_default=ZERO,
        comment="total size of the objects in the file",
    ),
    Column(
        "skipped_count",
        BigInteger,
        nullable=False,
        server_default=ZERO,
        comment="objects that packing skipped",
    ),
    Column(
        "released_count",
        BigInteger,
        nullable=False,
        server_default=ZERO,
        comment="objects that packing neither took nor skipped; another plan may take them",
    ),
    Column(
        "located_count",
        BigInteger,
        nullable=False,
        server_default=ZERO,
        comment="rows that the chunk got in file_locations; other chunks may have other members",
    ),
    Column(
        "samples",
        JSONB,
        nullable=False,
        server_default=text("'[]'"),
        comment="samples for read-backs: offset, length and SHA-256 of stored bytes",
    ),
    Column(
        "unread",
        JSONB,
        comment="stored bytes that a rebuild read to make the rows, like `samples`; NULL: packed "
        "here, or all bytes were compared with the Merkle root and with these",
    ),
    Column(
        "tail_start",
        BigInteger,
        comment="first byte of manifest, index and footer in the file; NULL: not known",
    ),
    Column(
        "tail_sha256",
        LargeBinary,
        comment="SHA-256 of the bytes from tail_start to the end; NULL: not known",
    ),
    Column(
        "has_log_times",
        Boolean,
        nullable=False,
        server_default=FALSE,
        comment="whether packing looked for log archives; if so, log_times has all of them",
    ),
    Column(
        "from_unknown_post",
        Boolean,
        nullable=False,
        server_default=FALSE,
        comment="whether it was restored from a post that this ledger cannot recognize as its own",
    ),
    Column(
        "created_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when the chunk was planned",
    ),
    Column(
        "updated_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when the state of the chunk or its copy last changed",
    ),
    Column("sealed_at", TIMESTAMPTZ, comment="when the chunk was sealed; NULL: never"),
    Column("located_at", TIMESTAMPTZ, comment="when the locations were written; NULL: never"),
    Column(
        "restored_at",
        TIMESTAMPTZ,
        comment="when caf rebuild restored the row; NULL: never",
    ),
    Column(
        "adopted_at",
        TIMESTAMPTZ,
        comment="when another program's CAF file became this chunk; NULL: packed here",
    ),
    Column(
        "unparked_at",
        TIMESTAMPTZ,
        comment="when the chunk was last unparked; failed runs that began before do not count",
    ),
    Column(
        "header", LargeBinary, comment="header of the encrypted file; NULL: stored in the clear"
    ),
    Column("nonce", LargeBinary, comment="nonce of the encrypted file; NULL: stored in the clear"),
    Column(
        "recipients",
        ARRAY(Text),
        comment="public keys whose identities open the file; NULL: stored in the clear",
    ),
    UniqueConstraint("plan_id", "number"),
    # A state claims that something was done. Moves guarantee the order, these checks that it was
    # done.
    CheckConstraint(
        "sealed_at IS NOT NULL OR state NOT IN ('sealed', 'located', 'abandoned')",
        name="sealed_before",
    ),
    CheckConstraint("located_at IS NOT NULL OR state <> 'located'", name="located_before"),
    Index("caf_files_by_source_and_state", "source_id", "state"),
    Index(
        "caf_files_under_way",
        "source_id",
        "caf_file_id",
        postgresql_where=text("state IN ('planned', 'packing', 'sealed')"),
    ),
    Index(
        "caf_files_by_located",
        "source_id",
        "located_at",
        postgresql_where=text("located_at IS NOT NULL"),
    ),
    comment="Chunks. Facts about a chunk in one store are in chunk_copies.",
)

CHUNK_COPIES: Final = Table(
    "chunk_copies",
    METADATA,
    Column(
        "caf_file_id",
        BigInteger,
        ForeignKey("caf_files.caf_file_id"),
        primary_key=True,
        comment="chunk that is copied",
    ),
    Column(
        "store",
        TEXT_C,
        primary_key=True,
        comment="store that has the copy: its kind in the settings",
    ),
    Column(
        "state",
        Text,
        CheckConstraint(
            "state IN ('wanted', 'posting', 'posted', 'uploading', 'verified', 'damaged', "
            "'expired', 'retired')"
        ),
        nullable=False,
        server_default=text("'wanted'"),
        comment="state of the copy; chunk_state.py has the legal moves",
    ),
    Column(
        "damage",
        Text,
        nullable=False,
        server_default=EMPTY,
        comment="why the copy is or was damaged; else ''",
    ),
    Column("merkle_root", LargeBinary, nullable=False, comment="Merkle root of the stored bytes"),
    Column(
        "proof_type", SmallInteger, nullable=False, comment="proof type of the root on the chain"
    ),
    Column(
        "archive_id", Text, comment="archive id in the note of the post; NULL: that of the source"
    ),
    Column(
        "owner",
        Text,
        comment="owner of the post, on Jackal the wallet's address; NULL before the post",
    ),
    Column(
        "start",
        BigInteger,
        comment="start of the post, on Jackal the height of its block; NULL before the post",
    ),
    Column(
        "updated_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when the state or the post last changed",
    ),
    Column("posted_at", TIMESTAMPTZ, comment="when the copy was posted; NULL: never"),
    Column(
        "verified_at",
        TIMESTAMPTZ,
        comment="when the providers' copies and samples were verified; NULL: never",
    ),
    Column(
        "checked_at", TIMESTAMPTZ, comment="when the proof watch last checked the copy; NULL: never"
    ),
    Column(
        "look_again_at",
        TIMESTAMPTZ,
        comment="when a check can first see the next proof window; NULL: not due",
    ),
    Column(
        "suspected_at",
        TIMESTAMPTZ,
        comment="time of the store's list that differs from the ledger; NULL: no difference",
    ),
    Column(
        "unanswered_at",
        TIMESTAMPTZ,
        comment="when a provider did not answer a check; NULL: all answered the last check",
    ),
    Column("expires_at", TIMESTAMPTZ, comment="when the store drops the copy; NULL: not known"),
    # The place of a post is known if and only if the copy was posted. A retired copy may never have
    # been.
    CheckConstraint(
        "num_nulls(posted_at, owner, start) = CASE WHEN state IN ('wanted', 'posting') OR "
        "state = 'retired' AND start IS NULL THEN 3 ELSE 0 END",
        name="posted_before",
    ),
    CheckConstraint(
        "verified_at IS NOT NULL OR state NOT IN ('verified', 'damaged', 'expired')",
        name="verified_before",
    ),
    CheckConstraint("damage = '' OR state IN ('damaged', 'retired')", name="damage_of_damaged"),
    Index("chunk_copies_by_root", "merkle_root"),
    Index(
        "chunk_copies_suspected", "caf_file_id", postgresql_where=text("suspected_at IS NOT NULL")
    ),
    Index(
        "chunk_copies_unanswered", "caf_file_id", postgresql_where=text("unanswered_at IS NOT NULL")
    ),
    comment="Copies of chunks in stores. A sealed or located chunk has a copy in each store that "
    "must have the chunk.",
)

LEASES: Final = Table(
    "leases",
    METADATA,
    Column(
        "name",
        TEXT_C,
        primary_key=True,
        comment="what is leased: chunk/…, plan/…, deletion/…, account/… or lists/…",
    ),
    Column(
        "epoch",
        BigInteger,
        nullable=False,
        comment="grows with each holder; at least the time in milliseconds since 1970",
    ),
    Column("run", Text, nullable=False, comment="run that holds the lease"),
    Column("boot_id", Text, nullable=False, comment="machine of the holder, and its boot"),
    Column("pid", BigInteger, nullable=False, comment="process of the holder"),
    Column(
        "process_started",
        Double,
        nullable=False,
        comment="start time of this process, since pids are reused",
    ),
    Column(
        "expires_at",
        TIMESTAMPTZ,
        nullable=False,
        comment="end of the lease by the database's clock; 1970-01-01: given back",
    ),
    comment="The right of one run to move one chunk, plan a source, find what is safe to delete, "
    "sign, or read a store's lists.",
)

WAITS: Final = Table(
    "waits",
    METADATA,
    Column("run", Text, nullable=False, comment="run that waits"),
    Column("boot_id", Text, nullable=False, comment="machine of the run, and its boot"),
    Column("pid", BigInteger, nullable=False, comment="process that wrote the row"),
    Column(
        "process_started",
        Double,
        nullable=False,
        comment="start time of this process, since pids are reused",
    ),
    Column(
        "source",
        TEXT_C,
        nullable=False,
        info=refers_to("sources.name"),
        comment="source that the run works on",
    ),
    Column(
        "chunk",
        TEXT_C,
        nullable=False,
        info=refers_to("caf_files.name"),
        comment="chunk that the run works on; '': none",
    ),
    Column("what", Text, nullable=False, comment="what the run waits for"),
    Column("ends_by", Text, nullable=False, comment="what ends the wait"),
    Column("since", TIMESTAMPTZ, nullable=False, comment="when the wait began"),
    Column(
        "expires_at",
        TIMESTAMPTZ,
        nullable=False,
        comment="when the row expires unless renewed, by the database's clock",
    ),
    comment="Waits of live runs. A process renews its rows; rows of dead processes and expired "
    "rows do not count.",
)

STAGING_RESERVATIONS: Final = Table(
    "staging_reservations",
    METADATA,
    Column(
        "caf_file_id",
        BigInteger,
        ForeignKey("caf_files.caf_file_id"),
        primary_key=True,
        comment="chunk in staging",
    ),
    Column("folder", Text, nullable=False, comment="staging folder"),
    Column(
        "size_bytes", BigInteger, nullable=False, comment="bytes that are reserved in the folder"
    ),
    comment="Bytes of staging folders that are reserved for chunks.",
)

PACKING_SECRETS: Final = Table(
    "packing_secrets",
    METADATA,
    Column(
        "caf_file_id",
        BigInteger,
        ForeignKey("caf_files.caf_file_id"),
        primary_key=True,
        comment="private chunk that is being packed",
    ),
    Column(
        "secret",
        LargeBinary,
        CheckConstraint("length(secret) = 32"),
        nullable=False,
        comment="random; opens the chunk's journals together with the worker key",
    ),
    comment="Secrets of the packings of private chunks. The seal deletes them, and `caf "
    "backup` leaves them out, so that remains of a journal do not open a sealed chunk.",
)

# Objects. Claims and locations have no foreign keys, which halved the rate of loading. One
# statement loads them under a lock on the chunk's row, and referenced rows are never deleted.

CLAIMS: Final = Table(
    "claims",
    METADATA,
    Column(
        "source_id",
        Integer,
        primary_key=True,
        info=refers_to("sources.source_id"),
        comment="source of the object",
    ),
    Column("file_path", TEXT_C, primary_key=True, comment="key of the object"),
    Column("version_id", TEXT_C, primary_key=True, comment="version id; '' for none"),
    Column("etag", TEXT_C, primary_key=True, comment="ETag as S3 gave it, without quotes"),
    Column("size_bytes", BigInteger, primary_key=True, comment="size of the whole object"),
    rewritten_at(primary_key=True),
    Column(
        "caf_file_id",
        BigInteger,
        nullable=False,
        info=refers_to("caf_files.caf_file_id"),
        comment="chunk that will archive the object",
    ),
    Column("last_modified", TIMESTAMPTZ, comment="LastModified of the object; NULL: not known"),
    Index("claims_by_chunk", "caf_file_id"),
    comment="Objects of chunks under way. No other plan may take them.",
)

HEADER_SETS: Final = Table(
    "header_sets",
    METADATA,
    Column(
        "header_set",
        LargeBinary,
        CheckConstraint("length(header_set) = 16"),
        primary_key=True,
        comment="first 16 bytes of the SHA-256 of all values, each followed by a NUL",
    ),
    *(
        Column(name, Text, nullable=False, comment=f"{title} header; '' for none")
        for name, title in (
            ("content_type", "Content-Type"),
            ("content_encoding", "Content-Encoding"),
            ("content_language", "Content-Language"),
            ("content_disposition", "Content-Disposition"),
            ("cache_control", "Cache-Control"),
            ("expires", "Expires"),
        )
    ),
    Column(
        "user_metadata",
        JSONB,
        nullable=False,
        comment="user metadata: an object of names and values",
    ),
    comment="Distinct sets of headers and user metadata that archived objects have.",
)


def _locations() -> list[Column[Any]]:
    return [
        Column(
            "caf_file_id",
            BigInteger,
            nullable=False,
            info=refers_to("caf_files.caf_file_id"),
            comment="chunk that has the object",
        ),
        Column(
            "start_byte",
            BigInteger,
            nullable=False,
            comment="first byte of the object, or of its part, in the CAF",
        ),
        Column(
            "end_byte",
            BigInteger,
            nullable=False,
            comment="end of the object, or of its part, in the CAF, exclusive",
        ),
        Column("size_bytes", BigInteger, nullable=False, comment="size of the whole object"),
        Column("last_modified", TIMESTAMPTZ, nullable=False, comment="LastModified of the object"),
        rewritten_at(),
        Column(
            "source_id",
            Integer,
            nullable=False,
            info=refers_to("sources.source_id"),
            comment="source of the object",
        ),
        Column(
            "part",
            Integer,
            nullable=False,
            server_default=ZERO,
            comment="location_part of an object part; 0: a whole object",
        ),
        Column("file_path", TEXT_C, nullable=False, comment="key of the object"),
        Column("version_id", TEXT_C, nullable=False, comment="version id; '' for none"),
        Column("etag", TEXT_C, nullable=False, comment="ETag as S3 gave it, without quotes"),
        Column("sha256", LargeBinary, nullable=False, comment="SHA-256 of the archived bytes"),
        Column(
            "crc64nvme",
            LargeBinary,
            comment="CRC-64/NVME of the archived bytes, big-endian; NULL: not known",
        ),
        Column(
            "s3_checksum",
            Text,
            comment="S3's own checksum of the object: algorithm, colon, hexadecimal digits; NULL: "
            "not known",
        ),
        Column(
            "header_set",
            LargeBinary,
            info=refers_to("header_sets.header_set"),
            comment="headers and user metadata; NULL: not known, e.g. in adopted files",
        ),
    ]


FILE_LOCATIONS: Final = Table(
    "file_locations",
    METADATA,
    *_locations(),
    PrimaryKeyConstraint(
        "source_id", "file_path", "version_id", "etag", "size_bytes", "rewritten_at", "part"
    ),
    Index("file_locations_by_chunk", "caf_file_id", postgresql_using="brin"),
    comment="Location of each archived object.",
)

PENDING_LOCATIONS: Final = Table(
    "pending_locations",
    METADATA,
    *_locations(),
    Index("pending_locations_by_chunk", "caf_file_id"),
    comment="Rows of sealed chunks that are not located. Locating moves them to file_locations.",
)

OBJECT_PARTS: Final = Table(
    "object_parts",
    METADATA,
    Column(
        "caf_file_id",
        BigInteger,
        ForeignKey("caf_files.caf_file_id"),
        primary_key=True,
        comment="chunk that holds the part and nothing else",
    ),
    Column(
        "plan_id",
        BigInteger,
        ForeignKey("plans.plan_id"),
        nullable=False,
        comment="plan with all parts of the object",
    ),
    Column(
        "source_id",
        Integer,
        ForeignKey("sources.source_id"),
        nullable=False,
        comment="source of the object",
    ),
    Column("file_path", TEXT_C, nullable=False, comment="key of the object"),
    Column("version_id", TEXT_C, nullable=False, comment="version id; '' for none"),
    Column("etag", TEXT_C, nullable=False, comment="ETag as S3 gave it, without quotes"),
    Column("object_bytes", BigInteger, nullable=False, comment="size of the whole object"),
    rewritten_at(),
    Column("part", Integer, nullable=False, comment="number of the part, from 1"),
    Column("part_count", Integer, nullable=False, comment="parts of the object"),
    Column(
        "start_byte", BigInteger, nullable=False, comment="first byte of the part in the object"
    ),
    Column(
        "end_byte", BigInteger, nullable=False, comment="end of the part in the object, exclusive"
    ),
    Column(
        "location_part",
        Integer,
        nullable=False,
        comment="part number of its location, different in each plan",
    ),
    Column(
        "abandoned",
        Boolean,
        nullable=False,
        server_default=FALSE,
        comment="whether the plan gave up the object; stored parts of it are never returned",
    ),
    CheckConstraint(
        "part >= 1 AND part <= part_count AND start_byte >= 0 AND start_byte < end_byte"
        " AND end_byte <= object_bytes AND (part = 1) = (start_byte = 0) AND (part = part_count) = "
        "(end_byte = object_bytes)",
        name="within_the_object",
    ),
    UniqueConstraint(
        "plan_id", "file_path", "version_id", "etag", "object_bytes", "rewritten_at", "part"
    ),
    UniqueConstraint(
        "source_id",
        "file_path",
        "version_id",
        "etag",
        "object_bytes",
        "rewritten_at",
        "location_part",
    ),
    comment="Parts of objects that are larger than a chunk. No row is ever deleted.",
)

SKIPPED_OBJECTS: Final = Table(
    "skipped_objects",
    METADATA,
    Column(
        "source_id",
        Integer,
        ForeignKey("sources.source_id"),
        primary_key=True,
        comment="source of the object",
    ),
    Column(
        "file_path",
        TEXT_C,
        primary_key=True,
        comment="key of the object; percent-encoded if the key is not supported",
    ),
    Column("version_id", TEXT_C, primary_key=True, comment="version id; '' for none"),
    Column("etag", TEXT_C, primary_key=True, comment="ETag as S3 gave it, without quotes"),
    Column("size_bytes", BigInteger, primary_key=True, comment="size of the whole object"),
    rewritten_at(primary_key=True),
    Column("reason", Text, nullable=False, comment="a value of SkipReason in inventory/objects.py"),
    Column("detail", Text, nullable=False, comment="the reason in words"),
    Column("last_modified", TIMESTAMPTZ, comment="LastModified of the object; NULL: not known"),
    Column(
        "caf_file_id",
        BigInteger,
        ForeignKey("caf_files.caf_file_id"),
        comment="chunk that skipped it; NULL: the plan did",
    ),
    Column(
        "times",
        Integer,
        nullable=False,
        server_default=ONE,
        comment="number of times that it was skipped",
    ),
    Column(
        "first_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when it was first skipped",
    ),
    Column(
        "last_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when it was last skipped",
    ),
    Column(
        "retry_at",
        TIMESTAMPTZ,
        nullable=False,
        comment="when a plan may take it again; infinity: never by itself",
    ),
    comment="Objects of an inventory or a plan that were not archived.",
)

READ_FAILURES: Final = Table(
    "read_failures",
    METADATA,
    Column(
        "caf_file_id",
        BigInteger,
        ForeignKey("caf_files.caf_file_id"),
        primary_key=True,
        comment="chunk whose runs failed on the object",
    ),
    Column("file_path", TEXT_C, primary_key=True, comment="key of the object"),
    Column("object_version", TEXT_C, primary_key=True, comment="version id, or etag:<ETag>:<size>"),
    Column(
        "times",
        Integer,
        nullable=False,
        server_default=ONE,
        comment="runs that failed on the object",
    ),
    Column(
        "last_run",
        Text,
        nullable=False,
        comment="the last of these runs; a run counts once, however often it retries",
    ),
    comment="Objects on which runs failed. After several failures the object is skipped.",
)

LOG_TIMES: Final = Table(
    "log_times",
    METADATA,
    Column(
        "caf_file_id",
        BigInteger,
        primary_key=True,
        info=refers_to("caf_files.caf_file_id"),
        comment="chunk that has the log archive",
    ),
    Column(
        "start_byte",
        BigInteger,
        primary_key=True,
        comment="first byte in the CAF, as in its location",
    ),
    Column(
        "first_ms",
        BigInteger,
        comment="first time, in milliseconds since 1970; NULL: not known, always searched",
    ),
    Column(
        "last_ms",
        BigInteger,
        comment="last time, inclusive, in milliseconds since 1970; NULL: not known",
    ),
    comment="First and last time of each log archive of clp-s. A search selects archives by them.",
)

# Current objects of the bucket

CURRENT_EXCEPTIONS: Final = Table(
    "current_exceptions",
    METADATA,
    Column(
        "source_id",
        Integer,
        primary_key=True,
        info=refers_to("sources.source_id"),
        comment="source of the key",
    ),
    Column("file_path", TEXT_C, primary_key=True, comment="the key"),
    Column(
        "stated_at",
        TIMESTAMPTZ,
        primary_key=True,
        comment="taken_at of the inventory, or a later LastModified known then",
    ),
    Column(
        "object_version",
        TEXT_C,
        comment="current version: version id, or etag:<ETag>:<size>; NULL: the key is gone",
    ),
    Column(
        "inventory",
        TEXT_C,
        nullable=False,
        info=refers_to("inventories.name"),
        comment="inventory that states this",
    ),
    Column(
        "last_modified",
        TIMESTAMPTZ,
        comment="LastModified at which headers and SHA-256 equalled the archived; NULL: "
        "not compared",
    ),
    comment="Current object of a key at a time, if LastModified alone would give another answer.",
)

NOTICED_KEYS: Final = Table(
    "noticed_keys",
    METADATA,
    Column(
        "source_id",
        Integer,
        ForeignKey("sources.source_id"),
        primary_key=True,
        comment="source of the key",
    ),
    Column("file_path", LargeBinary, primary_key=True, comment="the key: any bytes, as in S3"),
    Column(
        "sequencer",
        TEXT_C,
        nullable=False,
        comment="sequencer of the latest event, upper-case hexadecimal; '': none",
    ),
    Column(
        "listing", TEXT_C, comment="latest listing that began after the latest event; NULL: none"
    ),
    Column(
        "noticed_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="first event since the key was last listed",
    ),
    Column(
        "restored",
        Boolean,
        nullable=False,
        server_default=FALSE,
        comment="whether it came back from cold storage",
    ),
    comment="Keys that S3's event notifications named and that no later listing has covered yet.",
)

MESSAGES_SET_APART: Final = Table(
    "messages_set_apart",
    METADATA,
    Column(
        "source_id",
        Integer,
        ForeignKey("sources.source_id"),
        primary_key=True,
        comment="source of the queue",
    ),
    Column("message_id", TEXT_C, primary_key=True, comment="id that the queue gave the message"),
    Column("body", LargeBinary, nullable=False, comment="body of the message"),
    Column("reason", Text, nullable=False, comment="why the message was set apart"),
    Column(
        "set_apart_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when it was set apart",
    ),
    comment="Messages of a queue that are not events of the source's bucket. They are stored "
    "before they are deleted from the queue.",
)

QUEUE_READS: Final = Table(
    "queue_reads",
    METADATA,
    Column(
        "source_id",
        Integer,
        ForeignKey("sources.source_id"),
        primary_key=True,
        comment="source of the queue",
    ),
    Column(
        "read_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when the queue was last read without an error, or was first to be read",
    ),
    comment="When each source's queue was last read. A separate table, since a plan locks its "
    "source's row.",
)

REBUILDS: Final = Table(
    "rebuilds",
    METADATA,
    Column(
        "source_id",
        Integer,
        ForeignKey("sources.source_id"),
        primary_key=True,
        comment="source that is being restored",
    ),
    Column(
        "began_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when the rebuild began",
    ),
    comment="Sources that caf rebuild is restoring. They are not planned, so that nothing is paid "
    "twice.",
)

# Copies, posts and payments

REPLICAS: Final = Table(
    "replicas",
    METADATA,
    Column("caf_file_id", BigInteger, primary_key=True, comment="chunk that the provider stores"),
    Column("store", TEXT_C, primary_key=True, comment="store that the provider belongs to"),
    Column(
        "provider",
        Text,
        primary_key=True,
        info=refers_to("providers.provider"),
        comment="the provider's address on the chain, or its name in another store",
    ),
    Column("proof", Text, nullable=False, comment="proof as the store lists it"),
    Column(
        "checked_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when the copy was last checked",
    ),
    Column(
        "listed",
        Boolean,
        nullable=False,
        server_default=TRUE,
        comment="whether the store listed it at the last check",
    ),
    Column(
        "last_proven",
        BigInteger,
        comment="block height of the last proof, or of the provider's joining; NULL: not known",
    ),
    Column(
        "last_window",
        BigInteger,
        comment="number of the latest proof window with a verified proof; NULL: none counts",
    ),
    Column(
        "windows",
        Integer,
        nullable=False,
        server_default=ZERO,
        comment="proof windows in a row since the last fault",
    ),
    Column(
        "fault",
        Text,
        nullable=False,
        server_default=EMPTY,
        comment="what was wrong with its bytes when last checked; else ''",
    ),
    ForeignKeyConstraint(
        ["caf_file_id", "store"], ["chunk_copies.caf_file_id", "chunk_copies.store"]
    ),
    comment="Providers' copies of chunks, as last checked.",
)

FULL_READS: Final = Table(
    "full_reads",
    METADATA,
    Column("caf_file_id", BigInteger, primary_key=True, comment="chunk that was read"),
    Column("store", TEXT_C, primary_key=True, comment="store that it was read from"),
    Column(
        "provider",
        Text,
        nullable=False,
        info=refers_to("providers.provider"),
        comment="provider that returned the bytes",
    ),
    Column(
        "read_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when the last byte was compared",
    ),
    Column(
        "opened_with",
        Text,
        comment="public key of the identity that opened it; NULL: only stored bytes were compared",
    ),
    ForeignKeyConstraint(
        ["caf_file_id", "store"], ["chunk_copies.caf_file_id", "chunk_copies.store"]
    ),
    comment="Chunks that a provider returned whole, with the right Merkle root. Only a verifier "
    "inserts here.",
)

PROVIDERS: Final = Table(
    "providers",
    METADATA,
    Column("provider", TEXT_C, primary_key=True, comment="address on the chain"),
    Column("upload_rate", Double, comment="bytes a second to the provider; NULL: not measured"),
    Column("download_rate", Double, comment="bytes a second from the provider; NULL: not measured"),
    Column(
        "failures",
        Integer,
        nullable=False,
        server_default=ZERO,
        comment="failures since the last success",
    ),
    Column("failed_at", TIMESTAMPTZ, comment="when the last failure happened; NULL: never"),
    comment="Measured rates and failures of providers.",
)

TRANSACTIONS: Final = Table(
    "transactions",
    METADATA,
    Column(
        "hash", Text, primary_key=True, comment="SHA-256 of body in upper-case hexadecimal digits"
    ),
    Column(
        "account", TEXT_C, nullable=False, comment="account that signs: chain id, slash, address"
    ),
    Column(
        "sequence",
        BigInteger,
        CheckConstraint("sequence >= 0"),
        nullable=False,
        comment="sequence of the account",
    ),
    Column(
        "timeout_height",
        BigInteger,
        CheckConstraint(
            "timeout_height > 0"
        ),  # 0 would never expire, and the outcome might stay unknown
        nullable=False,
        comment="last block that may include the transaction",
    ),
    Column("body", LargeBinary, nullable=False, comment="signed bytes; a retry sends the same"),
    Column(
        "purpose",
        Text,
        CheckConstraint("purpose IN ('post', 'buy')"),
        nullable=False,
        comment="post: chunks; buy: storage space",
    ),
    Column(
        "cost",
        BigInteger,
        CheckConstraint("cost >= 0"),
        nullable=False,
        comment="ujkl, with the fee",
    ),
    Column(
        "cost_told",
        Boolean,
        nullable=False,
        server_default=FALSE,
        comment="whether a node reported the cost of a purchase; false: cost is the list price",
    ),
    Column(
        "outcome",
        Text,
        CheckConstraint("outcome IN ('included', 'failed', 'expired', 'superseded')"),
        comment="what became of the transaction; NULL: not known yet",
    ),
    Column(
        "created_at", TIMESTAMPTZ, nullable=False, server_default=NOW, comment="when it was signed"
    ),
    Column("settled_at", TIMESTAMPTZ, comment="when the outcome was known; NULL: not known yet"),
    CheckConstraint("hash = upper(encode(sha256(body), 'hex'))", name="hash_of_body"),
    CheckConstraint("(outcome IS NULL) = (settled_at IS NULL)", name="settled_with_outcome"),
    UniqueConstraint("hash", "account"),  # for the foreign key of transaction_posts
    # A sequence of an account has one transaction that is or may be in a block. A second payment
    # with it cannot be committed.
    Index(
        "transactions_open",
        "account",
        "sequence",
        unique=True,
        postgresql_where=text("outcome IS NULL OR outcome IN ('included', 'failed')"),
    ),
    comment="Signed transactions, written before they are sent. Each belongs to an account and "
    "posts any number of chunks.",
)

POSTS: Final = Table(
    "posts",
    METADATA,
    Column(
        "caf_file_id",
        BigInteger,
        ForeignKey("caf_files.caf_file_id"),
        primary_key=True,
        comment="chunk that needs a post",
    ),
    Column(
        "account",
        TEXT_C,
        primary_key=True,
        comment="account that will sign: chain id, slash, address",
    ),
    Column("message", LargeBinary, nullable=False, comment="message for the transaction"),
    Column(
        "charged_bytes",
        BigInteger,
        CheckConstraint("charged_bytes >= 0"),
        nullable=False,
        comment="space that the chain charges, for all copies together",
    ),
    Column(
        "asked_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when the post was requested",
    ),
    Column(
        "epoch",
        BigInteger,
        nullable=False,
        comment="epoch of the run's lease on the chunk; the request counts while it is live",
    ),
    Index("posts_by_account", "account", "asked_at"),
    comment="Messages that wait for a transaction. A row is deleted when a transaction includes "
    "it, or when its chunk needs no post.",
)

TRANSACTION_POSTS: Final = Table(
    "transaction_posts",
    METADATA,
    Column("hash", Text, primary_key=True, comment="transaction that has the post"),
    Column("account", TEXT_C, nullable=False, comment="account of this transaction"),
    Column(
        "position", Integer, primary_key=True, comment="position of the message in the transaction"
    ),
    Column(
        "caf_file_id",
        BigInteger,
        ForeignKey("caf_files.caf_file_id"),
        nullable=False,
        comment="chunk that is posted",
    ),
    Column(
        "start",
        BigInteger,
        comment="height of the block that includes the post; NULL: not included yet",
    ),
    Column(
        "live",
        Boolean,
        nullable=False,
        server_default=TRUE,
        comment="whether the post is or may be on the chain; false: it can no longer be, or the "
        "chain lost it",
    ),
    ForeignKeyConstraint(["hash", "account"], ["transactions.hash", "transactions.account"]),
    # A chunk has one live post of an account, whatever the sequences. A second payment for the same
    # work cannot be committed.
    Index(
        "transaction_posts_live",
        "caf_file_id",
        "account",
        unique=True,
        postgresql_where=text("live"),
    ),
    comment="Posts of chunks in transactions.",
)

CHAIN_HEIGHTS: Final = Table(
    "chain_heights",
    METADATA,
    Column("chain_id", TEXT_C, primary_key=True, comment="id of the chain"),
    Column(
        "height",
        BigInteger,
        nullable=False,
        comment="greatest height ever seen; a node below it is stale",
    ),
    comment="Greatest block height seen on each chain.",
)

STORAGE_PLANS: Final = Table(
    "storage_plans",
    METADATA,
    Column("account", TEXT_C, primary_key=True, comment="chain id, slash, address"),
    Column(
        "read_at",
        TIMESTAMPTZ,
        nullable=False,
        comment="time of the chain's latest block at the reading",
    ),
    Column("balance", BigInteger, nullable=False, comment="coins of the account, in ujkl"),
    Column("space_bytes", BigInteger, comment="bytes of space, all copies counted; NULL: no plan"),
    Column("used_bytes", BigInteger, comment="bytes of it that are used; NULL: no plan"),
    Column("starts_at", TIMESTAMPTZ, comment="when the plan was bought; NULL: no plan, or unknown"),
    Column("ends_at", TIMESTAMPTZ, comment="when the plan ends; NULL: no plan"),
    Column(
        "latest_end",
        TIMESTAMPTZ,
        comment="latest ends_at since this ledger's last purchase; NULL: none seen",
    ),
    Column("latest_end_space", BigInteger, comment="space_bytes at that reading; NULL: none seen"),
    comment="The last reading of the space and the coins of an account.",
)

STORE_LOOKS: Final = Table(
    "store_looks",
    METADATA,
    Column(
        "source_id",
        Integer,
        ForeignKey("sources.source_id"),
        primary_key=True,
        comment="source whose posts were listed",
    ),
    Column(
        "account",
        TEXT_C,
        primary_key=True,
        comment="chain id, slash, address; the owner if the store signs nothing",
    ),
    Column(
        "sequence",
        BigInteger,
        CheckConstraint("sequence >= 0"),
        nullable=False,
        comment="sequence of the account before the listing; 0 if the store signs nothing",
    ),
    Column(
        "unknown",
        Integer,
        CheckConstraint("unknown >= 0"),
        nullable=False,
        comment="posts that the ledger did not know",
    ),
    Column(
        "looked_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when the posts were listed",
    ),
    comment="The last search of a store for posts that the ledger does not know, e.g. after an "
    "older backup was restored.",
)

ARCHIVE_LOOKS: Final = Table(
    "archive_looks",
    METADATA,
    Column(
        "account",
        TEXT_C,
        primary_key=True,
        comment="chain id, slash, address; the owner if the store signs nothing",
    ),
    Column(
        "sequence",
        BigInteger,
        CheckConstraint("sequence >= 0"),
        nullable=False,
        comment="sequence of the account before the listing; 0 if the store signs nothing",
    ),
    Column("archives", ARRAY(Text), nullable=False, comment="ids of all archives that were listed"),
    Column(
        "looked_at",
        TIMESTAMPTZ,
        nullable=False,
        server_default=NOW,
        comment="when the archives were listed",
    ),
    comment="The last whole list of the archives of an account.",
)

LEFT_POSTS: Final = Table(
    "left_posts",
    METADATA,
    Column(
        "source_id",
        Integer,
        ForeignKey("sources.source_id"),
        primary_key=True,
        comment="source that was posted",
    ),
    Column("merkle_root", LargeBinary, primary_key=True, comment="Merkle root of the post"),
    Column(
        "superseded",
        Boolean,
        nullable=False,
        comment="true: other chunks have all its objects; false: an operator ordered a second copy",
    ),
    Column(
        "left_at", TIMESTAMPTZ, nullable=False, server_default=NOW, comment="when this was decided"
    ),
    comment="Posts that are not and need not be chunks of this ledger. They do not stop packing "
    "and posting.",
)

CHAIN_LISTINGS: Final = Table(
    "chain_listings",
    METADATA,
    Column("store", Text, primary_key=True, comment="name of the store"),
    Column("next_at", TIMESTAMPTZ, nullable=False, comment="when the next pass may begin"),
    Column(
        "whole_at",
        TIMESTAMPTZ,
        comment="when the last complete pass began; NULL: none was complete",
    ),
    comment="Passes of the proof watch through the lists of a store.",
)

FOLDER_STORE: Final = Table(
    "folder_store",
    METADATA,
    Column(
        "only_row",
        Boolean,
        CheckConstraint("only_row"),
        primary_key=True,
        server_default=TRUE,
        comment="always true: the table has at most one row",
    ),
    Column(
        "id",
        Text,
        CheckConstraint("id ~ '^[0-9a-f]{32}$'"),
        nullable=False,
        comment="id in the folder's file store-id",
    ),
    comment="The folder that has the chunks of this ledger, if they are in a folder.",
)

ORDERS: Final = Table(
    "orders",
    METADATA,
    Column(
        "name",
        Text,
        CheckConstraint("name IN ('paused', 'unverified', 'bandwidth', 'spend_cap')"),
        primary_key=True,
        comment="what the operator ordered",
    ),
    Column(
        "value",
        Text,
        CheckConstraint("value <> ''"),
        nullable=False,
        comment="why everything is paused or not verified; bytes a second, 0: no limit; ujkl, -1: "
        "no cap",
    ),
    Column(
        "ordered_at", TIMESTAMPTZ, nullable=False, server_default=NOW, comment="when it was ordered"
    ),
    CheckConstraint(
        "name IN ('paused', 'unverified') OR value ~ '^(-1|[0-9]{1,18})$'", name="numbers"
    ),
    comment="Orders of the operator. Without an order the settings apply.",
)
