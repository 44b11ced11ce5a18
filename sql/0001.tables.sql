-- The ledger's tables. caf_pipeline/ledger/tables.py names their columns, types and keys; a test
-- compares both. `make docs` writes docs/reference/schema.md from a database. In a comment, "NULL"
-- explains a missing value, and "-> table.column" is a reference without a foreign key. Text that is
-- compared as bytes has COLLATE "C": keys are byte-exact, and no locale may reorder an index.

CREATE TABLE sources (
    source_id      integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name           text COLLATE "C" NOT NULL UNIQUE,
    archive_id     text NOT NULL,
    address        text NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT now(),
    ids_set_aside  text[]
);
COMMENT ON TABLE sources IS 'The buckets and prefixes that are archived.';
COMMENT ON COLUMN sources.source_id IS 'id of the source in this ledger';
COMMENT ON COLUMN sources.name IS 'name of the source in caf.toml';
COMMENT ON COLUMN sources.archive_id IS 'id in the note of each post, 32 random hexadecimal digits';
COMMENT ON COLUMN sources.address IS 'endpoint, bucket and prefix, separated by slashes';
COMMENT ON COLUMN sources.created_at IS 'when the source was registered';
COMMENT ON COLUMN sources.ids_set_aside IS 'archive ids that an operator set aside with --new-archive; NULL: none';

-- Readers have no right to this table (roles.sql).
CREATE TABLE post_keys (
    source_id  integer PRIMARY KEY REFERENCES sources,
    key        bytea NOT NULL CHECK (length(key) = 32)
);
COMMENT ON TABLE post_keys IS 'The secrets of the MACs in the notes of posts.';
COMMENT ON COLUMN post_keys.source_id IS 'source whose posts have MACs by this key';
COMMENT ON COLUMN post_keys.key IS 'random secret of the MACs';

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
COMMENT ON TABLE plans IS 'Plans: which new objects of an inventory go into which chunk.';
COMMENT ON COLUMN plans.plan_id IS 'id of the plan in this ledger';
COMMENT ON COLUMN plans.source_id IS 'source that was planned';
COMMENT ON COLUMN plans.name IS 'first 8 or 12 hexadecimal digits of sha256';
COMMENT ON COLUMN plans.sha256 IS 'SHA-256 over everything that the plan contains';
COMMENT ON COLUMN plans.snapshot IS 'name of the snapshot that was planned -> inventories.name';
COMMENT ON COLUMN plans.folder IS 'folder of the plan''s Parquet files';
COMMENT ON COLUMN plans.object_count IS 'objects in the plan';
COMMENT ON COLUMN plans.object_bytes IS 'total size of these objects';
COMMENT ON COLUMN plans.created_at IS 'when the plan was registered';

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
    failures             text[] NOT NULL DEFAULT '{}',
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
    row_count            bigint NOT NULL DEFAULT 0,
    row_set              uuid NOT NULL DEFAULT gen_random_uuid(),
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
    header               bytea,
    nonce                bytea,
    recipients           text[],
    UNIQUE (plan_id, number),
    -- A state claims that something was done. Moves guarantee the order, these checks that it was
    -- done.
    CONSTRAINT sealed_before CHECK (sealed_at IS NOT NULL OR state NOT IN ('sealed', 'located', 'abandoned')),
    CONSTRAINT located_before CHECK (located_at IS NOT NULL OR state <> 'located')
);
COMMENT ON TABLE caf_files IS 'Chunks. Facts about a chunk in one store are in chunk_copies.';
COMMENT ON COLUMN caf_files.caf_file_id IS 'id of the chunk in this ledger';
COMMENT ON COLUMN caf_files.name IS 'name of the chunk, and of its partition in Dagster';
COMMENT ON COLUMN caf_files.source_id IS 'source of the chunk''s objects';
COMMENT ON COLUMN caf_files.plan_id IS 'plan that the chunk belongs to';
COMMENT ON COLUMN caf_files.number IS 'number of the chunk in its plan';
COMMENT ON COLUMN caf_files.state IS 'state of the chunk; chunk_state.py has the legal moves';
COMMENT ON COLUMN caf_files.reason IS 'why the chunk is parked or withdrawn, or why its last attempt failed; else ''''';
COMMENT ON COLUMN caf_files.epoch IS 'epoch of the latest lease on the chunk';
COMMENT ON COLUMN caf_files.attempts IS 'number of times that packing began';
COMMENT ON COLUMN caf_files.failures IS
    'runs at work, killed or failed since it was planned or unparked, but for outages';
COMMENT ON COLUMN caf_files.object_count IS 'objects that were planned for the chunk';
COMMENT ON COLUMN caf_files.object_bytes IS 'total size of these objects';
COMMENT ON COLUMN caf_files.expected_size_bytes IS 'expected size of the whole file, with its manifest';
COMMENT ON COLUMN caf_files.caf_size_bytes IS 'size of the CAF file; 0 before the seal';
COMMENT ON COLUMN caf_files.stored_size_bytes IS 'stored size; 0 before the seal';
COMMENT ON COLUMN caf_files.member_count IS 'objects in the file, without head and manifest';
COMMENT ON COLUMN caf_files.member_bytes IS 'total size of the objects in the file';
COMMENT ON COLUMN caf_files.skipped_count IS 'objects that packing skipped';
COMMENT ON COLUMN caf_files.released_count IS 'objects that packing neither took nor skipped; another plan may take them';
COMMENT ON COLUMN caf_files.located_count IS 'rows that the chunk got in file_locations; other chunks may have other members';
COMMENT ON COLUMN caf_files.row_count IS 'rows of whole objects that the chunk has in file_locations; triggers count them';
COMMENT ON COLUMN caf_files.row_set IS 'random name of these rows, which each INSERT and DELETE replaces';
COMMENT ON COLUMN caf_files.samples IS 'samples for read-backs: offset, length and SHA-256 of stored bytes';
COMMENT ON COLUMN caf_files.unread IS
    'stored bytes that a rebuild read to make the rows, like `samples`; NULL: packed here, or all bytes were compared with '
    'the Merkle root and with these';
COMMENT ON COLUMN caf_files.tail_start IS 'first byte of manifest, index and footer in the file; NULL: not known';
COMMENT ON COLUMN caf_files.tail_sha256 IS 'SHA-256 of the bytes from tail_start to the end; NULL: not known';
COMMENT ON COLUMN caf_files.has_log_times IS 'whether packing looked for log archives; if so, log_times has all of them';
COMMENT ON COLUMN caf_files.from_unknown_post IS
    'whether it was restored from a post that this ledger cannot recognize as its own';
COMMENT ON COLUMN caf_files.created_at IS 'when the chunk was planned';
COMMENT ON COLUMN caf_files.updated_at IS 'when the state of the chunk or its copy last changed';
COMMENT ON COLUMN caf_files.sealed_at IS 'when the chunk was sealed; NULL: never';
COMMENT ON COLUMN caf_files.located_at IS 'when the locations were written; NULL: never';
COMMENT ON COLUMN caf_files.restored_at IS 'when caf rebuild restored the row; NULL: never';
COMMENT ON COLUMN caf_files.adopted_at IS 'when another program''s CAF file became this chunk; NULL: packed here';
COMMENT ON COLUMN caf_files.header IS 'header of the encrypted file; NULL: stored in the clear';
COMMENT ON COLUMN caf_files.nonce IS 'nonce of the encrypted file; NULL: stored in the clear';
COMMENT ON COLUMN caf_files.recipients IS 'public keys whose identities open the file; NULL: stored in the clear';

-- Triggers in 0002.views.sql keep the states of a chunk and its copies consistent.
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
COMMENT ON TABLE chunk_copies IS
    'Copies of chunks in stores. A sealed or located chunk has a copy in each store that must have the chunk.';
COMMENT ON COLUMN chunk_copies.caf_file_id IS 'chunk that is copied';
COMMENT ON COLUMN chunk_copies.store IS 'store that has the copy: its kind in the settings';
COMMENT ON COLUMN chunk_copies.state IS 'state of the copy; chunk_state.py has the legal moves';
COMMENT ON COLUMN chunk_copies.damage IS 'why the copy is or was damaged; else ''''';
COMMENT ON COLUMN chunk_copies.merkle_root IS 'Merkle root of the stored bytes';
COMMENT ON COLUMN chunk_copies.proof_type IS 'proof type of the root on the chain';
COMMENT ON COLUMN chunk_copies.archive_id IS 'archive id in the note of the post; NULL: that of the source';
COMMENT ON COLUMN chunk_copies.owner IS 'owner of the post, on Jackal the wallet''s address; NULL before the post';
COMMENT ON COLUMN chunk_copies.start IS 'start of the post, on Jackal the height of its block; NULL before the post';
COMMENT ON COLUMN chunk_copies.updated_at IS 'when the state or the post last changed';
COMMENT ON COLUMN chunk_copies.posted_at IS 'when the copy was posted; NULL: never';
COMMENT ON COLUMN chunk_copies.verified_at IS 'when the providers'' copies and samples were verified; NULL: never';
COMMENT ON COLUMN chunk_copies.checked_at IS 'when the proof watch last checked the copy; NULL: never';
COMMENT ON COLUMN chunk_copies.look_again_at IS 'when a check can first see the next proof window; NULL: not due';
COMMENT ON COLUMN chunk_copies.suspected_at IS 'time of the store''s list that differs from the ledger; NULL: no difference';
COMMENT ON COLUMN chunk_copies.unanswered_at IS 'when a provider did not answer a check; NULL: all answered the last check';
COMMENT ON COLUMN chunk_copies.expires_at IS 'when the store drops the copy; NULL: not known';

CREATE TABLE leases (
    name             text COLLATE "C" PRIMARY KEY,
    epoch            bigint NOT NULL,
    run              text NOT NULL,
    boot_id          text NOT NULL,
    pid              bigint NOT NULL,
    process_started  double precision NOT NULL,
    expires_at       timestamptz NOT NULL
);
COMMENT ON TABLE leases IS
    'The right of one run to move one chunk, plan a source, find what is safe to delete, sign, or read a store''s lists.';
COMMENT ON COLUMN leases.name IS 'what is leased: chunk/NAME, plan/NAME, deletion/NAME, account/NAME or lists/NAME';
COMMENT ON COLUMN leases.epoch IS 'grows with each holder; at least the time in milliseconds since 1970';
COMMENT ON COLUMN leases.run IS 'run that holds the lease';
COMMENT ON COLUMN leases.boot_id IS 'machine of the holder, and its boot';
COMMENT ON COLUMN leases.pid IS 'process of the holder';
COMMENT ON COLUMN leases.process_started IS 'start time of this process, since pids are reused';
COMMENT ON COLUMN leases.expires_at IS 'end of the lease by the database''s clock; 1970-01-01: given back';

CREATE TABLE run_progress (
    run              text,
    boot_id          text,
    pid              bigint,
    process_started  double precision,
    source           text COLLATE "C",
    chunk            text COLLATE "C" NOT NULL,
    packed_objects   bigint NOT NULL,
    packed_bytes     bigint NOT NULL,
    read_bytes       bigint NOT NULL,
    sent_bytes       bigint NOT NULL,
    waits            jsonb NOT NULL,
    expires_at       timestamptz NOT NULL,
    PRIMARY KEY (run, boot_id, pid, process_started, source)
);
COMMENT ON TABLE run_progress IS
    'How far live runs are with a chunk, and what they wait for. A process renews its row; rows of dead processes and expired rows do not count.';
COMMENT ON COLUMN run_progress.run IS 'run that the process works for';
COMMENT ON COLUMN run_progress.boot_id IS 'machine of the process, and its boot';
COMMENT ON COLUMN run_progress.pid IS 'process that wrote the row';
COMMENT ON COLUMN run_progress.process_started IS 'start time of this process, since pids are reused';
COMMENT ON COLUMN run_progress.source IS 'source that the run works on -> sources.name';
COMMENT ON COLUMN run_progress.chunk IS 'chunk that the run works on; '''': none -> caf_files.name';
COMMENT ON COLUMN run_progress.packed_objects IS 'packed or skipped objects';
COMMENT ON COLUMN run_progress.packed_bytes IS 'their bytes';
COMMENT ON COLUMN run_progress.read_bytes IS 'bytes of these that the process read';
COMMENT ON COLUMN run_progress.sent_bytes IS 'uploaded bytes; every copy counts';
COMMENT ON COLUMN run_progress.waits IS 'what the run waits for, since when';
COMMENT ON COLUMN run_progress.expires_at IS 'when the row expires unless renewed, by the database''s clock';

CREATE TABLE staging_reservations (
    caf_file_id  bigint PRIMARY KEY REFERENCES caf_files,
    folder       text NOT NULL,
    size_bytes   bigint NOT NULL
);
COMMENT ON TABLE staging_reservations IS 'Bytes of staging folders that are reserved for chunks.';
COMMENT ON COLUMN staging_reservations.caf_file_id IS 'chunk in staging';
COMMENT ON COLUMN staging_reservations.folder IS 'staging folder';
COMMENT ON COLUMN staging_reservations.size_bytes IS 'bytes that are reserved in the folder';

CREATE TABLE packing_secrets (
    caf_file_id  bigint PRIMARY KEY REFERENCES caf_files,
    secret       bytea NOT NULL CHECK (length(secret) = 32)
) WITH (autovacuum_vacuum_threshold = 0, autovacuum_vacuum_scale_factor = 0);  -- deleted rows have secrets
COMMENT ON TABLE packing_secrets IS
    'Secrets of the packings of private chunks. The seal deletes them, and `caf backup` leaves them out, so that remains of'
    ' a journal do not open a sealed chunk.';
COMMENT ON COLUMN packing_secrets.caf_file_id IS 'private chunk that is being packed';
COMMENT ON COLUMN packing_secrets.secret IS 'random; opens the chunk''s journals together with the worker key';

-- Objects. Claims and locations have no foreign keys, which halved the rate of loading. One
-- statement loads them under a lock on the chunk's row, and referenced rows are never deleted.

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
COMMENT ON TABLE claims IS 'Objects of chunks under way. No other plan may take them.';
COMMENT ON COLUMN claims.source_id IS 'source of the object -> sources.source_id';
COMMENT ON COLUMN claims.file_path IS 'key of the object';
COMMENT ON COLUMN claims.version_id IS 'version id; '''' for none';
COMMENT ON COLUMN claims.etag IS 'ETag as S3 gave it, without quotes';
COMMENT ON COLUMN claims.size_bytes IS 'size of the whole object';
COMMENT ON COLUMN claims.rewritten_at IS 'LastModified of an object archived again under the same ETag and size; else -infinity';
COMMENT ON COLUMN claims.caf_file_id IS 'chunk that will archive the object -> caf_files.caf_file_id';
COMMENT ON COLUMN claims.last_modified IS 'LastModified of the object; NULL: not known';

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
COMMENT ON TABLE header_sets IS 'Distinct sets of headers and user metadata that archived objects have.';
COMMENT ON COLUMN header_sets.header_set IS 'first 16 bytes of the SHA-256 of all values, each followed by a NUL';
COMMENT ON COLUMN header_sets.content_type IS 'Content-Type header; '''' for none';
COMMENT ON COLUMN header_sets.content_encoding IS 'Content-Encoding header; '''' for none';
COMMENT ON COLUMN header_sets.content_language IS 'Content-Language header; '''' for none';
COMMENT ON COLUMN header_sets.content_disposition IS 'Content-Disposition header; '''' for none';
COMMENT ON COLUMN header_sets.cache_control IS 'Cache-Control header; '''' for none';
COMMENT ON COLUMN header_sets.expires IS 'Expires header; '''' for none';
COMMENT ON COLUMN header_sets.user_metadata IS 'user metadata: an object of names and values';

-- Columns of eight bytes come first, which avoids padding.
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
COMMENT ON TABLE file_locations IS 'Location of each archived object.';
COMMENT ON COLUMN file_locations.caf_file_id IS 'chunk that has the object -> caf_files.caf_file_id';
COMMENT ON COLUMN file_locations.start_byte IS 'first byte of the object, or of its part, in the CAF';
COMMENT ON COLUMN file_locations.end_byte IS 'end of the object, or of its part, in the CAF, exclusive';
COMMENT ON COLUMN file_locations.size_bytes IS 'size of the whole object';
COMMENT ON COLUMN file_locations.last_modified IS 'LastModified of the object';
COMMENT ON COLUMN file_locations.rewritten_at IS
    'LastModified of an object archived again under the same ETag and size; else -infinity';
COMMENT ON COLUMN file_locations.source_id IS 'source of the object -> sources.source_id';
COMMENT ON COLUMN file_locations.part IS 'location_part of an object part; 0: a whole object';
COMMENT ON COLUMN file_locations.file_path IS 'key of the object';
COMMENT ON COLUMN file_locations.version_id IS 'version id; '''' for none';
COMMENT ON COLUMN file_locations.etag IS 'ETag as S3 gave it, without quotes';
COMMENT ON COLUMN file_locations.sha256 IS 'SHA-256 of the archived bytes';
COMMENT ON COLUMN file_locations.crc64nvme IS 'CRC-64/NVME of the archived bytes, big-endian; NULL: not known';
COMMENT ON COLUMN file_locations.s3_checksum IS
    'S3''s own checksum of the object: algorithm, colon, hexadecimal digits; NULL: not known';
COMMENT ON COLUMN file_locations.header_set IS
    'headers and user metadata; NULL: not known, e.g. in adopted files -> header_sets.header_set';

CREATE TABLE pending_locations (LIKE file_locations INCLUDING DEFAULTS INCLUDING COMMENTS);
COMMENT ON TABLE pending_locations IS 'Rows of sealed chunks that are not located. Locating moves them to file_locations.';

-- After a plan abandons an object, another plan has parts of its own.
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
COMMENT ON TABLE object_parts IS 'Parts of objects that are larger than a chunk. No row is ever deleted.';
COMMENT ON COLUMN object_parts.caf_file_id IS 'chunk that holds the part and nothing else';
COMMENT ON COLUMN object_parts.plan_id IS 'plan with all parts of the object';
COMMENT ON COLUMN object_parts.source_id IS 'source of the object';
COMMENT ON COLUMN object_parts.file_path IS 'key of the object';
COMMENT ON COLUMN object_parts.version_id IS 'version id; '''' for none';
COMMENT ON COLUMN object_parts.etag IS 'ETag as S3 gave it, without quotes';
COMMENT ON COLUMN object_parts.object_bytes IS 'size of the whole object';
COMMENT ON COLUMN object_parts.rewritten_at IS
    'LastModified of an object archived again under the same ETag and size; else -infinity';
COMMENT ON COLUMN object_parts.part IS 'number of the part, from 1';
COMMENT ON COLUMN object_parts.part_count IS 'parts of the object';
COMMENT ON COLUMN object_parts.start_byte IS 'first byte of the part in the object';
COMMENT ON COLUMN object_parts.end_byte IS 'end of the part in the object, exclusive';
COMMENT ON COLUMN object_parts.location_part IS 'part number of its location, different in each plan';
COMMENT ON COLUMN object_parts.abandoned IS 'whether the plan gave up the object; stored parts of it are never returned';

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
COMMENT ON TABLE skipped_objects IS 'Objects of an inventory or a plan that were not archived.';
COMMENT ON COLUMN skipped_objects.source_id IS 'source of the object';
COMMENT ON COLUMN skipped_objects.file_path IS 'key of the object; percent-encoded if the key is not supported';
COMMENT ON COLUMN skipped_objects.version_id IS 'version id; '''' for none';
COMMENT ON COLUMN skipped_objects.etag IS 'ETag as S3 gave it, without quotes';
COMMENT ON COLUMN skipped_objects.size_bytes IS 'size of the whole object';
COMMENT ON COLUMN skipped_objects.rewritten_at IS
    'LastModified of an object archived again under the same ETag and size; else -infinity';
COMMENT ON COLUMN skipped_objects.reason IS 'a value of SkipReason in inventory/objects.py';
COMMENT ON COLUMN skipped_objects.detail IS 'the reason in words';
COMMENT ON COLUMN skipped_objects.last_modified IS 'LastModified of the object; NULL: not known';
COMMENT ON COLUMN skipped_objects.caf_file_id IS 'chunk that skipped it; NULL: the plan did';
COMMENT ON COLUMN skipped_objects.times IS 'number of times that it was skipped';
COMMENT ON COLUMN skipped_objects.first_at IS 'when it was first skipped';
COMMENT ON COLUMN skipped_objects.last_at IS 'when it was last skipped';
COMMENT ON COLUMN skipped_objects.retry_at IS 'when a plan may take it again; infinity: never by itself';

CREATE TABLE read_failures (
    caf_file_id     bigint NOT NULL REFERENCES caf_files,
    file_path       text COLLATE "C" NOT NULL,
    object_version  text COLLATE "C" NOT NULL,
    times           integer NOT NULL DEFAULT 1,
    last_run        text NOT NULL,
    PRIMARY KEY (caf_file_id, file_path, object_version)
);
COMMENT ON TABLE read_failures IS 'Objects on which runs failed. After several failures the object is skipped.';
COMMENT ON COLUMN read_failures.caf_file_id IS 'chunk whose runs failed on the object';
COMMENT ON COLUMN read_failures.file_path IS 'key of the object';
COMMENT ON COLUMN read_failures.object_version IS 'version id, or etag:<ETag>:<size>';
COMMENT ON COLUMN read_failures.times IS 'runs that failed on the object';
COMMENT ON COLUMN read_failures.last_run IS 'the last of these runs; a run counts once, however often it retries';

CREATE TABLE log_times (
    caf_file_id  bigint NOT NULL,
    start_byte   bigint NOT NULL,
    first_ms     bigint,
    last_ms      bigint,
    PRIMARY KEY (caf_file_id, start_byte)
);
COMMENT ON TABLE log_times IS 'First and last time of each log archive of clp-s. A search selects archives by them.';
COMMENT ON COLUMN log_times.caf_file_id IS 'chunk that has the log archive -> caf_files.caf_file_id';
COMMENT ON COLUMN log_times.start_byte IS 'first byte in the CAF, as in its location';
COMMENT ON COLUMN log_times.first_ms IS 'first time, in milliseconds since 1970; NULL: not known, always searched';
COMMENT ON COLUMN log_times.last_ms IS 'last time, inclusive, in milliseconds since 1970; NULL: not known';

-- See "Which objects are to be archived" in docs/explanation/design.md.
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
COMMENT ON TABLE inventories IS 'Inventories that were planned, and how many located objects each listed.';
COMMENT ON COLUMN inventories.source_id IS 'source that the inventory lists';
COMMENT ON COLUMN inventories.name IS 'name of the inventory''s snapshot';
COMMENT ON COLUMN inventories.taken_at IS 'S3''s time before the first page was requested';
COMMENT ON COLUMN inventories.after_key IS 'the inventory covers keys greater than this key';
COMMENT ON COLUMN inventories.until_key IS 'last key that the inventory covers, inclusive; NULL: no limit';
COMMENT ON COLUMN inventories.all_versions IS 'whether older versions are objects, too';
COMMENT ON COLUMN inventories.current_objects IS 'located objects that the inventory lists; NULL: not counted yet';
COMMENT ON COLUMN inventories.older_objects IS 'located objects whose key now has another content; NULL: not counted yet';
COMMENT ON COLUMN inventories.gone_objects IS 'located objects whose key is not listed; NULL: not counted yet';
COMMENT ON COLUMN inventories.counted_at IS 'when the three counts were made; NULL: not counted yet';
COMMENT ON COLUMN inventories.beside IS 'numbers of older versions, delete markers and deleted keys; NULL: not counted';
COMMENT ON COLUMN inventories.left_out IS 'number of objects that each filter leaves out, by filter; NULL: not counted yet';

CREATE TABLE current_exceptions (
    source_id       integer NOT NULL,
    file_path       text COLLATE "C" NOT NULL,
    stated_at       timestamptz NOT NULL,
    object_version  text COLLATE "C",
    inventory       text COLLATE "C" NOT NULL,
    last_modified   timestamptz,
    PRIMARY KEY (source_id, file_path, stated_at)
);
COMMENT ON TABLE current_exceptions IS 'Current object of a key at a time, if LastModified alone would give another answer.';
COMMENT ON COLUMN current_exceptions.source_id IS 'source of the key -> sources.source_id';
COMMENT ON COLUMN current_exceptions.file_path IS 'the key';
COMMENT ON COLUMN current_exceptions.stated_at IS 'taken_at of the inventory, or a later LastModified known then';
COMMENT ON COLUMN current_exceptions.object_version IS
    'current version: version id, or etag:<ETag>:<size>; NULL: the key is gone';
COMMENT ON COLUMN current_exceptions.inventory IS 'inventory that states this -> inventories.name';
COMMENT ON COLUMN current_exceptions.last_modified IS
    'LastModified at which headers and SHA-256 equalled the archived; NULL: not compared';

-- An event only names a key; the plan asks what the bucket has.
CREATE TABLE noticed_keys (
    source_id   integer NOT NULL REFERENCES sources,
    file_path   bytea NOT NULL,
    sequencer   text COLLATE "C" NOT NULL,
    listing     text COLLATE "C",
    noticed_at  timestamptz NOT NULL DEFAULT now(),
    restored    boolean NOT NULL DEFAULT false,
    PRIMARY KEY (source_id, file_path)
);
COMMENT ON TABLE noticed_keys IS 'Keys that S3''s event notifications named and that no later listing has covered yet.';
COMMENT ON COLUMN noticed_keys.source_id IS 'source of the key';
COMMENT ON COLUMN noticed_keys.file_path IS 'the key: any bytes, as in S3';
COMMENT ON COLUMN noticed_keys.sequencer IS 'sequencer of the latest event, upper-case hexadecimal; '''': none';
COMMENT ON COLUMN noticed_keys.listing IS 'latest listing that began after the latest event; NULL: none';
COMMENT ON COLUMN noticed_keys.noticed_at IS 'first event since the key was last listed';
COMMENT ON COLUMN noticed_keys.restored IS 'whether it came back from cold storage';

CREATE TABLE messages_set_apart (
    source_id     integer NOT NULL REFERENCES sources,
    message_id    text COLLATE "C" NOT NULL,
    body          bytea NOT NULL,
    reason        text NOT NULL,
    set_apart_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source_id, message_id)
);
COMMENT ON TABLE messages_set_apart IS
    'Messages of a queue that are not events of the source''s bucket. They are stored before they are deleted from the '
    'queue.';
COMMENT ON COLUMN messages_set_apart.source_id IS 'source of the queue';
COMMENT ON COLUMN messages_set_apart.message_id IS 'id that the queue gave the message';
COMMENT ON COLUMN messages_set_apart.body IS 'body of the message';
COMMENT ON COLUMN messages_set_apart.reason IS 'why the message was set apart';
COMMENT ON COLUMN messages_set_apart.set_apart_at IS 'when it was set apart';

CREATE TABLE queue_reads (
    source_id  integer PRIMARY KEY REFERENCES sources,
    read_at    timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE queue_reads IS
    'When each source''s queue was last read. A separate table, since a plan locks its source''s row.';
COMMENT ON COLUMN queue_reads.source_id IS 'source of the queue';
COMMENT ON COLUMN queue_reads.read_at IS 'when the queue was last read without an error, or was first to be read';

CREATE TABLE rebuilds (
    source_id  integer PRIMARY KEY REFERENCES sources,
    began_at   timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE rebuilds IS 'Sources that caf rebuild is restoring. They are not planned, so that nothing is paid twice.';
COMMENT ON COLUMN rebuilds.source_id IS 'source that is being restored';
COMMENT ON COLUMN rebuilds.began_at IS 'when the rebuild began';

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
COMMENT ON TABLE replicas IS 'Providers'' copies of chunks, as last checked.';
COMMENT ON COLUMN replicas.caf_file_id IS 'chunk that the provider stores';
COMMENT ON COLUMN replicas.store IS 'store that the provider belongs to';
COMMENT ON COLUMN replicas.provider IS 'the provider''s address on the chain, or its name in another store -> providers.provider';
COMMENT ON COLUMN replicas.proof IS 'proof as the store lists it';
COMMENT ON COLUMN replicas.checked_at IS 'when the copy was last checked';
COMMENT ON COLUMN replicas.listed IS 'whether the store listed it at the last check';
COMMENT ON COLUMN replicas.last_proven IS 'block height of the last proof, or of the provider''s joining; NULL: not known';
COMMENT ON COLUMN replicas.last_window IS 'number of the latest proof window with a verified proof; NULL: none counts';
COMMENT ON COLUMN replicas.windows IS 'proof windows in a row since the last fault';
COMMENT ON COLUMN replicas.fault IS 'what was wrong with its bytes when last checked; else ''''';

-- A run that moves a chunk may delete rows that no longer count (roles.sql).
CREATE TABLE full_reads (
    caf_file_id    bigint NOT NULL,
    store          text COLLATE "C" NOT NULL,
    provider       text NOT NULL,
    read_at        timestamptz NOT NULL DEFAULT now(),
    opened_with    text,
    merkle_root    bytea NOT NULL,
    tail_sha256    bytea,
    agreed_sha256  bytea,
    PRIMARY KEY (caf_file_id, store),
    FOREIGN KEY (caf_file_id, store) REFERENCES chunk_copies
);
COMMENT ON TABLE full_reads IS 'Chunks that a provider returned whole, with the right Merkle root. Only a verifier inserts here.';
COMMENT ON COLUMN full_reads.caf_file_id IS 'chunk that was read';
COMMENT ON COLUMN full_reads.store IS 'store that it was read from';
COMMENT ON COLUMN full_reads.provider IS 'provider that returned the bytes -> providers.provider';
COMMENT ON COLUMN full_reads.read_at IS 'when the last byte was compared';
COMMENT ON COLUMN full_reads.opened_with IS 'public key of the identity that opened it; NULL: only stored bytes were compared';
COMMENT ON COLUMN full_reads.merkle_root IS 'root of the bytes; the read ends with this root';
COMMENT ON COLUMN full_reads.tail_sha256 IS 'of manifest, index and footer among these bytes; NULL: not opened';
COMMENT ON COLUMN full_reads.agreed_sha256 IS 'of the chunk''s rows, sizes and header when this manifest agreed with the rows; NULL: not compared yet';

CREATE TABLE providers (
    provider       text COLLATE "C" PRIMARY KEY,
    upload_rate    double precision,
    download_rate  double precision,
    failures       integer NOT NULL DEFAULT 0,
    failed_at      timestamptz
);
COMMENT ON TABLE providers IS 'Measured rates and failures of providers.';
COMMENT ON COLUMN providers.provider IS 'address on the chain';
COMMENT ON COLUMN providers.upload_rate IS 'bytes a second to the provider; NULL: not measured';
COMMENT ON COLUMN providers.download_rate IS 'bytes a second from the provider; NULL: not measured';
COMMENT ON COLUMN providers.failures IS 'failures since the last success';
COMMENT ON COLUMN providers.failed_at IS 'when the last failure happened; NULL: never';

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
COMMENT ON TABLE transactions IS
    'Signed transactions, written before they are sent. Each belongs to an account and posts any number of chunks.';
COMMENT ON COLUMN transactions.hash IS 'SHA-256 of body in upper-case hexadecimal digits';
COMMENT ON COLUMN transactions.account IS 'account that signs: chain id, slash, address';
COMMENT ON COLUMN transactions.sequence IS 'sequence of the account';
COMMENT ON COLUMN transactions.timeout_height IS 'last block that may include the transaction';
COMMENT ON COLUMN transactions.body IS 'signed bytes; a retry sends the same';
COMMENT ON COLUMN transactions.purpose IS 'post: chunks; buy: storage space';
COMMENT ON COLUMN transactions.cost IS 'ujkl, with the fee';
COMMENT ON COLUMN transactions.cost_told IS 'whether a node reported the cost of a purchase; false: cost is the list price';
COMMENT ON COLUMN transactions.outcome IS 'what became of the transaction; NULL: not known yet';
COMMENT ON COLUMN transactions.created_at IS 'when it was signed';
COMMENT ON COLUMN transactions.settled_at IS 'when the outcome was known; NULL: not known yet';

CREATE TABLE posts (
    caf_file_id    bigint NOT NULL REFERENCES caf_files,
    account        text COLLATE "C" NOT NULL,
    message        bytea NOT NULL,
    charged_bytes  bigint NOT NULL CHECK (charged_bytes >= 0),
    asked_at       timestamptz NOT NULL DEFAULT now(),
    epoch          bigint NOT NULL,
    PRIMARY KEY (caf_file_id, account)
);
COMMENT ON TABLE posts IS
    'Messages that wait for a transaction. A row is deleted when a transaction includes it, or when its chunk needs no '
    'post.';
COMMENT ON COLUMN posts.caf_file_id IS 'chunk that needs a post';
COMMENT ON COLUMN posts.account IS 'account that will sign: chain id, slash, address';
COMMENT ON COLUMN posts.message IS 'message for the transaction';
COMMENT ON COLUMN posts.charged_bytes IS 'space that the chain charges, for all copies together';
COMMENT ON COLUMN posts.asked_at IS 'when the post was requested';
COMMENT ON COLUMN posts.epoch IS 'epoch of the run''s lease on the chunk; the request counts while it is live';

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
COMMENT ON TABLE transaction_posts IS 'Posts of chunks in transactions.';
COMMENT ON COLUMN transaction_posts.hash IS 'transaction that has the post';
COMMENT ON COLUMN transaction_posts.account IS 'account of this transaction';
COMMENT ON COLUMN transaction_posts.position IS 'position of the message in the transaction';
COMMENT ON COLUMN transaction_posts.caf_file_id IS 'chunk that is posted';
COMMENT ON COLUMN transaction_posts.start IS 'height of the block that includes the post; NULL: not included yet';
COMMENT ON COLUMN transaction_posts.live IS
    'whether the post is or may be on the chain; false: it can no longer be, or the chain lost it';

CREATE TABLE chain_heights (
    chain_id  text COLLATE "C" PRIMARY KEY,
    height    bigint NOT NULL
);
COMMENT ON TABLE chain_heights IS 'Greatest block height seen on each chain.';
COMMENT ON COLUMN chain_heights.chain_id IS 'id of the chain';
COMMENT ON COLUMN chain_heights.height IS 'greatest height ever seen; a node below it is stale';

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
COMMENT ON TABLE storage_plans IS 'The last reading of the space and the coins of an account.';
COMMENT ON COLUMN storage_plans.account IS 'chain id, slash, address';
COMMENT ON COLUMN storage_plans.read_at IS 'time of the chain''s latest block at the reading';
COMMENT ON COLUMN storage_plans.balance IS 'coins of the account, in ujkl';
COMMENT ON COLUMN storage_plans.space_bytes IS 'bytes of space, all copies counted; NULL: no plan';
COMMENT ON COLUMN storage_plans.used_bytes IS 'bytes of it that are used; NULL: no plan';
COMMENT ON COLUMN storage_plans.starts_at IS 'when the plan was bought; NULL: no plan, or unknown';
COMMENT ON COLUMN storage_plans.ends_at IS 'when the plan ends; NULL: no plan';
COMMENT ON COLUMN storage_plans.latest_end IS 'latest ends_at since this ledger''s last purchase; NULL: none seen';
COMMENT ON COLUMN storage_plans.latest_end_space IS 'space_bytes at that reading; NULL: none seen';

-- See docs/decisions/0028-older-ledgers.md.
CREATE TABLE store_looks (
    source_id  integer NOT NULL REFERENCES sources,
    account    text COLLATE "C" NOT NULL,
    sequence   bigint NOT NULL CHECK (sequence >= 0),
    unknown    integer NOT NULL CHECK (unknown >= 0),
    looked_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source_id, account)
);
COMMENT ON TABLE store_looks IS
    'The last search of a store for posts that the ledger does not know, e.g. after an older backup was restored.';
COMMENT ON COLUMN store_looks.source_id IS 'source whose posts were listed';
COMMENT ON COLUMN store_looks.account IS 'chain id, slash, address; the owner if the store signs nothing';
COMMENT ON COLUMN store_looks.sequence IS 'sequence of the account before the listing; 0 if the store signs nothing';
COMMENT ON COLUMN store_looks.unknown IS 'posts that the ledger did not know';
COMMENT ON COLUMN store_looks.looked_at IS 'when the posts were listed';

-- It shows whether another ledger uses the account. See
-- docs/decisions/0013-a-first-plan-asks-the-store.md.
CREATE TABLE archive_looks (
    account    text COLLATE "C" PRIMARY KEY,
    sequence   bigint NOT NULL CHECK (sequence >= 0),
    archives   text[] NOT NULL,
    looked_at  timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE archive_looks IS 'The last whole list of the archives of an account.';
COMMENT ON COLUMN archive_looks.account IS 'chain id, slash, address; the owner if the store signs nothing';
COMMENT ON COLUMN archive_looks.sequence IS 'sequence of the account before the listing; 0 if the store signs nothing';
COMMENT ON COLUMN archive_looks.archives IS 'ids of all archives that were listed';
COMMENT ON COLUMN archive_looks.looked_at IS 'when the archives were listed';

CREATE TABLE left_posts (
    source_id    integer NOT NULL REFERENCES sources,
    merkle_root  bytea NOT NULL,
    superseded   boolean NOT NULL,
    left_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source_id, merkle_root)
);
COMMENT ON TABLE left_posts IS 'Posts that are not and need not be chunks of this ledger. They do not stop packing and posting.';
COMMENT ON COLUMN left_posts.source_id IS 'source that was posted';
COMMENT ON COLUMN left_posts.merkle_root IS 'Merkle root of the post';
COMMENT ON COLUMN left_posts.superseded IS 'true: other chunks have all its objects; false: an operator ordered a second copy';
COMMENT ON COLUMN left_posts.left_at IS 'when this was decided';

-- See "Proofs, damage and repair" in docs/how-to/connect-jackal.md.
CREATE TABLE chain_listings (
    store     text PRIMARY KEY,
    next_at   timestamptz NOT NULL,
    whole_at  timestamptz
);
COMMENT ON TABLE chain_listings IS 'Passes of the proof watch through the lists of a store.';
COMMENT ON COLUMN chain_listings.store IS 'name of the store';
COMMENT ON COLUMN chain_listings.next_at IS 'when the next pass may begin';
COMMENT ON COLUMN chain_listings.whole_at IS 'when the last complete pass began; NULL: none was complete';

CREATE TABLE folder_store (
    only_row  boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    id        text NOT NULL CHECK (id ~ '^[0-9a-f]{32}$')
);
COMMENT ON TABLE folder_store IS 'The folder that has the chunks of this ledger, if they are in a folder.';
COMMENT ON COLUMN folder_store.only_row IS 'always true: the table has at most one row';
COMMENT ON COLUMN folder_store.id IS 'id in the folder''s file store-id';

CREATE TABLE orders (
    name        text PRIMARY KEY CHECK (name IN ('paused', 'unverified', 'bandwidth', 'spend_cap')),
    value       text NOT NULL CHECK (value <> ''),
    ordered_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT numbers CHECK (name IN ('paused', 'unverified') OR value ~ '^(-1|[0-9]{1,18})$')
);
COMMENT ON TABLE orders IS 'Orders of the operator. Without an order the settings apply.';
COMMENT ON COLUMN orders.name IS 'what the operator ordered';
COMMENT ON COLUMN orders.value IS 'why everything is paused or not verified; bytes a second, 0: no limit; ujkl, -1: no cap';
COMMENT ON COLUMN orders.ordered_at IS 'when it was ordered';
