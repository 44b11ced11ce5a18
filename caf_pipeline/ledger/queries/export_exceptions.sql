-- Returns the exceptions of a source, in the order of EXCEPTION_SCHEMA.
SELECT file_path, stated_at, object_version, last_modified FROM current_exceptions WHERE source_id = %(source_id)s
