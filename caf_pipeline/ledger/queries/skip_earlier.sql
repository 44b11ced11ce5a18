-- Counts a restored chunk's skips (table skipping) whose objects other chunks skipped later.
UPDATE skipped_objects AS old SET times = old.times + 1
FROM skipping
WHERE old.source_id = %(source_id)s AND old.file_path = skipping.file_path AND old.version_id = skipping.version_id
    AND old.etag = skipping.etag AND old.size_bytes = skipping.size_bytes AND old.rewritten_at = skipping.rewritten_at
    AND old.caf_file_id IS DISTINCT FROM %(caf_file_id)s
