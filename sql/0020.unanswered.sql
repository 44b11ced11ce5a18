-- When a look at the chunk last had no answer from one of its copies: the next look is soon, and asks for more. A look in which all
-- copies answer ends it. See "Proofs, damage and repair" in docs/jackal.md.
ALTER TABLE caf_files ADD COLUMN unanswered_at timestamptz;
CREATE INDEX caf_files_unanswered ON caf_files (source_id) WHERE unanswered_at IS NOT NULL;
