-- Returns whether objects of a source have version ids, from a sample of the objects planned or
-- archived last. LATERAL with LIMIT: some rows of each chunk. The order keeps the planner from claims of other sources.
SELECT EXISTS (SELECT FROM (
    SELECT version_id FROM (SELECT version_id FROM claims
        WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s)
        ORDER BY file_path LIMIT 1000) AS claimed
    UNION ALL
    SELECT version_id FROM (SELECT caf_file_id FROM chunks
            WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND state = ANY(%(good)s)
                AND chunk_state = 'located' AND adopted_at IS NULL AND NOT from_unknown_post
            ORDER BY located_at DESC LIMIT 3) AS chunks
        CROSS JOIN LATERAL (SELECT version_id FROM file_locations
            WHERE caf_file_id = chunks.caf_file_id LIMIT 1000) AS located
    ) AS objects WHERE version_id <> '')
