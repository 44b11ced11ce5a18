-- Records the objects of the table releasing as current, as `withdraw_claims` does for all claims
-- of a chunk.
INSERT INTO current_exceptions (source_id, file_path, stated_at, object_version, inventory)
SELECT source_id, file_path, last_modified, object_version, snapshot FROM newer_claims
JOIN releasing USING (file_path, object_version)
WHERE caf_file_id = %(caf_file_id)s
ON CONFLICT DO NOTHING
