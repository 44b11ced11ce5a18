-- Returns how many sequences of the account that signed last have no transaction of this ledger since its last whole look.
WITH newest AS (SELECT account FROM transactions ORDER BY created_at DESC, sequence DESC LIMIT 1),
used AS (SELECT DISTINCT sequence FROM transactions JOIN newest USING (account)
    WHERE outcome IS NULL OR outcome IN ('included', 'failed'))
SELECT account, greatest(0, (SELECT max(next) FROM (SELECT max(sequence) + 1 AS next FROM used
            UNION ALL SELECT max(sequence) FROM store_looks JOIN newest USING (account)) AS known)
        - looked_from - (SELECT count(*) FROM used WHERE sequence >= looked_from)) AS foreign_transactions
FROM (SELECT account, coalesce(sequence, 0) AS looked_from FROM newest LEFT JOIN archive_looks USING (account)) AS looked
