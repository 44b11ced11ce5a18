-- Records the objects that given-up chunks claim as current. A claim shows that its content is the key's newest. Without an
-- exception, an older located content would be called current until the next inventory. If other content is current, an
-- inventory has stated that at a later time.
INSERT INTO current_exceptions (source_id, file_path, stated_at, object_version, inventory)
SELECT source_id, file_path, last_modified, object_version, snapshot FROM newer_claims WHERE caf_file_id = ANY(%(ids)s)
ON CONFLICT DO NOTHING
