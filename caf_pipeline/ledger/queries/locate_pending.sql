-- Copies a chunk's rows from pending_locations to file_locations, replacing rows of chunks that are
-- no longer in good standing, or of chunks from unknown posts unless this chunk is from one, too. The order of the key fills the
-- index page by page.
INSERT INTO file_locations AS old SELECT * FROM pending_locations WHERE caf_file_id = %(caf_file_id)s
ORDER BY source_id, file_path, version_id, etag, size_bytes, rewritten_at, part
ON CONFLICT (source_id, file_path, version_id, etag, size_bytes, rewritten_at, part) DO UPDATE SET
    caf_file_id = excluded.caf_file_id, start_byte = excluded.start_byte, end_byte = excluded.end_byte,
    last_modified = excluded.last_modified, sha256 = excluded.sha256, crc64nvme = excluded.crc64nvme,
    s3_checksum = excluded.s3_checksum, header_set = excluded.header_set
WHERE NOT EXISTS (SELECT FROM chunks WHERE chunks.caf_file_id = old.caf_file_id AND state = ANY(%(good)s)
    AND (NOT from_unknown_post OR (SELECT from_unknown_post FROM caf_files WHERE caf_file_id = %(caf_file_id)s)))
