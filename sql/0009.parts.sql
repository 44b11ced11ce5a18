-- Objects that are larger than a chunk: which part of one a chunk has. See docs/decisions/0020-objects-over-several-chunks.md.

-- A chunk has one part and nothing else. All parts of an object are in chunks of one plan; planned again after that was abandoned,
-- they are in chunks of another. No row is ever deleted.
CREATE TABLE object_parts (
    caf_file_id     bigint PRIMARY KEY REFERENCES caf_files,
    plan_id         bigint NOT NULL REFERENCES plans,
    source_id       integer NOT NULL REFERENCES sources,
    file_path       text COLLATE "C" NOT NULL,
    object_version  text COLLATE "C" NOT NULL,
    part            integer NOT NULL,                 -- from 1
    part_count      integer NOT NULL,
    start_byte      bigint NOT NULL,                  -- of the object
    end_byte        bigint NOT NULL,                  -- exclusive
    object_bytes    bigint NOT NULL,                  -- of all parts
    location_part   integer NOT NULL,                 -- `part` of its row in file_locations: another in each plan
    abandoned       boolean NOT NULL DEFAULT false,   -- with all parts of this plan: what is stored of them is never given out
    CONSTRAINT within_the_object CHECK (part BETWEEN 1 AND part_count AND start_byte >= 0 AND start_byte < end_byte
        AND end_byte <= object_bytes AND (part = 1) = (start_byte = 0) AND (part = part_count) = (end_byte = object_bytes)),
    UNIQUE (plan_id, file_path, object_version, part),
    UNIQUE (source_id, file_path, object_version, location_part)
);

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
            'chunk', caf_files.name, 'merkle_root', encode(caf_files.merkle_root, 'hex'), 'owner', caf_files.owner,
            'start', caf_files.start, 'stored_size_bytes', caf_files.stored_size_bytes) ORDER BY parts.part) AS parts
    FROM object_parts AS parts
    JOIN caf_files ON caf_files.caf_file_id = parts.caf_file_id AND caf_files.state IN ('located', 'damaged')
    CROSS JOIN LATERAL (SELECT * FROM file_locations AS rows
        WHERE rows.source_id = parts.source_id AND rows.file_path = parts.file_path
            AND rows.object_version = parts.object_version AND rows.part = parts.location_part
            AND rows.caf_file_id = parts.caf_file_id AND rows.end_byte - rows.start_byte = parts.end_byte - parts.start_byte
        LIMIT 1) AS located
    WHERE NOT parts.abandoned
    GROUP BY parts.source_id, parts.file_path, parts.object_version, parts.plan_id, parts.part_count, parts.object_bytes
    HAVING count(*) = parts.part_count AND min(parts.start_byte) = 0 AND max(parts.end_byte) = parts.object_bytes
        AND (array_agg(parts.start_byte ORDER BY parts.part))[2:] = (array_agg(parts.end_byte ORDER BY parts.part))[:count(*) - 1]
        AND min(located.etag) = max(located.etag)
        AND min(coalesce(located.version_id, '')) = max(coalesce(located.version_id, ''))
) AS whole
ORDER BY source_id, file_path, object_version, plan_id;

-- They were skipped for good until objects could be split.
UPDATE skipped_objects SET retry_at = now() WHERE reason = 'too_large';
