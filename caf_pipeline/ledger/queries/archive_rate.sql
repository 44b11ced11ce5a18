-- Returns the median rate of the chunks of a source that were located last. An interval lasts from
-- one located chunk to the next, so that chunks archived in parallel count together. It begins when
-- the chunk was planned, if that is later. Chunks of a rebuild do not count.
WITH recent AS (SELECT created_at, located_at, member_bytes FROM caf_files
    WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND located_at IS NOT NULL AND attempts > 0
    ORDER BY located_at DESC LIMIT %(chunks)s),
following AS (SELECT *, lag(located_at) OVER (ORDER BY located_at) AS before FROM recent),
steps AS (SELECT member_bytes, extract(epoch FROM located_at - greatest(created_at, before)) AS seconds
    FROM following WHERE before IS NOT NULL)
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY member_bytes / CAST(seconds AS double precision)) AS rate, count(*) AS chunks
FROM steps WHERE seconds > 0 AND member_bytes > 0
