-- Returns the first chunks under way of each source after a chunk. The states are written out, as
-- the partial index needs. The source is a range: with a constant, Postgres would read the primary
-- key from the oldest chunk on.
SELECT sources.name AS source, sources.address, chunk.caf_file_id, chunk.name, chunk.state, chunk.failures, chunk.updated_at,
    CASE WHEN chunk.stored_size_bytes > 0 THEN chunk.stored_size_bytes ELSE chunk.expected_size_bytes END AS size_bytes,
    EXISTS (SELECT FROM leases WHERE leases.name = %(prefix)s || chunk.name AND expires_at > clock_timestamp()) AS held
FROM unnest(%(sources)s::text[], %(after)s::bigint[]) AS asked (name, after)
JOIN sources ON sources.name = asked.name
CROSS JOIN LATERAL (SELECT caf_file_id FROM caf_files
    WHERE (caf_files.source_id, caf_file_id) > (sources.source_id, asked.after) AND caf_files.source_id <= sources.source_id
        AND state IN ('planned', 'packing', 'sealed')
    ORDER BY caf_files.source_id, caf_file_id LIMIT %(limit)s) AS first
CROSS JOIN LATERAL (SELECT * FROM chunks WHERE chunks.caf_file_id = first.caf_file_id LIMIT 1) AS chunk
ORDER BY chunk.caf_file_id
