-- The ledger: what is planned, claimed, stored and located. See "Database" in docs/design.md.
-- Text that is compared as bytes has COLLATE "C": keys are byte-exact, and no locale may reorder an index.

CREATE TABLE sources (
    source_id   integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text COLLATE "C" NOT NULL UNIQUE,
    archive_id  text NOT NULL,
    address     text NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE plans (
    plan_id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source_id     integer NOT NULL REFERENCES sources,
    name          text COLLATE "C" NOT NULL,         -- 8 or 12 hex digits of sha256
    sha256        bytea NOT NULL UNIQUE,
    snapshot      text NOT NULL,
    folder        text NOT NULL,
    object_count  bigint NOT NULL,
    object_bytes  bigint NOT NULL,
    created_at    timestamptz NOT NULL DEFAULT now(),
    UNIQUE (source_id, name)
);

CREATE TABLE caf_files (
    caf_file_id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name                 text COLLATE "C" NOT NULL UNIQUE,
    source_id            integer NOT NULL REFERENCES sources,
    plan_id              bigint NOT NULL REFERENCES plans,
    number               integer NOT NULL,
    state                text NOT NULL DEFAULT 'planned' CHECK (state IN (
        'planned', 'packing', 'sealed', 'posting', 'posted', 'uploading', 'verified', 'located',
        'empty', 'parked', 'withdrawn', 'abandoned', 'damaged', 'expired')),
    epoch                bigint NOT NULL DEFAULT 0,   -- of the lease under which it was last moved
    attempts             integer NOT NULL DEFAULT 0,  -- times that packing was begun
    parked_reason        text NOT NULL DEFAULT '',
    object_count         bigint NOT NULL,
    object_bytes         bigint NOT NULL,
    expected_size_bytes  bigint NOT NULL,
    caf_size_bytes       bigint NOT NULL DEFAULT 0,
    stored_size_bytes    bigint NOT NULL DEFAULT 0,
    member_count         bigint NOT NULL DEFAULT 0,   -- objects in it, our own two members not counted
    member_bytes         bigint NOT NULL DEFAULT 0,
    skipped_count        bigint NOT NULL DEFAULT 0,
    released_count       bigint NOT NULL DEFAULT 0,
    merkle_root          bytea,                       -- over the stored bytes
    proof_type           smallint,
    owner                text,
    start                bigint,                      -- block height of the post
    samples              jsonb NOT NULL DEFAULT '[]', -- [{"offset", "length", "sha256"}], stored coordinates
    envelope             jsonb,                       -- of an encrypted chunk; none yet
    created_at           timestamptz NOT NULL DEFAULT now(),
    updated_at           timestamptz NOT NULL DEFAULT now(),
    sealed_at            timestamptz,
    posted_at            timestamptz,
    verified_at          timestamptz,
    located_at           timestamptz,
    UNIQUE (plan_id, number),
    -- A state is a claim about what was done; the moves say in which order, these say that it was done at all.
    CONSTRAINT sealed_before CHECK (sealed_at IS NOT NULL AND merkle_root IS NOT NULL OR state NOT IN (
        'sealed', 'posting', 'posted', 'uploading', 'verified', 'located', 'damaged', 'expired')),
    CONSTRAINT posted_before CHECK (posted_at IS NOT NULL AND owner IS NOT NULL AND start IS NOT NULL OR state NOT IN (
        'posted', 'uploading', 'verified', 'located', 'damaged', 'expired', 'abandoned')),
    CONSTRAINT verified_before CHECK (verified_at IS NOT NULL OR state NOT IN (
        'verified', 'located', 'damaged', 'expired'))
);
CREATE INDEX caf_files_by_source_and_state ON caf_files (source_id, state);

-- Who works on a chunk (or cuts a source's plan) right now; by the database's clock.
CREATE TABLE leases (
    name             text COLLATE "C" PRIMARY KEY,
    epoch            bigint NOT NULL,
    run              text NOT NULL,
    boot_id          text NOT NULL,
    pid              bigint NOT NULL,
    process_started  double precision NOT NULL,
    expires_at       timestamptz NOT NULL
);

-- What a chunk under way will archive. Neither this table nor file_locations has foreign keys: both are loaded by one
-- statement under a lock on the chunk's row, no row they could name is ever deleted, and keys halved the rate of loading.
CREATE TABLE claims (
    source_id       integer NOT NULL,
    file_path       text COLLATE "C" NOT NULL,
    object_version  text COLLATE "C" NOT NULL,
    caf_file_id     bigint NOT NULL,
    PRIMARY KEY (source_id, file_path, object_version)
);
CREATE INDEX claims_by_chunk ON claims (caf_file_id);

CREATE TABLE staging_reservations (
    caf_file_id  bigint PRIMARY KEY REFERENCES caf_files,
    folder       text NOT NULL,
    size_bytes   bigint NOT NULL
);

CREATE TABLE copies (
    caf_file_id  bigint NOT NULL REFERENCES caf_files,
    provider     text NOT NULL,
    proof        text NOT NULL,
    checked_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (caf_file_id, provider)
);

-- Written before a transaction is sent; a retry sends the same body.
CREATE TABLE transactions (
    hash            text PRIMARY KEY,
    caf_file_id     bigint NOT NULL REFERENCES caf_files,
    account         text NOT NULL,
    sequence        bigint NOT NULL,
    timeout_height  bigint NOT NULL,
    body            bytea NOT NULL,
    outcome         text CHECK (outcome IN ('included', 'expired', 'superseded')),  -- NULL while it is not known
    created_at      timestamptz NOT NULL DEFAULT now()
);
-- One transaction that is or may be included for each sequence of an account: a second payment for the same work cannot be
-- committed.
CREATE UNIQUE INDEX transactions_open ON transactions (account, sequence)
    WHERE outcome IS NULL OR outcome = 'included';
CREATE INDEX transactions_by_chunk ON transactions (caf_file_id);

CREATE TABLE file_locations (
    source_id       integer NOT NULL,
    file_path       text COLLATE "C" NOT NULL,
    object_version  text COLLATE "C" NOT NULL,        -- version id, or etag:<ETag>:<size>
    part            integer NOT NULL DEFAULT 0,
    caf_file_id     bigint NOT NULL,
    start_byte      bigint NOT NULL,                  -- CAF coordinates
    end_byte        bigint NOT NULL,                  -- exclusive
    version_id      text,
    etag            text NOT NULL,
    last_modified   timestamptz NOT NULL,
    sha256          bytea NOT NULL,
    -- The only index: a look-up of a key reads its few versions and takes the one modified last, in whatever order the
    -- chunks were loaded. A second index would cost 124 bytes a row.
    PRIMARY KEY (source_id, file_path, object_version, part)
);
CREATE INDEX file_locations_by_chunk ON file_locations USING brin (caf_file_id);

CREATE TABLE skipped_objects (
    source_id       integer NOT NULL REFERENCES sources,
    file_path       text COLLATE "C" NOT NULL,        -- percent-encoded where the key is not supported
    object_version  text COLLATE "C" NOT NULL,
    reason          text NOT NULL,
    detail          text NOT NULL,
    etag            text NOT NULL,
    size_bytes      bigint NOT NULL,
    caf_file_id     bigint REFERENCES caf_files,      -- NULL: skipped by the plan
    times           integer NOT NULL DEFAULT 1,
    first_at        timestamptz NOT NULL DEFAULT now(),
    last_at         timestamptz NOT NULL DEFAULT now(),
    retry_at        timestamptz NOT NULL,             -- 'infinity': not by itself
    PRIMARY KEY (source_id, file_path, object_version)
);

-- Runs of a chunk that failed on one object, so that it can be skipped after several.
CREATE TABLE read_failures (
    caf_file_id     bigint NOT NULL REFERENCES caf_files,
    file_path       text COLLATE "C" NOT NULL,
    object_version  text COLLATE "C" NOT NULL,
    times           integer NOT NULL DEFAULT 1,
    last_run        text NOT NULL,                    -- a run counts once, however often it tries
    PRIMARY KEY (caf_file_id, file_path, object_version)
);
