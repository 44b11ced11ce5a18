-- Returns the objects of a range of keys that are located in parts, in the order of STANDING_SCHEMA.
SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified
FROM objects_in_parts WHERE source_id = %(source_id)s AND file_path >= %(start)s AND (%(end)s::text IS NULL OR file_path <= %(end)s) AND NOT from_unknown_post
