-- Returns whether each sequence of the account since the last search has a transaction of this ledger, and that search
-- found no unknown post. Without an archive, the last search is that for all archives of the account. Returns false if the
-- sequence is lower than at the last search.
SELECT looked.unknown = 0 AND (SELECT count(DISTINCT sequence) FROM transactions WHERE account = %(account)s
        AND sequence >= looked.sequence AND sequence < %(sequence)s
        AND (outcome IS NULL OR outcome IN ('included', 'failed'))) = %(sequence)s - looked.sequence
FROM (SELECT coalesce(max(sequence), 0) AS sequence, coalesce(max(unknown), 0) AS unknown
    FROM (SELECT sequence, unknown FROM store_looks JOIN sources USING (source_id)
            WHERE archive_id = %(archive)s AND account = %(account)s
        UNION ALL SELECT sequence, 0 FROM archive_looks WHERE %(archive)s::text IS NULL AND account = %(account)s) AS looks
    ) AS looked
