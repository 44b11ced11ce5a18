-- Records a chunk that a provider returned whole, replacing an earlier full read.
INSERT INTO full_reads (caf_file_id, store, provider, opened_with)
SELECT caf_file_id, store, %(provider)s, %(opened_with)s FROM chunk_copies WHERE caf_file_id = %(id)s
ON CONFLICT (caf_file_id, store) DO UPDATE SET
    provider = excluded.provider, opened_with = excluded.opened_with, read_at = now()
