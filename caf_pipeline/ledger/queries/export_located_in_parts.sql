-- Returns the objects that are located in parts, in the order of STANDING_SCHEMA.
SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), last_modified
FROM objects_in_parts WHERE source_id = %(source_id)s AND NOT from_unknown_post
