-- Returns when the first object of the table skipping began to wait.
SELECT min(first_at) FROM skipping JOIN skipped_objects AS old USING (file_path, version_id, etag, size_bytes, rewritten_at)
WHERE source_id = %(source_id)s AND old.reason = 'waiting'
