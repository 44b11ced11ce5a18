-- Views and functions.

-- The text that identifies an object besides its key: the version id, or `etag:<ETag>:<size>` in a
-- bucket without versions, with the time of a rewrite at the end. inventory/objects.py makes the
-- same text.
CREATE FUNCTION object_version(version_id text, etag text, size_bytes bigint, rewritten_at timestamptz) RETURNS text
    LANGUAGE sql STABLE PARALLEL SAFE RETURN
    CASE WHEN version_id <> '' THEN version_id
        WHEN isfinite(rewritten_at) THEN 'etag:' || etag || ':' || size_bytes::text || ':'
            || to_char(rewritten_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
        ELSE 'etag:' || etag || ':' || size_bytes::text END;

-- The id of a header set's texts: inventory/headers.py makes the same.
CREATE FUNCTION header_set_id(content_type text, content_encoding text, content_language text, content_disposition text,
    cache_control text, expires text, user_metadata jsonb) RETURNS bytea
    LANGUAGE sql STABLE PARALLEL SAFE RETURN
    substring(sha256(
        convert_to(content_type, 'UTF8') || '\x00' || convert_to(content_encoding, 'UTF8') || '\x00'
        || convert_to(content_language, 'UTF8') || '\x00' || convert_to(content_disposition, 'UTF8') || '\x00'
        || convert_to(cache_control, 'UTF8') || '\x00' || convert_to(expires, 'UTF8') || '\x00'
        || CASE user_metadata WHEN '{}' THEN '' ELSE (
            SELECT string_agg(convert_to(key, 'UTF8') || '\x00' || convert_to(value, 'UTF8') || '\x00', '' ORDER BY key COLLATE "C")
            FROM jsonb_each_text(user_metadata)) END
    ) FOR 16);

-- Chunks with their copies. `state` is the state of chunk_state.py, which combines both.
-- `chunk_state` and `copy_state` are the stored columns.
CREATE VIEW chunks AS
SELECT caf_file_id, caf_files.name, source_id, plan_id, number,
    CASE WHEN caf_files.state = 'sealed' AND copies.state <> 'wanted' OR caf_files.state = 'located' AND copies.state <> 'verified'
        THEN copies.state ELSE caf_files.state END AS state,
    caf_files.state AS chunk_state, copies.state AS copy_state, store, header IS NOT NULL AS encrypted,
    CASE WHEN caf_files.state = 'located' THEN damage ELSE reason END AS reason, epoch, attempts, failures,
    object_count, object_bytes, expected_size_bytes, caf_size_bytes, stored_size_bytes, member_count, member_bytes, skipped_count,
    released_count, merkle_root, proof_type, owner, start, samples, unread, tail_start, tail_sha256, has_log_times, created_at,
    caf_files.updated_at, sealed_at, posted_at, verified_at, located_at, restored_at, adopted_at, checked_at, look_again_at,
    suspected_at, unanswered_at, from_unknown_post
FROM caf_files LEFT JOIN chunk_copies AS copies USING (caf_file_id);

-- Refuses, at the end of a transaction, states of a chunk and its copies that no move of
-- chunk_state.py makes.
CREATE FUNCTION require_copies() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    chunk record;
    copies text[];
    are_legal boolean;
BEGIN
    SELECT name, state INTO chunk FROM caf_files WHERE caf_file_id = coalesce(NEW.caf_file_id, OLD.caf_file_id);
    copies := ARRAY(SELECT state FROM chunk_copies WHERE caf_file_id = coalesce(NEW.caf_file_id, OLD.caf_file_id));
    are_legal := CASE
        WHEN chunk.state IN ('planned', 'packing', 'empty') THEN copies = '{}'
        WHEN chunk.state = 'sealed' THEN copies <> '{}' AND copies <@ '{wanted,posting,posted,uploading,verified}'
        WHEN chunk.state = 'located' THEN copies <> '{}' AND copies <@ '{verified,damaged,expired}'
        WHEN chunk.state = 'parked' THEN copies <@ '{wanted,posting,posted,uploading,verified}'
        WHEN chunk.state = 'withdrawn' THEN copies <@ '{retired}'
        WHEN chunk.state = 'abandoned' THEN copies = '{retired}'
        ELSE true END;  -- the chunk was removed
    IF NOT are_legal THEN
        RAISE check_violation USING MESSAGE = format('chunk %s is ''%s'', and its copies are %s', chunk.name, chunk.state, copies),
            TABLE = 'caf_files';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER has_its_copies AFTER UPDATE OF state ON caf_files DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION require_copies();
-- Chunks of a plan are many and have no copies.
CREATE CONSTRAINT TRIGGER begins_with_its_copies AFTER INSERT ON caf_files DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.state <> 'planned') EXECUTE FUNCTION require_copies();
CREATE CONSTRAINT TRIGGER is_of_its_chunk AFTER INSERT OR UPDATE OF caf_file_id, state OR DELETE ON chunk_copies
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION require_copies();

-- Every move that ends a packing deletes its secret.
CREATE FUNCTION forget_packing_secret() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM packing_secrets WHERE caf_file_id = NEW.caf_file_id;
    RETURN NULL;
END $$;
CREATE TRIGGER ends_its_packing AFTER UPDATE OF state ON caf_files FOR EACH ROW
    WHEN (OLD.state <> NEW.state AND NEW.state NOT IN ('planned', 'packing', 'parked'))
    EXECUTE FUNCTION forget_packing_secret();

-- Counts the rows of whole objects by chunk, whoever changes them: a plan exports a chunk again if its number of rows or its row_set
-- differs from that of the kept file. Of a load's INSERT this takes a tenth of the time. An UPDATE keeps row_set: only the doctor
-- notices changed columns of a row. Two loads may replace rows of the same ended chunks: the locks in one order prevent a deadlock.
CREATE FUNCTION count_rows() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        UPDATE caf_files SET row_count = 0, row_set = gen_random_uuid() WHERE row_count <> 0;
        RETURN NULL;
    END IF;
    IF TG_OP <> 'INSERT' THEN
        PERFORM FROM caf_files WHERE caf_file_id IN (SELECT caf_file_id FROM old_rows) ORDER BY caf_file_id FOR NO KEY UPDATE;
        UPDATE caf_files SET row_count = row_count - removed.rows,
            row_set = CASE TG_OP WHEN 'DELETE' THEN gen_random_uuid() ELSE row_set END
        FROM (SELECT caf_file_id, count(*) AS rows FROM old_rows WHERE part = 0 GROUP BY caf_file_id) AS removed
        WHERE caf_files.caf_file_id = removed.caf_file_id;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        UPDATE caf_files SET row_count = row_count + added.rows,
            row_set = CASE TG_OP WHEN 'INSERT' THEN gen_random_uuid() ELSE row_set END
        FROM (SELECT caf_file_id, count(*) AS rows FROM new_rows WHERE part = 0 GROUP BY caf_file_id) AS added
        WHERE caf_files.caf_file_id = added.caf_file_id;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER counts_inserted AFTER INSERT ON file_locations REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION count_rows();
CREATE TRIGGER counts_updated AFTER UPDATE ON file_locations REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION count_rows();
CREATE TRIGGER counts_deleted AFTER DELETE ON file_locations REFERENCING OLD TABLE AS old_rows
    FOR EACH STATEMENT EXECUTE FUNCTION count_rows();
CREATE TRIGGER counts_none AFTER TRUNCATE ON file_locations FOR EACH STATEMENT EXECUTE FUNCTION count_rows();
-- Also if session_replication_role is replica.
ALTER TABLE file_locations ENABLE ALWAYS TRIGGER counts_inserted, ENABLE ALWAYS TRIGGER counts_updated,
    ENABLE ALWAYS TRIGGER counts_deleted, ENABLE ALWAYS TRIGGER counts_none;

-- Objects archived in parts: every part of one plan is located, in a chunk in good standing, and
-- the parts cover the object without gaps. Only this view decides that such an object is located.
-- `caf_file_id` is the first part's. LATERAL with LIMIT: one lookup a part, even without statistics
-- on a table that is mostly empty.
CREATE VIEW objects_in_parts AS
SELECT DISTINCT ON (source_id, file_path, version_id, etag, size_bytes, rewritten_at) *
FROM (
    SELECT parts.source_id, parts.file_path, parts.version_id, parts.etag, parts.object_bytes AS size_bytes, parts.rewritten_at,
        parts.plan_id, parts.part_count,
        max(located.last_modified) AS last_modified, max(chunks.located_at) AS located_at,
        bool_or(chunks.from_unknown_post) AS from_unknown_post,
        (array_agg(parts.caf_file_id ORDER BY parts.part))[1] AS caf_file_id,
        (array_agg(located.header_set ORDER BY parts.part))[1] AS header_set,
        jsonb_agg(jsonb_build_object(
            'start_byte', located.start_byte, 'end_byte', located.end_byte, 'sha256', encode(located.sha256, 'hex'),
            'crc64nvme', encode(located.crc64nvme, 'hex'), 's3_checksum', located.s3_checksum,
            'chunk', chunks.name, 'merkle_root', encode(chunks.merkle_root, 'hex'), 'owner', chunks.owner,
            'start', chunks.start, 'stored_size_bytes', chunks.stored_size_bytes) ORDER BY parts.part) AS parts
    FROM object_parts AS parts
    JOIN chunks ON chunks.caf_file_id = parts.caf_file_id AND chunks.state IN ('located', 'damaged')
    CROSS JOIN LATERAL (
        SELECT * FROM file_locations AS rows
        WHERE rows.source_id = parts.source_id AND rows.file_path = parts.file_path AND rows.version_id = parts.version_id
            AND rows.etag = parts.etag AND rows.size_bytes = parts.object_bytes AND rows.rewritten_at = parts.rewritten_at
            AND rows.part = parts.location_part AND rows.caf_file_id = parts.caf_file_id
            AND rows.end_byte - rows.start_byte = parts.end_byte - parts.start_byte
        LIMIT 1) AS located
    WHERE NOT parts.abandoned
    GROUP BY parts.source_id, parts.file_path, parts.version_id, parts.etag, parts.object_bytes, parts.rewritten_at, parts.plan_id,
        parts.part_count
    HAVING count(*) = parts.part_count AND min(parts.start_byte) = 0 AND max(parts.end_byte) = parts.object_bytes
        AND (array_agg(parts.start_byte ORDER BY parts.part))[2:] = (array_agg(parts.end_byte ORDER BY parts.part))[:count(*) - 1]
) AS whole
ORDER BY source_id, file_path, version_id, etag, size_bytes, rewritten_at, from_unknown_post, plan_id;

-- The time of the latest planned whole inventory of each source.
CREATE VIEW last_whole_inventories AS
SELECT source_id, max(taken_at) AS taken_at FROM inventories WHERE after_key = '' AND until_key IS NULL GROUP BY source_id;

-- Objects that are skipped now. The plan of a whole inventory claims each of its objects that is
-- due again, and makes objects due that it does not list. A row due since before that inventory is
-- history: the object was deleted or overwritten. The join begins with sources, so that the planner
-- finds a source's time once. Beginning with skipped_objects, a count of 10^6 rows took a fifth
-- longer.
CREATE VIEW current_skips AS
SELECT skipped_objects.* FROM sources LEFT JOIN last_whole_inventories USING (source_id) JOIN skipped_objects USING (source_id)
WHERE reason <> 'waiting' AND retry_at > least(coalesce(taken_at, '-infinity'), now());

-- Chunks whose object counts with another chunk. An object in several chunks counts with the last
-- that is not archived, or with its last chunk if all are archived. Abandoned parts belong to no
-- object. LATERAL with LIMIT: see objects_in_parts.
CREATE FUNCTION counted_elsewhere(source_names text[]) RETURNS TABLE (caf_file_id bigint) LANGUAGE sql STABLE AS $$
    SELECT caf_file_id FROM (
        SELECT parts.caf_file_id, abandoned OR row_number() OVER (
            PARTITION BY plan_id, file_path, version_id, etag, object_bytes, rewritten_at
            ORDER BY own.state IN ('located', 'damaged'), part DESC) > 1 AS is_elsewhere
        FROM object_parts AS parts
        CROSS JOIN LATERAL (SELECT state FROM chunks WHERE chunks.caf_file_id = parts.caf_file_id LIMIT 1) AS own
        WHERE source_id IN (SELECT source_id FROM sources WHERE name = ANY(source_names))) AS counted
    WHERE is_elsewhere
$$;

-- Claims on objects that are newer than a located object of their key. LATERAL with LIMIT: see objects_in_parts.
CREATE VIEW newer_claims AS
SELECT claims.source_id, claims.file_path, claims.last_modified, claims.caf_file_id, plans.snapshot,
    object_version(claims.version_id, claims.etag, claims.size_bytes, claims.rewritten_at) AS object_version
FROM claims JOIN caf_files AS own ON own.caf_file_id = claims.caf_file_id JOIN plans ON plans.plan_id = own.plan_id
CROSS JOIN LATERAL (
    SELECT FROM file_locations AS archived JOIN chunks ON chunks.caf_file_id = archived.caf_file_id
    WHERE archived.source_id = claims.source_id AND archived.file_path = claims.file_path
        AND archived.last_modified < claims.last_modified AND chunks.state IN ('located', 'damaged')
    LIMIT 1) AS archived;

-- Claims, with the name and state of a chunk that still has work to do. The chunk of a claim holds the
-- first part of an object in parts, and may be located before the other parts are. A parked chunk
-- comes first: it needs an operator.
CREATE VIEW claims_under_way AS
SELECT claims.*, under_way.name, under_way.state
FROM claims LEFT JOIN object_parts AS own USING (caf_file_id)
CROSS JOIN LATERAL (
    SELECT name, state FROM chunks WHERE chunks.caf_file_id = ANY (ARRAY(
        SELECT claims.caf_file_id UNION
        SELECT caf_file_id FROM object_parts AS parts WHERE parts.plan_id = own.plan_id AND parts.file_path = own.file_path
            AND parts.version_id = own.version_id AND parts.etag = own.etag AND parts.object_bytes = own.object_bytes
            AND parts.rewritten_at = own.rewritten_at))
    ORDER BY state IN ('located', 'damaged'), state <> 'parked', caf_file_id LIMIT 1) AS under_way;

-- Returns the rows of keys, at the moment of the statement. A function, since its statements are
-- planned once for a connection, even behind a pooler; planning takes longer than answering. A skip
-- that a whole inventory ended, since it does not list the object, is history.
CREATE FUNCTION look_up(source text, keys text[], good_states text[]) RETURNS TABLE (
    kind                text,         -- 'location'; 'exception': the current object from `moment` on; 'pending': claimed or skipped
    key                 text,
    object_version      text,         -- NULL in an exception: the key is gone
    moment              timestamptz,  -- LastModified; of an exception, its time
    chunk               text,         -- NULL if skipped
    state               text,         -- of the chunk; the reason if skipped
    inventory           text,         -- that planned the object, or states the exception
    version_id          text,         -- from here on for locations only
    start_byte          bigint,
    end_byte            bigint,
    etag                text,
    sha256              bytea,
    merkle_root         bytea,
    owner               text,
    start               bigint,
    stored_size_bytes   bigint,
    parts               jsonb,        -- of objects_in_parts, else NULL
    header_set          bytea,        -- NULL: not known
    from_unknown_post   boolean
) LANGUAGE plpgsql STABLE
-- One plan for any number of keys, which scans no table from its start, even if it was made on
-- empty tables.
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    own integer := (SELECT source_id FROM sources WHERE name = source);
BEGIN
    RETURN QUERY SELECT 'location', file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified,
            chunks.name, state, snapshot, nullif(version_id, ''), start_byte, end_byte, etag, file_locations.sha256,
            merkle_root, owner, chunks.start, stored_size_bytes, NULL::jsonb, header_set, from_unknown_post
        FROM file_locations JOIN chunks USING (caf_file_id) JOIN plans USING (plan_id)
        WHERE file_locations.source_id = own AND file_path = ANY (keys) AND part = 0 AND state = ANY (good_states);
    IF EXISTS (SELECT FROM object_parts WHERE source_id = own AND file_path = ANY (keys)) THEN
        RETURN QUERY SELECT 'location', file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified,
                chunks.name, state, snapshot, nullif(version_id, ''), 0::bigint, size_bytes, etag, ''::bytea, merkle_root,
                owner, chunks.start, stored_size_bytes, parts, header_set, whole.from_unknown_post
            FROM objects_in_parts AS whole JOIN chunks USING (caf_file_id) JOIN plans ON plans.plan_id = whole.plan_id
            WHERE whole.source_id = own AND file_path = ANY (keys);
    END IF;
    -- Most keys have neither. These checks take a tenth of the time in which the union's scans start.
    IF EXISTS (SELECT FROM current_exceptions WHERE source_id = own AND file_path = ANY (keys))
        OR EXISTS (SELECT FROM claims WHERE source_id = own AND file_path = ANY (keys))
        OR EXISTS (SELECT FROM skipped_objects WHERE source_id = own AND file_path = ANY (keys)) THEN
        RETURN QUERY SELECT known.*, NULL, NULL::bigint, NULL::bigint, NULL, NULL::bytea, NULL::bytea, NULL, NULL::bigint, NULL::bigint,
                NULL::jsonb, NULL::bytea, NULL::boolean
            FROM (
                (SELECT DISTINCT ON (file_path) 'exception', file_path, object_version, stated_at, NULL, NULL, inventory
                    FROM current_exceptions WHERE source_id = own AND file_path = ANY (keys) ORDER BY file_path, stated_at DESC)
                UNION ALL
                SELECT 'pending', file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified, name, state, NULL
                    FROM claims_under_way WHERE source_id = own AND file_path = ANY (keys)
                UNION ALL
                SELECT 'pending', file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified, NULL, reason, NULL
                    FROM skipped_objects WHERE source_id = own AND file_path = ANY (keys)
                        AND (reason = 'waiting' OR retry_at > least(now(), coalesce((SELECT max(taken_at) FROM inventories
                            WHERE inventories.source_id = own AND after_key = '' AND until_key IS NULL), '-infinity')))
            ) AS known;
    END IF;
END $$;
