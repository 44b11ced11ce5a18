-- What is current in the bucket, where that is not what LastModified tells. See "Which objects are to be archived" in
-- docs/design.md.

-- Inventories that were planned. The counts are of located objects, as of this inventory; NULL before they were counted.
CREATE TABLE inventories (
    source_id        integer NOT NULL REFERENCES sources,
    name             text COLLATE "C" NOT NULL,       -- the snapshot's
    taken_at         timestamptz NOT NULL,            -- by S3's clock, before the first page was asked for
    after_key        bytea NOT NULL,                  -- the inventory has keys greater than this
    until_key        bytea,                           -- up to and including this; NULL: all
    current_objects  bigint,                          -- listed, and located
    older_objects    bigint,                          -- located, and their key is listed with another content
    gone_objects     bigint,                          -- located, and their key is not listed
    counted_at       timestamptz,
    PRIMARY KEY (source_id, name)
);
CREATE INDEX inventories_by_time ON inventories (source_id, taken_at);

-- At this time the bucket had this identity of the key as its current one, whatever the locations' LastModified say. No foreign
-- keys, for the reasons that claims have none.
CREATE TABLE current_exceptions (
    source_id       integer NOT NULL,
    file_path       text COLLATE "C" NOT NULL,
    stated_at       timestamptz NOT NULL,             -- an inventory's taken_at; never before a LastModified known then
    object_version  text COLLATE "C",                 -- NULL: the key is gone
    inventory       text COLLATE "C" NOT NULL,        -- whose statement it is
    last_modified   timestamptz,                      -- headers of this LastModified were compared, and are those archived
    PRIMARY KEY (source_id, file_path, stated_at)
);

-- NULL where 0.3.0 or earlier wrote the row.
ALTER TABLE claims ADD COLUMN last_modified timestamptz;
ALTER TABLE skipped_objects ADD COLUMN last_modified timestamptz;

-- The manifest, index and footer of a sealed chunk: what a provider gives of them is compared with this. NULL where 0.3.0 or
-- earlier sealed the chunk, or it was rebuilt.
ALTER TABLE caf_files ADD COLUMN tail_start bigint;
ALTER TABLE caf_files ADD COLUMN tail_sha256 bytea;
