-- Ends a chunk's claims on the objects of the table skipping.
DELETE FROM claims WHERE caf_file_id = %(caf_file_id)s AND (file_path, version_id, etag, size_bytes, rewritten_at)
    IN (SELECT file_path, version_id, etag, size_bytes, rewritten_at FROM skipping)
