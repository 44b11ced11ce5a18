-- Counts a run of a chunk that failed on objects, once for each object.
INSERT INTO read_failures AS old (caf_file_id, file_path, object_version, last_run)
SELECT DISTINCT caf_file_id, key, version, %(run)s
FROM caf_files, unnest(CAST(%(keys)s AS text[]), CAST(%(versions)s AS text[])) AS failed (key, version)
WHERE name = %(chunk)s
ON CONFLICT (caf_file_id, file_path, object_version) DO UPDATE SET
    times = old.times + CASE WHEN old.last_run = excluded.last_run THEN 0 ELSE 1 END, last_run = excluded.last_run
