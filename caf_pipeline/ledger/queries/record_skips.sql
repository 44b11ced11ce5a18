-- Writes the skips of the table skipping, each in place of an older skip of its object. An object that is skipped again waits
-- twice as long as before, up to a limit.
INSERT INTO skipped_objects AS old (source_id, file_path, version_id, etag, size_bytes, rewritten_at, reason, detail,
    last_modified, caf_file_id, retry_at)
SELECT DISTINCT ON (file_path, version_id, etag, size_bytes, rewritten_at)
    %(source_id)s, file_path, version_id, etag, size_bytes, rewritten_at, reason, detail, last_modified, %(caf_file_id)s,
    CASE WHEN reason = 'cold_storage' AND EXISTS (SELECT FROM noticed_keys WHERE noticed_keys.source_id = %(source_id)s
        AND noticed_keys.file_path = convert_to(skipping.file_path, 'UTF8') AND restored) THEN now()
        ELSE coalesce(now() + retry_after, 'infinity') END
FROM skipping
ON CONFLICT (source_id, file_path, version_id, etag, size_bytes, rewritten_at) DO UPDATE SET
    reason = excluded.reason, detail = excluded.detail,
    last_modified = excluded.last_modified, caf_file_id = excluded.caf_file_id, times = old.times + 1, last_at = now(),
    retry_at = CASE WHEN excluded.retry_at = 'infinity' THEN excluded.retry_at
        ELSE now() + least((excluded.retry_at - now()) * power(2, least(old.times, %(doublings)s)), %(longest)s) END
