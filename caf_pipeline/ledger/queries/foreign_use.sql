-- Returns of the account that signed last: how many sequences since its last whole look have no transaction of this ledger,
-- and the archives of that look that no source has and that were not set aside.
WITH newest AS (SELECT account FROM transactions ORDER BY created_at DESC, sequence DESC LIMIT 1),
used AS (SELECT DISTINCT sequence FROM transactions JOIN newest USING (account)
    WHERE outcome IS NULL OR outcome IN ('included', 'failed')),
looked AS (SELECT account, coalesce(sequence, 0) AS start, coalesce(archives, '{}') AS archives, looked_at
    FROM newest LEFT JOIN archive_looks USING (account))
SELECT account, looked_at,
    greatest(0, (SELECT max(next) FROM (SELECT max(sequence) + 1 AS next FROM used
            UNION ALL SELECT max(sequence) FROM store_looks JOIN newest USING (account)) AS known)
        - start - (SELECT count(*) FROM used WHERE sequence >= start)) AS transactions,
    ARRAY(SELECT id FROM unnest(archives) AS id
        WHERE NOT EXISTS (SELECT FROM sources WHERE archive_id = id OR id = ANY(ids_set_aside))
            AND NOT EXISTS (SELECT FROM chunk_copies WHERE archive_id = id) ORDER BY id) AS archives
FROM looked
