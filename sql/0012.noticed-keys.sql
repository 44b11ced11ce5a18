-- What S3's event notifications named, until a listing that began later has it. An event only names a key: what the bucket has of it
-- is asked when it is planned.
CREATE TABLE noticed_keys (
    source_id   integer NOT NULL REFERENCES sources,
    file_path   bytea NOT NULL,                     -- any bytes, as S3 has them
    sequencer   text COLLATE "C" NOT NULL,          -- of the latest event, upper-case hexadecimal; '' where it has none
    listing     text COLLATE "C",                   -- the latest that began after the latest event; NULL: none did
    noticed_at  timestamptz NOT NULL DEFAULT now(), -- the first of its events since it was last listed
    PRIMARY KEY (source_id, file_path)
);

-- Messages of a source's queue that are no event of its bucket: kept here before they are deleted there.
CREATE TABLE messages_set_apart (
    source_id     integer NOT NULL REFERENCES sources,
    message_id    text COLLATE "C" NOT NULL,
    body          bytea NOT NULL,
    reason        text NOT NULL,
    set_apart_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source_id, message_id)
);
