-- Returns the locations of whole objects in chunks in good standing, in the order of LOCATED_SCHEMA. LATERAL with OFFSET
-- reads the rows of a chunk by the index of chunks, once. A header set with other texts than its id's counts as unknown.
SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at), part, located.caf_file_id, start_byte, end_byte,
    nullif(version_id, ''), etag, sha256,
    last_modified, crc64nvme, s3_checksum, header_sets.header_set
FROM chunks CROSS JOIN LATERAL (SELECT * FROM file_locations WHERE caf_file_id = chunks.caf_file_id OFFSET 0) AS located
LEFT JOIN header_sets ON header_sets.header_set = located.header_set
    AND header_sets.header_set = header_set_id(content_type, content_encoding, content_language, content_disposition, cache_control,
        expires, user_metadata)
WHERE chunks.source_id = %(source_id)s AND located.source_id = %(source_id)s AND part = 0 AND state = ANY(%(good)s)
    AND NOT from_unknown_post
