-- Returns the objects of a range of keys that are claimed, in the order of STANDING_SCHEMA.
SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified
FROM claims WHERE source_id = %(source_id)s AND file_path >= %(start)s AND (%(end)s::text IS NULL OR file_path <= %(end)s)
