-- Drops the rows of a chunk from an unknown post whose objects this ledger packed, adopted or claimed itself.
DELETE FROM pending_locations AS new WHERE caf_file_id = %(caf_file_id)s AND (
    EXISTS (SELECT FROM file_locations AS old JOIN caf_files USING (caf_file_id) WHERE NOT from_unknown_post
        AND old.source_id = new.source_id AND old.file_path = new.file_path AND old.version_id = new.version_id
        AND old.etag = new.etag AND old.size_bytes = new.size_bytes AND old.rewritten_at = new.rewritten_at)
    OR EXISTS (SELECT FROM object_parts AS old JOIN caf_files USING (caf_file_id) WHERE NOT from_unknown_post AND NOT abandoned
        AND old.source_id = new.source_id AND old.file_path = new.file_path AND old.version_id = new.version_id
        AND old.etag = new.etag AND old.object_bytes = new.size_bytes AND old.rewritten_at = new.rewritten_at)
    OR EXISTS (SELECT FROM claims AS old
        WHERE old.source_id = new.source_id AND old.file_path = new.file_path AND old.version_id = new.version_id
        AND old.etag = new.etag AND old.size_bytes = new.size_bytes AND old.rewritten_at = new.rewritten_at))
