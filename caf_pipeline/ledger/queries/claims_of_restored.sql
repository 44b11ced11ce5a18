-- Returns an object of a restored chunk that a chunk under way claims, and that chunk's name.
-- LATERAL with LIMIT: one lookup an object, even without statistics on the rows just loaded.
SELECT restored.file_path, claimed.name
FROM pending_locations AS restored CROSS JOIN LATERAL (
    SELECT caf_files.name FROM claims JOIN caf_files ON caf_files.caf_file_id = claims.caf_file_id
    WHERE claims.source_id = restored.source_id AND claims.file_path = restored.file_path
        AND claims.version_id = restored.version_id AND claims.etag = restored.etag
        AND claims.size_bytes = restored.size_bytes AND claims.rewritten_at = restored.rewritten_at LIMIT 1) AS claimed
WHERE restored.caf_file_id = %(caf_file_id)s
LIMIT 1
