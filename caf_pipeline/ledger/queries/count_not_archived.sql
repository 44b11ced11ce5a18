-- Counts the objects of a range of keys that are to be archived, and those that were skipped. The key of an unsupported object is
-- recorded percent-encoded, and is in a range of its own. An object that waits has a claim, too, while a chunk packs it.
WITH own AS (SELECT source_id FROM sources WHERE name = %(source)s)
SELECT count(*) FILTER (WHERE pending) AS pending, count(*) FILTER (WHERE NOT pending) AS skipped FROM (
    SELECT file_path, version_id, etag, size_bytes, rewritten_at, true AS pending FROM claims
    WHERE source_id = (SELECT source_id FROM own) AND file_path >= %(start)s AND (%(end)s::text IS NULL OR file_path < %(end)s)
    UNION SELECT file_path, version_id, etag, size_bytes, rewritten_at, true FROM skipped_objects
    WHERE source_id = (SELECT source_id FROM own) AND file_path >= %(start)s AND (%(end)s::text IS NULL OR file_path < %(end)s)
        AND reason = 'waiting'
    UNION SELECT file_path, version_id, etag, size_bytes, rewritten_at, false FROM current_skips
    WHERE source_id = (SELECT source_id FROM own) AND file_path >= %(start)s AND (%(end)s::text IS NULL OR file_path < %(end)s)
        AND reason <> 'unsupported_key'
    UNION SELECT file_path, version_id, etag, size_bytes, rewritten_at, false FROM current_skips
    WHERE source_id = (SELECT source_id FROM own) AND file_path >= %(encoded_start)s
        AND (%(encoded_end)s::text IS NULL OR file_path < %(encoded_end)s) AND reason = 'unsupported_key') AS objects
