-- Writes the exceptions of the temporary table `stating`, replacing those of the same moment. A
-- comparison of headers stays recorded while the identity is the same.
INSERT INTO current_exceptions AS old (source_id, file_path, stated_at, object_version, last_modified, inventory)
SELECT %(source_id)s, file_path, stated_at, object_version, last_modified, %(inventory)s FROM stating
ON CONFLICT (source_id, file_path, stated_at) DO UPDATE SET
    inventory = excluded.inventory, object_version = excluded.object_version,
    last_modified = CASE WHEN old.object_version = excluded.object_version
        THEN coalesce(excluded.last_modified, old.last_modified) ELSE excluded.last_modified END
