-- Indexes besides those of the keys.

CREATE INDEX caf_files_by_source_and_state ON caf_files (source_id, state);
-- Keeps the launching sensor's query, every half minute, fast beside 10^5 chunks. The states are
-- UNDER_WAY of chunk_state.py, as stored.
CREATE INDEX caf_files_under_way ON caf_files (source_id, caf_file_id) WHERE state IN ('planned', 'packing', 'sealed');
CREATE INDEX caf_files_by_located ON caf_files (source_id, located_at) WHERE located_at IS NOT NULL;
CREATE INDEX chunk_copies_by_root ON chunk_copies (merkle_root);
CREATE INDEX chunk_copies_suspected ON chunk_copies (caf_file_id) WHERE suspected_at IS NOT NULL;
CREATE INDEX chunk_copies_unanswered ON chunk_copies (caf_file_id) WHERE unanswered_at IS NOT NULL;

CREATE INDEX claims_by_chunk ON claims (caf_file_id);
CREATE INDEX file_locations_by_chunk ON file_locations (caf_file_id);
CREATE INDEX pending_locations_by_chunk ON pending_locations (caf_file_id);
CREATE INDEX inventories_by_time ON inventories (source_id, taken_at);

-- A sequence of an account has one transaction that is or may be in a block. A second payment with
-- it cannot be committed.
CREATE UNIQUE INDEX transactions_open ON transactions (account, sequence)
    WHERE outcome IS NULL OR outcome IN ('included', 'failed');
CREATE INDEX posts_by_account ON posts (account, asked_at);
-- A chunk has one live post of an account, whatever the sequences. A second payment for the same
-- work cannot be committed.
CREATE UNIQUE INDEX transaction_posts_live ON transaction_posts (caf_file_id, account) WHERE live;
