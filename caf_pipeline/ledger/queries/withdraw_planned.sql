-- Withdraws those of these chunks that are only planned. SKIP LOCKED: another run moves a locked
-- chunk, and notices.
UPDATE caf_files SET state = 'withdrawn', updated_at = now(), reason = 'another part of its object cannot be archived: '
    || (SELECT name || ' is ' || CAST(%(after)s AS text) FROM caf_files WHERE caf_file_id = %(id)s)
WHERE caf_file_id IN (SELECT caf_file_id FROM caf_files
    WHERE caf_file_id = ANY(%(all)s) AND state = 'planned' FOR NO KEY UPDATE SKIP LOCKED)
