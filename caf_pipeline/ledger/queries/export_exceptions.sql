-- Returns the exceptions of a range of a source's keys, in the order of EXCEPTION_SCHEMA.
SELECT file_path, stated_at, object_version, last_modified FROM current_exceptions
WHERE source_id = %(source_id)s AND file_path >= %(start)s AND (%(end)s::text IS NULL OR file_path <= %(end)s)
