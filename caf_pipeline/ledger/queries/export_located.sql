-- Returns the whole objects that are located in chunks in good standing, in the order of STANDING_SCHEMA.
SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified
FROM file_locations JOIN chunks USING (caf_file_id)
WHERE file_locations.source_id = %(source_id)s AND part = 0 AND state = ANY(%(good)s)
    AND NOT from_unknown_post
