-- Records a search of the store for posts of an archive that the ledger does not know.
INSERT INTO store_looks (source_id, account, sequence, unknown)
SELECT source_id, %(account)s, %(sequence)s, %(unknown)s FROM sources WHERE archive_id = %(archive)s
ON CONFLICT (source_id, account) DO UPDATE SET
    sequence = excluded.sequence, unknown = excluded.unknown, looked_at = now()
