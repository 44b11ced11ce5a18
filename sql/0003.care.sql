-- What it takes to say that an object may be deleted at its source. See "Promises" 1 and 2 in docs/design.md.

ALTER TABLE caf_files ADD COLUMN read_back_at timestamptz;  -- all stored bytes came back from the store with the Merkle root
ALTER TABLE caf_files ADD COLUMN restored_at timestamptz;   -- by caf rebuild; what happened before it is not known
