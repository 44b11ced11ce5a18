-- The folder that has the chunks of this ledger, if they are in a folder: the id in its file "store-id".
CREATE TABLE folder_store (
    only_row  boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    id        text NOT NULL CHECK (id ~ '^[0-9a-f]{32}$'),
    marked    boolean NOT NULL  -- false until a folder with this id was seen: an earlier version wrote no file
);

-- What the chain last said of the space that an account bought, and of its coins.
CREATE TABLE storage_plans (
    account      text COLLATE "C" PRIMARY KEY,  -- <chain id>/<address>
    read_at      timestamptz NOT NULL,          -- time of the chain's latest block then
    balance      bigint NOT NULL,               -- ujkl
    space_bytes  bigint,                        -- all three are NULL if there is no plan
    used_bytes   bigint,
    ends_at      timestamptz,
    -- The latest end that was seen since the last purchase of this ledger, and the space then.
    latest_end        timestamptz,
    latest_end_space  bigint
);
