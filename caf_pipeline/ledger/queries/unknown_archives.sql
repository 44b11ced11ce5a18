-- Returns the archives of the account's last whole look that no source of this ledger has, and that were not set aside for
-- the source of the archive.
SELECT id FROM archive_looks, unnest(archives) AS id
WHERE account = %(account)s
    AND NOT EXISTS (SELECT FROM sources WHERE archive_id = id)
    AND NOT EXISTS (SELECT FROM chunk_copies WHERE archive_id = id)
    AND NOT EXISTS (SELECT FROM sources WHERE archive_id = %(archive)s AND id = ANY(ids_set_aside))
ORDER BY id
