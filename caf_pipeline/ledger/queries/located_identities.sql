-- Returns the located identities of keys that have no version id. LATERAL: one look-up a key, and one
-- of its chunk.
WITH in_parts AS MATERIALIZED (SELECT * FROM objects_in_parts
    WHERE source_id = %(source_id)s AND file_path = ANY(CAST(%(keys)s AS text[])))
SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at) AS object_version, etag, size_bytes, sha256,
    crc64nvme, s3_checksum, parts, header_set, chunk
FROM unnest(CAST(%(keys)s AS text[])) AS asked (key) CROSS JOIN LATERAL (
    SELECT file_path, version_id, etag, size_bytes, rewritten_at, sha256, crc64nvme, s3_checksum, NULL::jsonb AS parts,
        header_set, caf_file_id FROM file_locations
    WHERE source_id = %(source_id)s AND file_path = asked.key AND part = 0
    UNION ALL SELECT file_path, version_id, etag, size_bytes, rewritten_at, NULL, NULL, NULL, parts, header_set, caf_file_id
    FROM in_parts WHERE file_path = asked.key) AS located
CROSS JOIN LATERAL (SELECT name AS chunk, state, from_unknown_post FROM chunks WHERE chunks.caf_file_id = located.caf_file_id LIMIT 1) AS own
WHERE state = ANY(%(good)s) AND version_id = '' AND NOT from_unknown_post
