-- Proof windows are counted in a row, and only those in which the chain is known to have verified a proof. See decision 0012.

-- Until now a window counted that may have been one of a provider's joining alone.
UPDATE copies SET windows = 0, last_window = NULL;

ALTER TABLE caf_files ADD COLUMN read_back_from text;       -- the provider that gave all stored bytes
ALTER TABLE caf_files ADD COLUMN look_again_at timestamptz;  -- when a look can see the window after those that count so far
