-- When the queue of a source was last read without an error, or was first to be read: a queue that is gone, or denied, is told of.
-- A table of its own, since the source's row is locked while a plan is registered.
CREATE TABLE queue_reads (
    source_id  integer PRIMARY KEY REFERENCES sources,
    read_at    timestamptz NOT NULL DEFAULT now()
);
