-- Locations in 283 bytes where they took 408 (keys of 57). See docs/decisions/0027-narrow-locations.md.
--
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

LOCK TABLE file_locations IN ACCESS EXCLUSIVE MODE;
SET LOCAL synchronize_seqscans = off;  -- rows of a chunk stay together

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

-- Eight columns, of which the widest come first: so a row has 24 bytes of header, also where one is NULL, and none between them.
CREATE TABLE locations (
    start_byte      bigint NOT NULL,                  -- CAF coordinates
    last_modified   timestamptz NOT NULL,
    source_id       integer NOT NULL,
    caf_file_id     integer NOT NULL,
    file_path       text COLLATE "C" NOT NULL,
    identity        bytea NOT NULL,
    sha256          bytea NOT NULL,
    content         bytea CONSTRAINT version_id_is_object_version CHECK (content <> '')
);
INSERT INTO locations
SELECT start_byte, last_modified, source_id, caf_file_id, file_path, location_identity(object_version, part), sha256,
    location_content(object_version, part, version_id, etag, end_byte - start_byte)
FROM file_locations;
-- Beside the one by chunk the only index: a look-up of a key reads its few versions.
ALTER TABLE locations ADD PRIMARY KEY (source_id, file_path, identity);
CREATE INDEX locations_by_chunk ON locations USING brin (caf_file_id);

DROP VIEW objects_in_parts;
DROP TABLE file_locations;

-- The same, to be read as before. What is asked for one object version asks `locations` for its identity, which is in the index.
CREATE VIEW file_locations AS
SELECT source_id, file_path, location_version(identity) COLLATE "C" AS object_version, location_part(identity) AS part, caf_file_id,
    start_byte, start_byte + location_size(identity, content) AS end_byte,
    location_version_id(identity, content) AS version_id, location_etag(identity, content) AS etag,
    last_modified, sha256
FROM locations;

-- As before (sql/0009), by identity.
CREATE VIEW objects_in_parts AS
SELECT DISTINCT ON (source_id, file_path, object_version) *
FROM (
    SELECT parts.source_id, parts.file_path, parts.object_version, parts.plan_id, parts.part_count,
        parts.object_bytes AS size_bytes, min(located.etag) AS etag, min(located.version_id) AS version_id,
        max(located.last_modified) AS last_modified, max(caf_files.located_at) AS located_at,
        (array_agg(parts.caf_file_id ORDER BY parts.part))[1] AS caf_file_id,
        jsonb_agg(jsonb_build_object(
            'start_byte', located.start_byte, 'end_byte', located.end_byte, 'sha256', encode(located.sha256, 'hex'),
            'chunk', caf_files.name, 'merkle_root', encode(caf_files.merkle_root, 'hex'), 'owner', caf_files.owner,
            'start', caf_files.start, 'stored_size_bytes', caf_files.stored_size_bytes) ORDER BY parts.part) AS parts
    FROM object_parts AS parts
    JOIN caf_files ON caf_files.caf_file_id = parts.caf_file_id AND caf_files.state IN ('located', 'damaged')
    CROSS JOIN LATERAL (
        SELECT start_byte, start_byte + location_size(identity, content) AS end_byte, last_modified, sha256,
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

ANALYZE locations;
