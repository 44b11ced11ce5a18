-- Records a provider's verified copy of a chunk.
INSERT INTO replicas AS old (caf_file_id, store, provider, proof, last_proven)
SELECT caf_file_id, store, %(provider)s, %(proof)s, %(last_proven)s::bigint FROM chunk_copies WHERE caf_file_id = %(id)s
ON CONFLICT (caf_file_id, store, provider) DO UPDATE SET proof = excluded.proof, listed = true, fault = '', checked_at = now(),
    last_proven = coalesce(excluded.last_proven, old.last_proven)
