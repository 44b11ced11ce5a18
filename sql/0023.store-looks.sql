-- A ledger that was restored from an older backup does not know what was posted since. See docs/decisions/0028-older-ledgers.md.

-- The last look at a store for posts of a source that the ledger does not know.
CREATE TABLE store_looks (
    source_id  integer NOT NULL REFERENCES sources,
    account    text COLLATE "C" NOT NULL,             -- <chain id>/<address>, or the owner in a store that signs nothing
    sequence   bigint NOT NULL CHECK (sequence >= 0), -- the account's before the look; 0 in a store that signs nothing
    unknown    integer NOT NULL CHECK (unknown >= 0), -- posts that the ledger did not know
    looked_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source_id, account)
);

-- Posts that are no chunks of the ledger, and need not be: they keep nothing from being packed and posted.
CREATE TABLE left_posts (
    source_id    integer NOT NULL REFERENCES sources,
    merkle_root  bytea NOT NULL,
    superseded   boolean NOT NULL,                    -- other chunks have all objects; else an operator ordered a second copy
    left_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source_id, merkle_root)
);
