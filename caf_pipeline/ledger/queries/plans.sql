-- Returns plans with the number of their chunks in each state, latest first, without adopted files.
SELECT sources.name AS source, plans.sha256, plans.name, snapshot, folder, object_count, object_bytes, plans.created_at,
    (SELECT jsonb_object_agg(state, chunks) FROM (SELECT state, count(*) AS chunks FROM chunks
        WHERE chunks.plan_id = plans.plan_id GROUP BY state) AS states) AS chunks
FROM plans JOIN sources USING (source_id)
WHERE (%(source)s::text IS NULL OR sources.name = %(source)s)
    AND NOT EXISTS (SELECT FROM caf_files WHERE caf_files.plan_id = plans.plan_id AND adopted_at IS NOT NULL)
ORDER BY plan_id DESC LIMIT %(limit)s
