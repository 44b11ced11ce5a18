-- Sources that are being restored from what the store lists: what is not restored yet must not be planned, and paid for, again.
CREATE TABLE rebuilds (
    source_id  integer PRIMARY KEY REFERENCES sources,
    began_at   timestamptz NOT NULL DEFAULT now()
);

-- Of an object that came back from cold storage: a chunk that is packed meanwhile may still skip it.
ALTER TABLE noticed_keys ADD COLUMN restored boolean NOT NULL DEFAULT false;

-- What is known of keys, as in 0010; a skip that a whole inventory has ended, since it does not list the object, is history: it hid
-- that an older version is the current one again.
CREATE OR REPLACE FUNCTION look_up(source text, keys text[], good_states text[]) RETURNS TABLE (
    told                text,         -- 'location'; 'exception': what is current from `moment` on; 'pending': claimed, or skipped
    key                 text,
    object_version      text,         -- of an exception NULL: the key is gone
    moment              timestamptz,  -- LastModified; of an exception, since when
    chunk               text,         -- NULL of what is skipped
    state               text,         -- of the chunk; of what is skipped, the reason
    inventory           text,         -- by which it was planned; of an exception, whose statement it is
    version_id          text,         -- from here on of locations only
    start_byte          bigint,
    end_byte            bigint,
    etag                text,
    sha256              bytea,
    merkle_root         bytea,
    owner               text,
    start               bigint,
    stored_size_bytes   bigint,
    parts               jsonb         -- of objects_in_parts, else NULL
) LANGUAGE plpgsql STABLE
-- One plan for any number of keys, which reads no table from its beginning, also where the first plan was made of empty tables.
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    own integer := (SELECT source_id FROM sources WHERE name = source);
BEGIN
    RETURN QUERY SELECT 'location', file_path, object_version, last_modified, caf_files.name, state, snapshot, version_id, start_byte,
            end_byte, etag, file_locations.sha256, merkle_root, owner, caf_files.start, stored_size_bytes, NULL::jsonb
        FROM file_locations JOIN caf_files USING (caf_file_id) JOIN plans USING (plan_id)
        WHERE file_locations.source_id = own AND file_path = ANY (keys) AND part = 0 AND state = ANY (good_states);
    IF EXISTS (SELECT FROM object_parts WHERE source_id = own AND file_path = ANY (keys)) THEN
        RETURN QUERY SELECT 'location', file_path, object_version, last_modified, caf_files.name, state, snapshot, version_id, 0::bigint,
                size_bytes, etag, ''::bytea, merkle_root, owner, caf_files.start, stored_size_bytes, parts
            FROM objects_in_parts AS whole JOIN caf_files USING (caf_file_id) JOIN plans ON plans.plan_id = whole.plan_id
            WHERE whole.source_id = own AND file_path = ANY (keys);
    END IF;
    RETURN QUERY SELECT known.*, NULL, NULL::bigint, NULL::bigint, NULL, NULL::bytea, NULL::bytea, NULL, NULL::bigint, NULL::bigint,
            NULL::jsonb
        FROM (
            (SELECT DISTINCT ON (file_path) 'exception', file_path, object_version, stated_at, NULL, NULL, inventory
                FROM current_exceptions WHERE source_id = own AND file_path = ANY (keys) ORDER BY file_path, stated_at DESC)
            UNION ALL
            SELECT 'pending', file_path, object_version, last_modified, name, state, NULL
                FROM claims JOIN caf_files USING (caf_file_id) WHERE claims.source_id = own AND file_path = ANY (keys)
            UNION ALL
            SELECT 'pending', file_path, object_version, last_modified, NULL, reason, NULL
                FROM skipped_objects WHERE source_id = own AND file_path = ANY (keys)
                    AND (reason = 'waiting' OR retry_at > least(now(), coalesce((SELECT max(taken_at) FROM inventories
                        WHERE inventories.source_id = own AND after_key = '' AND until_key IS NULL), '-infinity')))
        ) AS known;
END $$;
