-- Returns the roots in a store that the ledger neither posted nor left aside. A chunk that is
-- sealed, or was waiting for its post in the backup, may be packed again with another root.
SELECT DISTINCT root FROM unnest(%(roots)s::bytea[]) AS listed (root)
WHERE NOT EXISTS (SELECT FROM chunk_copies AS copies WHERE merkle_root = root AND (start IS NOT NULL
        OR state = 'posting' AND NOT %(signed)s
        OR EXISTS (SELECT FROM transaction_posts WHERE transaction_posts.caf_file_id = copies.caf_file_id AND live)))
    AND NOT EXISTS (SELECT FROM left_posts WHERE left_posts.merkle_root = root)
ORDER BY root
