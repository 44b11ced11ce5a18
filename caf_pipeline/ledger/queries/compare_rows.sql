-- Compares a chunk's locations with the rows of its manifest, which are in pending_locations. Returns how many of the manifest's
-- objects the chunk has, how many of its locations differ from the manifest, and a key of these.
SELECT count(*) FILTER (WHERE sealed.caf_file_id IS NOT NULL) AS located, count(*) FILTER (WHERE differs) AS altered,
    min(file_path) FILTER (WHERE differs) AS altered_key
FROM (SELECT * FROM file_locations WHERE caf_file_id = %(caf_file_id)s) AS own
    LEFT JOIN (SELECT * FROM pending_locations WHERE caf_file_id = %(caf_file_id)s) AS sealed
        USING (source_id, file_path, version_id, etag, size_bytes, rewritten_at, part)
    CROSS JOIN LATERAL (SELECT sealed.caf_file_id IS NULL
        OR (own.start_byte, own.end_byte, own.last_modified, own.sha256, own.crc64nvme, own.s3_checksum, own.header_set)
            IS DISTINCT FROM (sealed.start_byte, sealed.end_byte, sealed.last_modified, sealed.sha256, sealed.crc64nvme,
                sealed.s3_checksum, sealed.header_set)) AS compared (differs)
