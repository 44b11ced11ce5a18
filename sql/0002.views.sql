-- Views and functions.

-- `identity` is the object version and the part. It begins with a byte that tells its form:
--     00 <part> <text>                 any part but 0, in four bytes, and the object version
--     01 <text>                        any object version of part 0 that has no form below
--     02 <ETag> <size>                 etag:<32 hexadecimal digits>:<size>, of part 0: the digits in 16 bytes, the size in as many
--                                      bytes as its decimal digits need, two in each
--     03 <ETag> <parts> <size>         etag:<32 hexadecimal digits>-<parts>:<size>, of part 0: the same, <parts> in three bytes
-- A version and part have one form only, so that the key is unique as it was, by source, path, version and part.
--
-- `content` is the ETag and the length, written as the identity of etag:<ETag>:<length>; 16 is added to its first byte where there
-- is a version id, which is the object version. It is NULL where there is none and it would be the same as `identity`.

-- Each is one expression, which takes the place of its call in a plan. So none is STRICT, and they are STABLE, as convert_from is.
-- Numbers have at most 18 digits, and of parts 6. Lengths are compared outside of the patterns: a count in one makes it five times
-- as slow.
CREATE FUNCTION location_identity(object_version text, part integer) RETURNS bytea LANGUAGE sql STABLE PARALLEL SAFE RETURN
    CASE WHEN part <> 0 THEN '\x00'::bytea || int4send(part) || convert_to(object_version, 'UTF8')
        WHEN substr(object_version, 38, 1) = ':' AND length(object_version) <= 56
            AND object_version ~ '^etag:[0-9a-f]+:(0|[1-9][0-9]*)$' THEN
            decode('02' || substr(object_version, 6, 32) || repeat('0', length(object_version) % 2) || substr(object_version, 39), 'hex')
        WHEN substr(object_version, 38, 1) = '-' AND length(split_part(substr(object_version, 39), ':', 1)) <= 6
            AND length(split_part(object_version, ':', 3)) <= 18
            AND object_version ~ '^etag:[0-9a-f]+-[1-9][0-9]*:(0|[1-9][0-9]*)$' THEN
            decode('03' || substr(object_version, 6, 32) || lpad(split_part(substr(object_version, 39), ':', 1), 6, '0')
                || repeat('0', length(split_part(object_version, ':', 3)) % 2) || split_part(object_version, ':', 3), 'hex')
        ELSE '\x01'::bytea || convert_to(object_version, 'UTF8') END;

-- Empty, which the table refuses, where the version id is another than the object version: no software of ours made such a row.
CREATE FUNCTION location_content(object_version text, part integer, version_id text, etag text, size_bytes bigint) RETURNS bytea
    LANGUAGE sql STABLE PARALLEL SAFE RETURN
    CASE WHEN version_id IS NULL AND part = 0 AND object_version = 'etag:' || etag || ':' || size_bytes::text THEN NULL
        WHEN version_id IS NULL THEN location_identity('etag:' || etag || ':' || size_bytes::text, 0)
        WHEN version_id = object_version THEN set_byte(location_identity('etag:' || etag || ':' || size_bytes::text, 0), 0,
            get_byte(location_identity('etag:' || etag || ':' || size_bytes::text, 0), 0) + 16)
        ELSE '' END;

CREATE FUNCTION location_version(identity bytea) RETURNS text LANGUAGE sql STABLE PARALLEL SAFE RETURN
    CASE get_byte(identity, 0)
        WHEN 2 THEN 'etag:' || encode(substr(identity, 2, 16), 'hex') || ':' || encode(substr(identity, 18), 'hex')::bigint::text
        WHEN 3 THEN 'etag:' || encode(substr(identity, 2, 16), 'hex') || '-' || encode(substr(identity, 18, 3), 'hex')::bigint::text
            || ':' || encode(substr(identity, 21), 'hex')::bigint::text
        WHEN 1 THEN convert_from(substr(identity, 2), 'UTF8')
        ELSE convert_from(substr(identity, 6), 'UTF8') END;

CREATE FUNCTION location_part(identity bytea) RETURNS integer LANGUAGE sql STABLE PARALLEL SAFE RETURN
    CASE get_byte(identity, 0) WHEN 0 THEN ('x' || encode(substr(identity, 2, 4), 'hex'))::bit(32)::integer ELSE 0 END;

CREATE FUNCTION location_version_id(identity bytea, content bytea) RETURNS text LANGUAGE sql STABLE PARALLEL SAFE RETURN
    CASE WHEN get_byte(content, 0) >= 16 THEN location_version(identity) END;

CREATE FUNCTION location_etag(identity bytea, content bytea) RETURNS text LANGUAGE sql STABLE PARALLEL SAFE RETURN
    CASE get_byte(coalesce(content, identity), 0) & 15
        WHEN 2 THEN encode(substr(coalesce(content, identity), 2, 16), 'hex')
        WHEN 3 THEN encode(substr(coalesce(content, identity), 2, 16), 'hex')
            || '-' || encode(substr(coalesce(content, identity), 18, 3), 'hex')::bigint::text
        ELSE substring(convert_from(substr(coalesce(content, identity), 2), 'UTF8') FROM '^etag:(.*):') END;

CREATE FUNCTION location_size(identity bytea, content bytea) RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE RETURN
    CASE get_byte(coalesce(content, identity), 0) & 15
        WHEN 2 THEN encode(substr(coalesce(content, identity), 18), 'hex')
        WHEN 3 THEN encode(substr(coalesce(content, identity), 21), 'hex')
        ELSE substring(convert_from(substr(coalesce(content, identity), 2), 'UTF8') FROM '[^:]*$') END::bigint;

CREATE VIEW file_locations AS
SELECT source_id, file_path, location_version(identity) COLLATE "C" AS object_version, location_part(identity) AS part, caf_file_id,
    start_byte, start_byte + location_size(identity, content) AS end_byte,
    location_version_id(identity, content) AS version_id, location_etag(identity, content) AS etag,
    last_modified, sha256, crc64nvme, s3_checksum
FROM locations;

-- The objects that are archived in parts: every part of one plan is located, in a chunk in good standing, and they follow each other
-- from the object's first byte to its last. Nothing else says that such an object is located. `caf_file_id` is the first part's.
-- LATERAL with LIMIT: one look-up a part, whatever the planner knows of a table that is mostly empty.
CREATE VIEW objects_in_parts AS
SELECT DISTINCT ON (source_id, file_path, object_version) *
FROM (
    SELECT parts.source_id, parts.file_path, parts.object_version, parts.plan_id, parts.part_count,
        parts.object_bytes AS size_bytes, min(located.etag) AS etag, min(located.version_id) AS version_id,
        max(located.last_modified) AS last_modified, max(caf_files.located_at) AS located_at,
        (array_agg(parts.caf_file_id ORDER BY parts.part))[1] AS caf_file_id,
        jsonb_agg(jsonb_build_object(
            'start_byte', located.start_byte, 'end_byte', located.end_byte, 'sha256', encode(located.sha256, 'hex'),
            'crc64nvme', encode(located.crc64nvme, 'hex'), 's3_checksum', located.s3_checksum,
            'chunk', caf_files.name, 'merkle_root', encode(caf_files.merkle_root, 'hex'), 'owner', caf_files.owner,
            'start', caf_files.start, 'stored_size_bytes', caf_files.stored_size_bytes) ORDER BY parts.part) AS parts
    FROM object_parts AS parts
    JOIN caf_files ON caf_files.caf_file_id = parts.caf_file_id AND caf_files.state IN ('located', 'damaged')
    CROSS JOIN LATERAL (
        SELECT start_byte, start_byte + location_size(identity, content) AS end_byte, last_modified, sha256, crc64nvme, s3_checksum,
            location_etag(identity, content) AS etag, location_version_id(identity, content) AS version_id
        FROM locations AS rows
        WHERE rows.source_id = parts.source_id AND rows.file_path = parts.file_path
            AND rows.identity = location_identity(parts.object_version, parts.location_part)
            AND rows.caf_file_id = parts.caf_file_id AND location_size(identity, content) = parts.end_byte - parts.start_byte
        LIMIT 1) AS located
    WHERE NOT parts.abandoned
    GROUP BY parts.source_id, parts.file_path, parts.object_version, parts.plan_id, parts.part_count, parts.object_bytes
    HAVING count(*) = parts.part_count AND min(parts.start_byte) = 0 AND max(parts.end_byte) = parts.object_bytes
        AND (array_agg(parts.start_byte ORDER BY parts.part))[2:] = (array_agg(parts.end_byte ORDER BY parts.part))[:count(*) - 1]
        AND min(located.etag) = max(located.etag)
        AND min(coalesce(located.version_id, '')) = max(coalesce(located.version_id, ''))
) AS whole
ORDER BY source_id, file_path, object_version, plan_id;

-- What is known of keys, all at the moment of the statement that asks. A function, because its statements are planned once for a
-- connection, also behind a pooler, and planning them takes longer than answering them. A skip that a whole inventory has ended, since it
-- does not list the object, is history.
CREATE FUNCTION look_up(source text, keys text[], good_states text[]) RETURNS TABLE (
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
