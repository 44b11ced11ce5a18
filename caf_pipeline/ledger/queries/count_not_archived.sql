-- Counts the objects of a range of keys that are still to be archived, and those skipped.
-- Unsupported keys are recorded percent-encoded, in their own range. A waiting object also has a
-- claim while a chunk packs it.
SELECT count(*) FILTER (WHERE pending) AS pending, count(*) FILTER (WHERE NOT pending) AS skipped FROM (
    SELECT file_path, version_id, etag, size_bytes, rewritten_at, true AS pending FROM claims
    WHERE source_id = %(source_id)s AND file_path >= %(start)s AND (%(end)s::text IS NULL OR file_path < %(end)s)
    UNION SELECT file_path, version_id, etag, size_bytes, rewritten_at, true FROM skipped_objects
    WHERE source_id = %(source_id)s AND file_path >= %(start)s AND (%(end)s::text IS NULL OR file_path < %(end)s)
        AND reason = 'waiting'
    UNION SELECT file_path, version_id, etag, size_bytes, rewritten_at, false FROM current_skips
    WHERE source_id = %(source_id)s AND file_path >= %(start)s AND (%(end)s::text IS NULL OR file_path < %(end)s)
        AND reason <> 'unsupported_key'
    UNION SELECT file_path, version_id, etag, size_bytes, rewritten_at, false FROM current_skips
    WHERE source_id = %(source_id)s AND file_path >= %(encoded_start)s
        AND (%(encoded_end)s::text IS NULL OR file_path < %(encoded_end)s) AND reason = 'unsupported_key') AS objects
