-- Returns how fast chunks of a source were archived: the median rate of those located last. A step lasts from one chunk located
-- to the next, so that chunks that are archived side by side count together. It begins when the chunk was planned if that is
-- later, since nothing was to be done before. A rebuild packs nothing, so that its chunks do not count.
WITH recent AS (SELECT created_at, located_at, member_bytes FROM caf_files
    WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND located_at IS NOT NULL AND attempts > 0
    ORDER BY located_at DESC LIMIT %(chunks)s),
following AS (SELECT *, lag(located_at) OVER (ORDER BY located_at) AS before FROM recent),
steps AS (SELECT member_bytes, extract(epoch FROM located_at - greatest(created_at, before)) AS seconds
    FROM following WHERE before IS NOT NULL)
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY member_bytes / CAST(seconds AS double precision)) AS rate, count(*) AS chunks
FROM steps WHERE seconds > 0 AND member_bytes > 0
