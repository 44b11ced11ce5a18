-- Returns sums over the chunks of sources located in the last `window` seconds. The first chunk
-- only begins the window, since its packing began before. Chunks of a rebuild do not count.
WITH recent AS (SELECT sources.name AS source, located_at, member_bytes,
        CASE WHEN caf_file_id IN (SELECT caf_file_id FROM counted_elsewhere(%(sources)s)) THEN 0 ELSE member_count END
            AS member_count,
        row_number() OVER (PARTITION BY source_id ORDER BY located_at, caf_file_id) > 1 AS counts
    FROM caf_files JOIN sources USING (source_id)
    WHERE sources.name = ANY(%(sources)s) AND located_at > now() - make_interval(secs => %(window)s) AND attempts > 0)
SELECT source, CAST(extract(epoch FROM now() - min(located_at)) AS double precision) AS seconds,
    count(*) FILTER (WHERE counts) AS chunks, coalesce(sum(member_count) FILTER (WHERE counts), 0) AS objects,
    coalesce(sum(member_bytes) FILTER (WHERE counts), 0) AS size_bytes
FROM recent GROUP BY source
