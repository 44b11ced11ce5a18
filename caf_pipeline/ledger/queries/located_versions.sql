-- Returns the located versions of a key, the latest first, and how many there are.
SELECT key, object_version, version_id, start_byte, end_byte, etag, last_modified, sha256, header_set, count(*) OVER ()
FROM (
    SELECT file_path AS key, object_version(version_id, etag, size_bytes, rewritten_at) AS object_version,
        nullif(version_id, '') AS version_id, start_byte, end_byte, etag, last_modified, file_locations.sha256, header_set
    FROM file_locations JOIN chunks USING (caf_file_id) JOIN sources ON sources.source_id = file_locations.source_id
    WHERE sources.name = %(source)s AND file_path = %(key)s AND state = ANY(%(good)s) AND part = 0
    UNION ALL
    SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), nullif(version_id, ''), 0, size_bytes, etag,
        last_modified, '', header_set FROM objects_in_parts
    WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND file_path = %(key)s) AS located
ORDER BY last_modified DESC, object_version DESC LIMIT %(limit)s
