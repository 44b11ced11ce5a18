-- Returns the whole objects that are located in chunks in good standing, in the order of STANDING_SCHEMA. LATERAL with OFFSET
-- reads the rows of a chunk by the index of chunks, once.
SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified
FROM chunks CROSS JOIN LATERAL (SELECT * FROM file_locations WHERE caf_file_id = chunks.caf_file_id OFFSET 0) AS located
WHERE chunks.source_id = %(source_id)s AND located.source_id = %(source_id)s AND part = 0 AND state = ANY(%(good)s)
    AND NOT from_unknown_post
