-- Returns the locations of all parts of the objects that are located in parts, in the order of LOCATED_SCHEMA. LATERAL with
-- LIMIT: one look-up a part. A header set with other texts than its id's counts as unknown.
SELECT located.file_path, object_version(located.version_id, located.etag, located.size_bytes, located.rewritten_at),
    own.part, own.part_count, located.caf_file_id, located.start_byte, located.end_byte, nullif(located.version_id, ''),
    located.etag, located.sha256, located.last_modified, located.crc64nvme, located.s3_checksum, header_sets.header_set
FROM objects_in_parts AS whole JOIN object_parts AS own ON own.plan_id = whole.plan_id AND own.file_path = whole.file_path
    AND own.version_id = whole.version_id AND own.etag = whole.etag AND own.object_bytes = whole.size_bytes
    AND own.rewritten_at = whole.rewritten_at
CROSS JOIN LATERAL (
    SELECT * FROM file_locations AS rows
    WHERE rows.source_id = own.source_id AND rows.file_path = own.file_path AND rows.version_id = own.version_id
        AND rows.etag = own.etag AND rows.size_bytes = own.object_bytes AND rows.rewritten_at = own.rewritten_at
        AND rows.part = own.location_part LIMIT 1) AS located
LEFT JOIN header_sets ON header_sets.header_set = located.header_set
    AND header_sets.header_set = header_set_id(content_type, content_encoding, content_language, content_disposition, cache_control,
        expires, user_metadata)
WHERE whole.source_id = %(source_id)s AND NOT whole.from_unknown_post
