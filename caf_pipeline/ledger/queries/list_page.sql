-- Returns a range's first rows ('row'), which of their chunks are in good standing and not of unknown posts ('chunk'), and which of
-- their keys have more facts ('other'). One statement, since a claim may become a location at any moment.
WITH page AS MATERIALIZED (
    SELECT file_path, version_id, etag, size_bytes, rewritten_at, part, caf_file_id, last_modified, sha256 FROM file_locations
    WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND file_path >= %(start)s AND file_path < %(end)s
    ORDER BY file_path LIMIT %(limit)s),
span AS MATERIALIZED (
    SELECT (SELECT source_id FROM sources WHERE name = %(source)s) AS source_id, min(file_path) AS first, max(file_path) AS last FROM page)
SELECT 'row', file_path, size_bytes, last_modified, etag, object_version(version_id, etag, size_bytes, rewritten_at),
    nullif(version_id, ''), sha256, part, caf_file_id FROM page
UNION ALL
SELECT 'chunk', name, 0, NULL, NULL, NULL, NULL, NULL, 0, caf_file_id FROM chunks
WHERE caf_file_id = ANY (ARRAY(SELECT DISTINCT caf_file_id FROM page)) AND state = ANY (%(good)s) AND NOT from_unknown_post
UNION ALL
SELECT 'other', file_path, 0, NULL, NULL, NULL, NULL, NULL, 0, 0
FROM span CROSS JOIN LATERAL (
    SELECT file_path FROM current_exceptions WHERE source_id = span.source_id AND file_path BETWEEN first AND last
    UNION ALL SELECT file_path FROM claims WHERE source_id = span.source_id AND file_path BETWEEN first AND last
    UNION ALL SELECT file_path FROM skipped_objects WHERE source_id = span.source_id AND file_path BETWEEN first AND last
    UNION ALL SELECT file_path FROM object_parts WHERE source_id = span.source_id AND file_path BETWEEN first AND last) AS others
WHERE file_path IN (SELECT file_path FROM page)
