-- Counts the skips of a restored chunk, the objects of the table skipping, that others skipped later.
UPDATE skipped_objects AS old SET times = old.times + 1
FROM skipping
WHERE old.source_id = %(source_id)s AND old.file_path = skipping.file_path AND old.version_id = skipping.version_id
    AND old.etag = skipping.etag AND old.size_bytes = skipping.size_bytes AND old.rewritten_at = skipping.rewritten_at
    AND old.caf_file_id IS DISTINCT FROM %(caf_file_id)s
