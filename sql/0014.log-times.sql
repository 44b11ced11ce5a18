-- Archives of logs that clp-s packed, by which a search picks them: first and last time in milliseconds since 1970, both inclusive.
CREATE TABLE log_times (
    caf_file_id  bigint NOT NULL,
    start_byte   bigint NOT NULL,  -- as of the location
    first_ms     bigint,           -- NULL: the archive does not tell, so that it is searched whatever times are asked for
    last_ms      bigint,
    PRIMARY KEY (caf_file_id, start_byte)
);

-- Whether the chunk's packing looked for such archives: then all that it has are in log_times.
ALTER TABLE caf_files ADD COLUMN has_log_times boolean NOT NULL DEFAULT false;
