-- What live runs wait for now. See "Waiting" in docs/operations.md.

-- A process writes its own rows and renews them while it waits; rows of a process that is dead, or that have run out by the
-- database's clock, are no waits.
CREATE TABLE waits (
    run              text NOT NULL,
    boot_id          text NOT NULL,
    pid              bigint NOT NULL,
    process_started  double precision NOT NULL,
    source           text COLLATE "C" NOT NULL,
    chunk            text COLLATE "C" NOT NULL,  -- '' where the run works on none
    what             text NOT NULL,
    ends_by          text NOT NULL,
    since            timestamptz NOT NULL,
    expires_at       timestamptz NOT NULL
);
