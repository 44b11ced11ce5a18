-- Returns the objects that are claimed, in the order of STANDING_SCHEMA.
SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified
FROM claims WHERE source_id = %(source_id)s
