-- Records a chunk that a provider returned whole, replacing an earlier full read.
INSERT INTO full_reads (caf_file_id, store, provider, opened_with, merkle_root, tail_sha256)
SELECT caf_file_id, store, %(provider)s, %(opened_with)s, merkle_root, %(tail_sha256)s FROM chunk_copies WHERE caf_file_id = %(id)s
ON CONFLICT (caf_file_id, store) DO UPDATE SET
    provider = excluded.provider, opened_with = excluded.opened_with, read_at = now(),
    merkle_root = excluded.merkle_root, tail_sha256 = excluded.tail_sha256, agreed_sha256 = NULL
