-- When a source's queue of event notifications was last read without an error. A queue that is gone, or denied, is told of.
ALTER TABLE sources ADD COLUMN queue_read_at timestamptz NOT NULL DEFAULT now();
