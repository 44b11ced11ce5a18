-- Returns the whole objects that are located in some chunks, in the order of KEPT_SCHEMA.
SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified, caf_file_id
FROM file_locations
WHERE source_id = %(source_id)s AND part = 0 AND caf_file_id = ANY(%(chunks)s)
