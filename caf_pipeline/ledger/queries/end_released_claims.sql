-- Ends a chunk's claims on the objects of the table releasing.
DELETE FROM claims USING releasing WHERE claims.caf_file_id = %(caf_file_id)s AND claims.file_path = releasing.file_path
    AND object_version(claims.version_id, claims.etag, claims.size_bytes, claims.rewritten_at) = releasing.object_version
