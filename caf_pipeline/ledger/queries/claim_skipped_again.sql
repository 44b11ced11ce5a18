-- Claims the objects that a chunk skipped, which may be readable when packed again. If another
-- chunk took one meanwhile, the next seal fails.
INSERT INTO claims (source_id, file_path, version_id, etag, size_bytes, rewritten_at, caf_file_id, last_modified)
SELECT source_id, file_path, version_id, etag, size_bytes, rewritten_at, caf_file_id, last_modified FROM skipped_objects AS skipped
WHERE caf_file_id = %(id)s AND NOT EXISTS (
    SELECT FROM file_locations AS located JOIN chunks ON chunks.caf_file_id = located.caf_file_id
    WHERE located.source_id = skipped.source_id AND located.file_path = skipped.file_path
        AND located.version_id = skipped.version_id AND located.etag = skipped.etag
        AND located.size_bytes = skipped.size_bytes AND located.rewritten_at = skipped.rewritten_at AND located.part = 0
        AND chunks.state = ANY(%(good)s) AND NOT from_unknown_post)
ON CONFLICT DO NOTHING
