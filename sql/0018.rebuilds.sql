-- Sources that are being restored from what the store lists: what is not restored yet must not be planned, and paid for, again.
CREATE TABLE rebuilds (
    source_id  integer PRIMARY KEY REFERENCES sources,
    began_at   timestamptz NOT NULL DEFAULT now()
);
