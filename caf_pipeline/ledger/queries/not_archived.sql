-- Returns the identities of a key without a location in good standing, latest first. A part that
-- waits for others is claimed.
WITH own AS (SELECT source_id FROM sources WHERE name = %(source)s)
SELECT object_version, chunk, state, detail, retry_at, is_over FROM (
    SELECT object_version(version_id, etag, size_bytes, rewritten_at) AS object_version, name AS chunk, state,
        '' AS detail, NULL::timestamptz AS retry_at, false AS is_over, last_modified
    FROM claims_under_way WHERE source_id = (SELECT source_id FROM own) AND file_path = %(key)s
    UNION ALL
    SELECT object_version(skipped.version_id, skipped.etag, skipped.size_bytes, skipped.rewritten_at), NULL, skipped.reason,
        skipped.detail, CASE WHEN isfinite(skipped.retry_at) THEN skipped.retry_at END,
        skipped.reason <> 'waiting' AND in_force.source_id IS NULL, coalesce(skipped.last_modified, skipped.last_at)
    FROM skipped_objects AS skipped
        LEFT JOIN current_skips AS in_force USING (source_id, file_path, version_id, etag, size_bytes, rewritten_at)
    WHERE source_id = (SELECT source_id FROM own) AND file_path = %(key)s
    UNION ALL
    SELECT object_version(version_id, etag, size_bytes, rewritten_at), name, state, '', NULL, false, last_modified
    FROM file_locations JOIN chunks USING (caf_file_id)
    WHERE file_locations.source_id = (SELECT source_id FROM own) AND file_path = %(key)s AND state <> ALL(%(good)s)) AS known
ORDER BY last_modified DESC NULLS LAST
