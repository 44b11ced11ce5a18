-- Returns the whole objects of a range of keys that are located in chunks in good standing, in the order of STANDING_SCHEMA.
-- LATERAL with LIMIT: one look-up a chunk.
SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified
FROM file_locations CROSS JOIN LATERAL (
    SELECT state, from_unknown_post FROM chunks WHERE chunks.caf_file_id = file_locations.caf_file_id LIMIT 1) AS own
WHERE source_id = %(source_id)s AND part = 0 AND file_path >= %(start)s AND (%(end)s::text IS NULL OR file_path <= %(end)s)
    AND state = ANY(%(good)s) AND NOT from_unknown_post
