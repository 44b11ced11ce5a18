-- Returns the objects that were skipped and if each is due, in the order of STANDING_SCHEMA.
SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), reason,
    retry_at <= now() OR reason = 'waiting', last_modified
FROM skipped_objects
WHERE source_id = %(source_id)s
