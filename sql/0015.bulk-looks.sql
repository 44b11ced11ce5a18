-- The proof watch reads the store's own lists by pages. See "Proofs, damage and repair" in docs/jackal.md.

-- The list is of a time at which something of the chunk was amiss there; a look at the chunk itself is to tell, and ends it.
ALTER TABLE caf_files ADD COLUMN suspected_at timestamptz;
CREATE INDEX caf_files_suspected ON caf_files (source_id) WHERE suspected_at IS NOT NULL;

CREATE TABLE bulk_looks (
    store     text PRIMARY KEY,
    next_at   timestamptz NOT NULL,  -- before it no other pass through the store's lists is to begin
    whole_at  timestamptz            -- when the last pass began that went through all of them
);
