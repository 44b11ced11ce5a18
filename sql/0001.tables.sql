-- The ledger's tables. caf_pipeline/ledger/tables.py declares the same tables and describes each
-- column; a test compares both. Text that is compared as bytes has COLLATE "C": keys are
-- byte-exact, and no locale may reorder an index.

CREATE TABLE sources (
    source_id      integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name           text COLLATE "C" NOT NULL UNIQUE,
    archive_id     text NOT NULL,
    address        text NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT now(),
    ids_set_aside  text[]
);

-- The secrets of the MACs in the notes of posts. Readers have no right to this table (roles.sql).
CREATE TABLE post_keys (
    source_id  integer PRIMARY KEY REFERENCES sources,
    key        bytea NOT NULL CHECK (length(key) = 32)
);

CREATE TABLE plans (
    plan_id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source_id     integer NOT NULL REFERENCES sources,
    name          text COLLATE "C" NOT NULL,
    sha256        bytea NOT NULL UNIQUE,
    snapshot      text NOT NULL,
    folder        text NOT NULL,
    object_count  bigint NOT NULL,
    object_bytes  bigint NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT now(),
    UNIQUE (source_id, name)
);

-- Chunks. Facts about a chunk in one store are in chunk_copies.
CREATE TABLE caf_files (
    caf_file_id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name                 text COLLATE "C" NOT NULL UNIQUE,
    source_id            integer NOT NULL REFERENCES sources,
    plan_id              bigint NOT NULL REFERENCES plans,
    number               integer NOT NULL,
    state                text NOT NULL DEFAULT 'planned' CHECK (state IN (
        'planned', 'packing', 'sealed', 'located', 'empty', 'parked', 'withdrawn', 'abandoned')),
    reason               text NOT NULL DEFAULT '',
    epoch                bigint NOT NULL DEFAULT 0,
    attempts             integer NOT NULL DEFAULT 0,
    object_count         bigint NOT NULL,
    object_bytes         bigint NOT NULL,
    expected_size_bytes  bigint NOT NULL,
    caf_size_bytes       bigint NOT NULL DEFAULT 0,
    stored_size_bytes    bigint NOT NULL DEFAULT 0,
    member_count         bigint NOT NULL DEFAULT 0,
    member_bytes         bigint NOT NULL DEFAULT 0,
    skipped_count        bigint NOT NULL DEFAULT 0,
    released_count       bigint NOT NULL DEFAULT 0,
    located_count        bigint NOT NULL DEFAULT 0,
    samples              jsonb NOT NULL DEFAULT '[]',
    unread               jsonb,
    tail_start           bigint,
    tail_sha256          bytea,
    has_log_times        boolean NOT NULL DEFAULT false,
    from_unknown_post    boolean NOT NULL DEFAULT false,
    created_at           timestamptz NOT NULL DEFAULT now(),
    updated_at           timestamptz NOT NULL DEFAULT now(),
    sealed_at            timestamptz,
    located_at           timestamptz,
    restored_at          timestamptz,
    adopted_at           timestamptz,
    unparked_at          timestamptz,
    header               bytea,
    nonce                bytea,
    recipients           text[],
    UNIQUE (plan_id, number),
    -- A state claims that something was done. Moves guarantee the order, these checks that it was
    -- done.
    CONSTRAINT sealed_before CHECK (sealed_at IS NOT NULL OR state NOT IN ('sealed', 'located', 'abandoned')),
    CONSTRAINT located_before CHECK (located_at IS NOT NULL OR state <> 'located')
);

-- Copies of chunks in stores. Triggers in 0002.views.sql keep the states of a chunk and its copies
-- consistent.
CREATE TABLE chunk_copies (
    caf_file_id    bigint NOT NULL REFERENCES caf_files,
    store          text COLLATE "C" NOT NULL,
    state          text NOT NULL DEFAULT 'wanted' CHECK (state IN (
        'wanted', 'posting', 'posted', 'uploading', 'verified', 'damaged', 'expired', 'retired')),
    damage         text NOT NULL DEFAULT '',
    merkle_root    bytea NOT NULL,
    proof_type     smallint NOT NULL,
    archive_id     text,
    owner          text,
    start          bigint,
    updated_at     timestamptz NOT NULL DEFAULT now(),
    posted_at      timestamptz,
    verified_at    timestamptz,
    checked_at     timestamptz,
    look_again_at  timestamptz,
    suspected_at   timestamptz,
    unanswered_at  timestamptz,
    expires_at     timestamptz,
    PRIMARY KEY (caf_file_id, store),
    -- The place of a post is known if and only if the copy was posted.
    CONSTRAINT posted_before CHECK (
        num_nulls(posted_at, owner, start) =
            CASE WHEN state IN ('wanted', 'posting') OR state = 'retired' AND start IS NULL THEN 3 ELSE 0 END),
    CONSTRAINT verified_before CHECK (verified_at IS NOT NULL OR state NOT IN ('verified', 'damaged', 'expired')),
    CONSTRAINT damage_of_damaged CHECK (damage = '' OR state IN ('damaged', 'retired'))
);

-- Which run works on a chunk, plans a source or signs for an account, by the database's clock.
CREATE TABLE leases (
    name             text COLLATE "C" PRIMARY KEY,
    epoch            bigint NOT NULL,
    run              text NOT NULL,
    boot_id          text NOT NULL,
    pid              bigint NOT NULL,
    process_started  double precision NOT NULL,
    expires_at       timestamptz NOT NULL
);

-- Waits of live runs. A process renews its rows; rows of dead processes and expired rows do not
-- count.
CREATE TABLE waits (
    run              text NOT NULL,
    boot_id          text NOT NULL,
    pid              bigint NOT NULL,
    process_started  double precision NOT NULL,
    source           text COLLATE "C" NOT NULL,
    chunk            text COLLATE "C" NOT NULL,
    what             text NOT NULL,
    ends_by          text NOT NULL,
    since            timestamptz NOT NULL,
    expires_at       timestamptz NOT NULL
);

CREATE TABLE staging_reservations (
    caf_file_id  bigint PRIMARY KEY REFERENCES caf_files,
    folder       text NOT NULL,
    size_bytes   bigint NOT NULL
);

-- With the worker key, a secret opens the journals of a private chunk. `caf backup` leaves it out,
-- and the seal deletes it, so that remains of a journal do not open a sealed chunk.
CREATE TABLE packing_secrets (
    caf_file_id  bigint PRIMARY KEY REFERENCES caf_files,
    secret       bytea NOT NULL CHECK (length(secret) = 32)
) WITH (autovacuum_vacuum_threshold = 0, autovacuum_vacuum_scale_factor = 0);  -- deleted rows have secrets

-- Objects. Claims and locations have no foreign keys, which halved the rate of loading. One
-- statement loads them under a lock on the chunk's row, and referenced rows are never deleted.

-- Objects of chunks under way.
CREATE TABLE claims (
    source_id       integer NOT NULL,
    file_path       text COLLATE "C" NOT NULL,
    version_id      text COLLATE "C" NOT NULL,
    etag            text COLLATE "C" NOT NULL,
    size_bytes      bigint NOT NULL,
    rewritten_at    timestamptz NOT NULL DEFAULT '-infinity',
    caf_file_id     bigint NOT NULL,
    last_modified   timestamptz,
    PRIMARY KEY (source_id, file_path, version_id, etag, size_bytes, rewritten_at)
);

-- Headers and user metadata of objects: a row for each distinct set.
CREATE TABLE header_sets (
    header_set           bytea PRIMARY KEY CHECK (length(header_set) = 16),
    content_type         text NOT NULL,
    content_encoding     text NOT NULL,
    content_language     text NOT NULL,
    content_disposition  text NOT NULL,
    cache_control        text NOT NULL,
    expires              text NOT NULL,
    user_metadata        jsonb NOT NULL
);

-- Locations: which bytes of which chunk an object is. A part of an object has its own row. Columns
-- of eight bytes come first, which avoids padding.
CREATE TABLE file_locations (
    caf_file_id    bigint NOT NULL,
    start_byte     bigint NOT NULL,
    end_byte       bigint NOT NULL,
    size_bytes     bigint NOT NULL,
    last_modified  timestamptz NOT NULL,
    rewritten_at   timestamptz NOT NULL DEFAULT '-infinity',
    source_id      integer NOT NULL,
    part           integer NOT NULL DEFAULT 0,
    file_path      text COLLATE "C" NOT NULL,
    version_id     text COLLATE "C" NOT NULL,
    etag           text COLLATE "C" NOT NULL,
    sha256         bytea NOT NULL,
    crc64nvme      bytea,
    s3_checksum    text,
    header_set     bytea,
    -- Besides the index by chunk, the key is the only index: a lookup of a key reads its few
    -- versions.
    PRIMARY KEY (source_id, file_path, version_id, etag, size_bytes, rewritten_at, part)
);

-- Rows of sealed chunks that are not located. Locating moves them to file_locations.
CREATE TABLE pending_locations (LIKE file_locations INCLUDING DEFAULTS);

-- Parts of objects that are larger than a chunk. A chunk has one part and nothing else. All parts
-- of an object are in chunks of one plan; after that is abandoned, another plan has parts of its
-- own. No row is ever deleted.
CREATE TABLE object_parts (
    caf_file_id     bigint PRIMARY KEY REFERENCES caf_files,
    plan_id         bigint NOT NULL REFERENCES plans,
    source_id       integer NOT NULL REFERENCES sources,
    file_path       text COLLATE "C" NOT NULL,
    version_id      text COLLATE "C" NOT NULL,
    etag            text COLLATE "C" NOT NULL,
    object_bytes    bigint NOT NULL,
    rewritten_at    timestamptz NOT NULL DEFAULT '-infinity',
    part            integer NOT NULL,
    part_count      integer NOT NULL,
    start_byte      bigint NOT NULL,
    end_byte        bigint NOT NULL,
    location_part   integer NOT NULL,
    abandoned       boolean NOT NULL DEFAULT false,
    CONSTRAINT within_the_object CHECK (part >= 1 AND part <= part_count AND start_byte >= 0 AND start_byte < end_byte
        AND end_byte <= object_bytes AND (part = 1) = (start_byte = 0) AND (part = part_count) = (end_byte = object_bytes)),
    UNIQUE (plan_id, file_path, version_id, etag, object_bytes, rewritten_at, part),
    UNIQUE (source_id, file_path, version_id, etag, object_bytes, rewritten_at, location_part)
);

CREATE TABLE skipped_objects (
    source_id       integer NOT NULL REFERENCES sources,
    file_path       text COLLATE "C" NOT NULL,
    version_id      text COLLATE "C" NOT NULL,
    etag            text COLLATE "C" NOT NULL,
    size_bytes      bigint NOT NULL,
    rewritten_at    timestamptz NOT NULL DEFAULT '-infinity',
    reason          text NOT NULL,
    detail          text NOT NULL,
    last_modified   timestamptz,
    caf_file_id     bigint REFERENCES caf_files,
    times           integer NOT NULL DEFAULT 1,
    first_at        timestamptz NOT NULL DEFAULT now(),
    last_at         timestamptz NOT NULL DEFAULT now(),
    retry_at        timestamptz NOT NULL,
    PRIMARY KEY (source_id, file_path, version_id, etag, size_bytes, rewritten_at)
);

-- Objects on which runs of a chunk failed. After several failures the object is skipped.
CREATE TABLE read_failures (
    caf_file_id     bigint NOT NULL REFERENCES caf_files,
    file_path       text COLLATE "C" NOT NULL,
    object_version  text COLLATE "C" NOT NULL,
    times           integer NOT NULL DEFAULT 1,
    last_run        text NOT NULL,
    PRIMARY KEY (caf_file_id, file_path, object_version)
);

-- Log archives of clp-s, with the times by which a search selects them.
CREATE TABLE log_times (
    caf_file_id  bigint NOT NULL,
    start_byte   bigint NOT NULL,
    first_ms     bigint,
    last_ms      bigint,
    PRIMARY KEY (caf_file_id, start_byte)
);

-- Planned inventories, and what they stated about the bucket. See "Which objects are to be
-- archived" in docs/explanation/design.md.
CREATE TABLE inventories (
    source_id        integer NOT NULL REFERENCES sources,
    name             text COLLATE "C" NOT NULL,
    taken_at         timestamptz NOT NULL,
    after_key        bytea NOT NULL,
    until_key        bytea,
    all_versions     boolean NOT NULL DEFAULT false,
    current_objects  bigint,
    older_objects    bigint,
    gone_objects     bigint,
    counted_at       timestamptz,
    beside           jsonb,
    left_out         jsonb,
    PRIMARY KEY (source_id, name)
);

-- Current objects, if LastModified alone would give another answer.
CREATE TABLE current_exceptions (
    source_id       integer NOT NULL,
    file_path       text COLLATE "C" NOT NULL,
    stated_at       timestamptz NOT NULL,
    object_version  text COLLATE "C",
    inventory       text COLLATE "C" NOT NULL,
    last_modified   timestamptz,
    PRIMARY KEY (source_id, file_path, stated_at)
);

-- Keys that S3's event notifications named, until a later listing covers them. An event only names
-- a key; the plan asks what the bucket has.
CREATE TABLE noticed_keys (
    source_id   integer NOT NULL REFERENCES sources,
    file_path   bytea NOT NULL,
    sequencer   text COLLATE "C" NOT NULL,
    listing     text COLLATE "C",
    noticed_at  timestamptz NOT NULL DEFAULT now(),
    restored    boolean NOT NULL DEFAULT false,
    PRIMARY KEY (source_id, file_path)
);

-- Messages of a source's queue that are not events of its bucket. They are stored before they are
-- deleted from the queue.
CREATE TABLE messages_set_apart (
    source_id     integer NOT NULL REFERENCES sources,
    message_id    text COLLATE "C" NOT NULL,
    body          bytea NOT NULL,
    reason        text NOT NULL,
    set_apart_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source_id, message_id)
);

-- A separate table, since a plan locks its source's row.
CREATE TABLE queue_reads (
    source_id  integer PRIMARY KEY REFERENCES sources,
    read_at    timestamptz NOT NULL DEFAULT now()
);

-- Sources that are being restored from the store. Objects that are not restored yet must not be
-- planned and paid again.
CREATE TABLE rebuilds (
    source_id  integer PRIMARY KEY REFERENCES sources,
    began_at   timestamptz NOT NULL DEFAULT now()
);

-- Providers' copies of chunks, as last checked.
CREATE TABLE replicas (
    caf_file_id  bigint NOT NULL,
    store        text COLLATE "C" NOT NULL,
    provider     text NOT NULL,
    proof        text NOT NULL,
    checked_at   timestamptz NOT NULL DEFAULT now(),
    listed       boolean NOT NULL DEFAULT true,
    last_proven  bigint,
    last_window  bigint,
    windows      integer NOT NULL DEFAULT 0,
    fault        text NOT NULL DEFAULT '',
    PRIMARY KEY (caf_file_id, store, provider),
    FOREIGN KEY (caf_file_id, store) REFERENCES chunk_copies
);

-- Chunks that a provider returned whole, with the right Merkle root. Only a verifier inserts here
-- (roles.sql). A run that moves a chunk may delete rows that no longer count.
CREATE TABLE full_reads (
    caf_file_id  bigint NOT NULL,
    store        text COLLATE "C" NOT NULL,
    provider     text NOT NULL,
    read_at      timestamptz NOT NULL DEFAULT now(),
    opened_with  text,
    PRIMARY KEY (caf_file_id, store),
    FOREIGN KEY (caf_file_id, store) REFERENCES chunk_copies
);

CREATE TABLE providers (
    provider       text COLLATE "C" PRIMARY KEY,
    upload_rate    double precision,
    download_rate  double precision,
    failures       integer NOT NULL DEFAULT 0,
    failed_at      timestamptz
);

-- Signed transactions. Each belongs to an account and posts any number of chunks. It is written
-- before it is sent; a retry sends the same body.
CREATE TABLE transactions (
    hash            text PRIMARY KEY,
    account         text COLLATE "C" NOT NULL,
    sequence        bigint NOT NULL CHECK (sequence >= 0),
    timeout_height  bigint NOT NULL CHECK (timeout_height > 0),  -- 0 would never expire
    body            bytea NOT NULL,
    purpose         text NOT NULL CHECK (purpose IN ('post', 'buy')),
    cost            bigint NOT NULL CHECK (cost >= 0),
    cost_told       boolean NOT NULL DEFAULT false,
    outcome         text CHECK (outcome IN ('included', 'failed', 'expired', 'superseded')),
    created_at      timestamptz NOT NULL DEFAULT now(),
    settled_at      timestamptz,
    -- The hash by which the chain knows the transaction must be that of the signed bytes.
    CONSTRAINT hash_of_body CHECK (hash = upper(encode(sha256(body), 'hex'))),
    CONSTRAINT settled_with_outcome CHECK ((outcome IS NULL) = (settled_at IS NULL)),
    UNIQUE (hash, account)                            -- for the key of its posts
);

-- Messages that wait for a transaction. A row is deleted when a transaction includes it, or when
-- its chunk needs no post.
CREATE TABLE posts (
    caf_file_id    bigint NOT NULL REFERENCES caf_files,
    account        text COLLATE "C" NOT NULL,
    message        bytea NOT NULL,
    charged_bytes  bigint NOT NULL CHECK (charged_bytes >= 0),
    asked_at       timestamptz NOT NULL DEFAULT now(),
    epoch          bigint NOT NULL,
    PRIMARY KEY (caf_file_id, account)
);

CREATE TABLE transaction_posts (
    hash         text NOT NULL,
    account      text COLLATE "C" NOT NULL,
    position     integer NOT NULL,
    caf_file_id  bigint NOT NULL REFERENCES caf_files,
    start        bigint,
    live         boolean NOT NULL DEFAULT true,
    PRIMARY KEY (hash, position),
    FOREIGN KEY (hash, account) REFERENCES transactions (hash, account)
);

CREATE TABLE chain_heights (
    chain_id  text COLLATE "C" PRIMARY KEY,
    height    bigint NOT NULL
);

-- The last reading of an account's space and coins.
CREATE TABLE storage_plans (
    account           text COLLATE "C" PRIMARY KEY,
    read_at           timestamptz NOT NULL,
    balance           bigint NOT NULL,
    space_bytes       bigint,
    used_bytes        bigint,
    starts_at         timestamptz,
    ends_at           timestamptz,
    latest_end        timestamptz,
    latest_end_space  bigint
);

-- The last search of a store for posts that the ledger does not know, e.g. after an older backup
-- was restored. See docs/decisions/0028-older-ledgers.md.
CREATE TABLE store_looks (
    source_id  integer NOT NULL REFERENCES sources,
    account    text COLLATE "C" NOT NULL,
    sequence   bigint NOT NULL CHECK (sequence >= 0),
    unknown    integer NOT NULL CHECK (unknown >= 0),
    looked_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source_id, account)
);

-- The last whole list of an account's archives. It shows whether another ledger uses the account.
-- See docs/decisions/0013-a-first-plan-asks-the-store.md.
CREATE TABLE archive_looks (
    account    text COLLATE "C" PRIMARY KEY,
    sequence   bigint NOT NULL CHECK (sequence >= 0),
    archives   text[] NOT NULL,
    looked_at  timestamptz NOT NULL DEFAULT now()
);

-- Posts that are not and need not be chunks of this ledger. They do not stop packing and posting.
CREATE TABLE left_posts (
    source_id    integer NOT NULL REFERENCES sources,
    merkle_root  bytea NOT NULL,
    superseded   boolean NOT NULL,
    left_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source_id, merkle_root)
);

-- Passes of the proof watch through a store's lists. See "Proofs, damage and repair" in
-- docs/how-to/connect-jackal.md.
CREATE TABLE chain_listings (
    store     text PRIMARY KEY,
    next_at   timestamptz NOT NULL,
    whole_at  timestamptz
);

-- The folder that has this ledger's chunks, if they are in a folder.
CREATE TABLE folder_store (
    only_row  boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    id        text NOT NULL CHECK (id ~ '^[0-9a-f]{32}$')
);

-- Orders of the operator. Without an order the settings apply.
CREATE TABLE orders (
    name        text PRIMARY KEY CHECK (name IN ('paused', 'unverified', 'bandwidth', 'spend_cap')),
    value       text NOT NULL CHECK (value <> ''),
    ordered_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT numbers CHECK (name IN ('paused', 'unverified') OR value ~ '^(-1|[0-9]{1,18})$')
);
