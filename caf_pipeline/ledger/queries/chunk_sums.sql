-- Returns sums over the chunks of sources, by state. Plans and attempts to pack do not count as
-- moves: while S3 is away, all chunks are retried, and nothing moves.
SELECT sources.name AS source, state, count(*) AS chunks,
    sum(CASE WHEN caf_file_id IN (SELECT caf_file_id FROM counted_elsewhere(%(sources)s)) THEN 0
        WHEN state IN ('located', 'damaged') THEN member_count ELSE object_count END) AS objects,
    sum(CASE WHEN state NOT IN ('located', 'damaged') THEN object_bytes
        WHEN caf_file_id IN (SELECT caf_file_id FROM object_parts WHERE abandoned) THEN 0 ELSE member_bytes END) AS size_bytes,
    max(updated_at) FILTER (WHERE state NOT IN ('planned', 'packing')) AS moved_at, sum(attempts) AS attempts,
    max(checked_at) FILTER (WHERE state = 'located') AS looked_at,
    min(located_at) FILTER (WHERE state = 'located') AS located_at
FROM chunks JOIN sources USING (source_id) WHERE sources.name = ANY(%(sources)s) GROUP BY sources.name, state
