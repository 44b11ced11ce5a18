-- Returns the located chunks of all sources, each with its post and its providers. An adopted chunk has no archive id of ours.
SELECT caf_file_id, CASE WHEN adopted_at IS NULL THEN coalesce(copies.archive_id, sources.archive_id) END,
    chunks.merkle_root, chunks.owner, chunks.start,
    ARRAY(SELECT provider FROM replicas WHERE replicas.caf_file_id = chunks.caf_file_id AND listed)
FROM chunks JOIN sources USING (source_id) JOIN chunk_copies AS copies USING (caf_file_id, store)
WHERE chunk_state = 'located' AND copy_state = 'verified'
