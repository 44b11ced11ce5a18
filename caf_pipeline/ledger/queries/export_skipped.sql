-- Returns the objects of a range of keys that were skipped and if each is due, in the order of STANDING_SCHEMA.
-- Unsupported keys are recorded percent-encoded, which has another order, so all of them are returned.
SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), reason,
    retry_at <= now() OR reason = 'waiting', last_modified
FROM skipped_objects
WHERE source_id = %(source_id)s AND (file_path >= %(start)s AND (%(end)s::text IS NULL OR file_path <= %(end)s) OR reason = 'unsupported_key')
