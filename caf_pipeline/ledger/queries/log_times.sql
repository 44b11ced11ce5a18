-- Returns the first and the last time of locations that are logs. LATERAL with LIMIT: one look-up a location.
SELECT asked.number, first_ms, last_ms
FROM unnest(%(chunks)s::text[], %(starts)s::bigint[]) WITH ORDINALITY AS asked (chunk, start_byte, number)
CROSS JOIN LATERAL (SELECT caf_file_id FROM caf_files WHERE name = asked.chunk LIMIT 1) AS chunk
CROSS JOIN LATERAL (SELECT first_ms, last_ms FROM log_times
    WHERE caf_file_id = chunk.caf_file_id AND start_byte = asked.start_byte LIMIT 1) AS times
