-- Two more checksums of each member, to be compared with a HEAD's once S3 lists the object as written again. Members that were
-- archived earlier have none, and so do adopted ones. See "Rewritten objects" in docs/inventory.md.
ALTER TABLE locations
    ADD COLUMN crc64nvme bytea,   -- of the member's bytes, big-endian
    ADD COLUMN s3_checksum text;  -- of the whole object, as S3 gave it to packing: the algorithm, a colon, hexadecimal digits

CREATE OR REPLACE VIEW file_locations AS
SELECT source_id, file_path, location_version(identity) COLLATE "C" AS object_version, location_part(identity) AS part, caf_file_id,
    start_byte, start_byte + location_size(identity, content) AS end_byte,
    location_version_id(identity, content) AS version_id, location_etag(identity, content) AS etag,
    last_modified, sha256, crc64nvme, s3_checksum
FROM locations;

-- As before (sql/0016), with the checksums of each part.
CREATE OR REPLACE VIEW objects_in_parts AS
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
