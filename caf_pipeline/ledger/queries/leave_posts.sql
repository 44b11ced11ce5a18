-- Records that posts of these Merkle roots are not and need not be chunks of this ledger.
INSERT INTO left_posts (source_id, merkle_root, superseded)
SELECT %(source_id)s, root, %(superseded)s FROM unnest(%(roots)s::bytea[]) AS left_now (root)
ON CONFLICT (source_id, merkle_root) DO UPDATE SET superseded = excluded.superseded
