-- What storing on Jackal needs to remember: an account's transactions and the posts in them, proofs of copies over time,
-- rates of providers, and the operator's orders. See "Promises" 3 in docs/design.md.

-- One reason column for every state that needs one: parked, damaged, withdrawn.
ALTER TABLE caf_files RENAME COLUMN parked_reason TO reason;
ALTER TABLE caf_files ADD COLUMN checked_at timestamptz;  -- by the proof watch

-- No store signed anything before this; a transaction now belongs to its account, and posts any number of chunks.
DROP TABLE transactions;
CREATE TABLE transactions (
    hash            text PRIMARY KEY,
    account         text COLLATE "C" NOT NULL,        -- <chain id>/<address>
    sequence        bigint NOT NULL CHECK (sequence >= 0),
    timeout_height  bigint NOT NULL CHECK (timeout_height > 0),  -- 0 would be no end, and a fate that is never known
    body            bytea NOT NULL,                   -- what was signed; a retry sends the same
    purpose         text NOT NULL CHECK (purpose IN ('post', 'buy')),
    cost            bigint NOT NULL CHECK (cost >= 0),  -- ujkl, fee included
    outcome         text CHECK (outcome IN ('included', 'failed', 'expired', 'superseded')),  -- NULL while it is not known
    created_at      timestamptz NOT NULL DEFAULT now(),
    settled_at      timestamptz,
    -- What is asked of the chain by its hash is what was signed.
    CONSTRAINT hash_of_body CHECK (hash = upper(encode(sha256(body), 'hex'))),
    CONSTRAINT settled_with_outcome CHECK ((outcome IS NULL) = (settled_at IS NULL)),
    UNIQUE (hash, account)                            -- for the key of its posts
);
-- A sequence of an account has one transaction that is or may be in a block: a second payment by it cannot be committed.
CREATE UNIQUE INDEX transactions_open ON transactions (account, sequence)
    WHERE outcome IS NULL OR outcome IN ('included', 'failed');

-- Messages that wait for a transaction, until one that has them is included or nobody wants them any more.
CREATE TABLE posts (
    caf_file_id    bigint NOT NULL REFERENCES caf_files,
    account        text COLLATE "C" NOT NULL,
    message        bytea NOT NULL,
    charged_bytes  bigint NOT NULL CHECK (charged_bytes >= 0),  -- every copy counted
    asked_at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (caf_file_id, account)
);
CREATE INDEX posts_by_account ON posts (account, asked_at);

CREATE TABLE transaction_posts (
    hash         text NOT NULL,
    account      text COLLATE "C" NOT NULL,
    position     integer NOT NULL,                    -- of the message in the transaction
    caf_file_id  bigint NOT NULL REFERENCES caf_files,
    start        bigint,                              -- block height of the post, once included
    -- Is or may be on the chain. It ends when the transaction can no longer be included, or when the chain no longer has
    -- the post of a damaged chunk and another is asked for.
    live         boolean NOT NULL DEFAULT true,
    PRIMARY KEY (hash, position),
    FOREIGN KEY (hash, account) REFERENCES transactions (hash, account)
);
-- A chunk has one such post of an account, whatever the sequences: a second payment for the same work cannot be committed.
CREATE UNIQUE INDEX transaction_posts_live ON transaction_posts (caf_file_id, account) WHERE live;

CREATE TABLE chain_heights (
    chain_id  text COLLATE "C" PRIMARY KEY,
    height    bigint NOT NULL                         -- the greatest ever seen; answers from below it prove nothing
);

ALTER TABLE copies ADD COLUMN listed boolean NOT NULL DEFAULT true;  -- when last looked at
ALTER TABLE copies ADD COLUMN last_proven bigint;     -- block height
ALTER TABLE copies ADD COLUMN last_window bigint;     -- number of the latest proof window in which a proof was seen
ALTER TABLE copies ADD COLUMN windows integer NOT NULL DEFAULT 0;  -- different ones
ALTER TABLE copies ADD COLUMN fault text NOT NULL DEFAULT '';  -- of its bytes, when last looked at

CREATE TABLE providers (
    provider       text COLLATE "C" PRIMARY KEY,      -- address on the chain
    upload_rate    double precision,                  -- bytes a second
    download_rate  double precision,
    failures       integer NOT NULL DEFAULT 0,        -- in a row
    failed_at      timestamptz                        -- the last one
);

-- An order that is not here was not given: the settings hold.
CREATE TABLE orders (
    name        text PRIMARY KEY CHECK (name IN ('paused', 'bandwidth', 'spend_cap')),
    value       text NOT NULL CHECK (value <> ''),
    ordered_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT numbers CHECK (name = 'paused' OR value ~ '^(-1|[0-9]{1,18})$')
);
