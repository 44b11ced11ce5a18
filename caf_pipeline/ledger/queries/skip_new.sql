-- Writes a restored chunk's skips (table skipping) whose objects are neither located nor skipped by
-- others.
INSERT INTO skipped_objects (source_id, file_path, version_id, etag, size_bytes, rewritten_at, reason, detail, last_modified,
    caf_file_id, retry_at)
SELECT %(source_id)s, file_path, version_id, etag, size_bytes, rewritten_at, reason, detail, last_modified, %(caf_file_id)s,
    coalesce(now() + retry_after, 'infinity')
FROM skipping WHERE NOT EXISTS (
    SELECT FROM file_locations AS archived JOIN chunks ON chunks.caf_file_id = archived.caf_file_id
    WHERE archived.source_id = %(source_id)s AND archived.file_path = skipping.file_path
        AND archived.version_id = skipping.version_id AND archived.etag = skipping.etag
        AND archived.size_bytes = skipping.size_bytes AND archived.rewritten_at = skipping.rewritten_at
        AND archived.part = 0 AND state = ANY(%(good)s))
ON CONFLICT DO NOTHING
