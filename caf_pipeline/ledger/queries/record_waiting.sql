-- Writes that the objects of the table skipping wait for the next plan. Their number of skips
-- stays.
INSERT INTO skipped_objects AS old (source_id, file_path, version_id, etag, size_bytes, rewritten_at, reason, detail,
    last_modified, times, retry_at)
SELECT %(source_id)s, file_path, version_id, etag, size_bytes, rewritten_at, reason, detail, last_modified, 0, %(until)s
FROM skipping
ON CONFLICT (source_id, file_path, version_id, etag, size_bytes, rewritten_at) DO UPDATE SET
    reason = excluded.reason, detail = excluded.detail, last_modified = excluded.last_modified,
    caf_file_id = NULL, last_at = now(), retry_at = excluded.retry_at
