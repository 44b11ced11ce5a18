-- Returns whether this ledger packed, adopted or claimed an object itself.
SELECT EXISTS (SELECT FROM file_locations JOIN caf_files USING (caf_file_id) WHERE NOT from_unknown_post
        AND file_locations.source_id = %(source_id)s AND file_path = %(key)s
        AND object_version(version_id, etag, size_bytes, rewritten_at) = %(version)s)
    OR EXISTS (SELECT FROM object_parts JOIN caf_files USING (caf_file_id) WHERE NOT from_unknown_post AND NOT abandoned
        AND object_parts.source_id = %(source_id)s AND file_path = %(key)s
        AND object_version(version_id, etag, object_parts.object_bytes, rewritten_at) = %(version)s)
    OR EXISTS (SELECT FROM claims WHERE source_id = %(source_id)s AND file_path = %(key)s
        AND object_version(version_id, etag, size_bytes, rewritten_at) = %(version)s)
