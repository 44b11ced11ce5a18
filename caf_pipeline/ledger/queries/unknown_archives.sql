-- Returns the archives that an account had at its last whole look, that no source of this ledger has, and that were not set
-- aside for the source of the archive. Without an archive, it suffices that they were set aside for any source.
SELECT id FROM archive_looks, unnest(archives) AS id
WHERE account = %(account)s
    AND NOT EXISTS (SELECT FROM sources WHERE archive_id = id)
    AND NOT EXISTS (SELECT FROM chunk_copies WHERE archive_id = id)
    AND NOT EXISTS (SELECT FROM sources WHERE id = ANY(ids_set_aside)
        AND (archive_id = %(archive)s OR %(archive)s::text IS NULL))
ORDER BY id
