-- Returns the chunks of an archive's source that were posted, or may be, although their objects are neither claimed nor in good
-- standing: a plan would archive and pay for these objects again. The facts are those of the tables; the view `chunks`, which
-- plans read, must agree with them. An object in parts has one claim for all parts; a paid part of an abandoned object goes on
-- without one.
SELECT caf_files.name
FROM caf_files LEFT JOIN chunk_copies AS copies USING (caf_file_id)
    LEFT JOIN chunks AS shown USING (caf_file_id) LEFT JOIN object_parts AS part USING (caf_file_id)
WHERE caf_files.source_id IN (SELECT source_id FROM sources WHERE archive_id = %(archive)s
        UNION SELECT source_id FROM caf_files JOIN chunk_copies USING (caf_file_id) WHERE archive_id = %(archive)s)
    AND caf_files.state NOT IN ('withdrawn', 'abandoned')
    AND NOT coalesce(caf_files.state = 'located' AND copies.state IN ('verified', 'damaged', 'expired')
        AND shown.state IN ('located', 'damaged', 'expired'), false)
    AND (copies.start IS NOT NULL
        OR EXISTS (SELECT FROM transaction_posts AS posts WHERE posts.caf_file_id = caf_files.caf_file_id AND live))
    AND NOT (caf_files.state IN ('sealed', 'parked') AND CASE
        WHEN part.caf_file_id IS NULL THEN
            (SELECT count(*) FROM claims WHERE claims.caf_file_id = caf_files.caf_file_id) = caf_files.member_count
        ELSE part.abandoned OR EXISTS (
            SELECT FROM object_parts AS other JOIN claims ON claims.caf_file_id = other.caf_file_id
            WHERE other.plan_id = part.plan_id AND other.file_path = part.file_path AND other.version_id = part.version_id
                AND other.etag = part.etag AND other.object_bytes = part.object_bytes AND other.rewritten_at = part.rewritten_at)
        END)
ORDER BY caf_files.name
