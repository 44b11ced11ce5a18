-- Claims the objects of a sealed chunk that no chunk claims.
INSERT INTO claims (source_id, file_path, version_id, etag, size_bytes, rewritten_at, caf_file_id, last_modified)
SELECT source_id, file_path, version_id, etag, size_bytes, rewritten_at, caf_file_id, last_modified
FROM pending_locations WHERE caf_file_id = %(id)s
ON CONFLICT DO NOTHING
