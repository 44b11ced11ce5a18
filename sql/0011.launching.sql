-- What the sensor that launches chunks asks every half minute: by an index, so that a look costs the same beside 10^5 chunks.

-- The states are UNDER_WAY of chunk_state.py.
CREATE INDEX caf_files_under_way ON caf_files (source_id, caf_file_id)
    WHERE state IN ('planned', 'packing', 'sealed', 'posting', 'posted', 'uploading', 'verified');
CREATE INDEX caf_files_by_located ON caf_files (source_id, located_at) WHERE located_at IS NOT NULL;
