-- Writes a restored chunk's skips (table skipping) whose objects chunks with earlier posts skipped,
-- too. The reason of the last posted chunk counts. Skips by a plan, or by a chunk without a post,
-- are later.
UPDATE skipped_objects AS old SET times = old.times + 1, reason = skipping.reason, detail = skipping.detail,
    last_modified = skipping.last_modified, caf_file_id = %(caf_file_id)s,
    retry_at = coalesce(now() + retry_after, 'infinity')
FROM skipping, chunk_copies AS copies
WHERE old.source_id = %(source_id)s AND old.file_path = skipping.file_path AND old.version_id = skipping.version_id
    AND old.etag = skipping.etag AND old.size_bytes = skipping.size_bytes AND old.rewritten_at = skipping.rewritten_at
    AND copies.caf_file_id = old.caf_file_id AND copies.start < %(start)s
