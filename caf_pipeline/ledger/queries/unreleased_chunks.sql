-- Returns the first chunks that need no more work and still reserve staging. The columns are those
-- of launchable_chunks.
SELECT sources.name AS source, sources.address, chunk.caf_file_id, chunk.name, chunk.state, chunk.failures, chunk.updated_at,
    CASE WHEN chunk.stored_size_bytes > 0 THEN chunk.stored_size_bytes ELSE chunk.expected_size_bytes END AS size_bytes,
    EXISTS (SELECT FROM leases WHERE leases.name = %(prefix)s || chunk.name AND expires_at > clock_timestamp()) AS held
FROM staging_reservations AS reserved
CROSS JOIN LATERAL (SELECT * FROM chunks WHERE chunks.caf_file_id = reserved.caf_file_id LIMIT 1) AS chunk
JOIN sources USING (source_id)
WHERE state IN ('located', 'empty') AND sources.name = ANY(%(sources)s) ORDER BY chunk.caf_file_id LIMIT %(limit)s
