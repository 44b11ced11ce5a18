-- Returns the located chunks of all sources, each with its post and its providers. An adopted chunk has no archive id of ours.
SELECT caf_file_id, CASE WHEN adopted_at IS NULL THEN archive_id END, merkle_root, owner, start,
    ARRAY(SELECT provider FROM replicas WHERE replicas.caf_file_id = chunks.caf_file_id AND listed)
FROM chunks JOIN sources USING (source_id) WHERE chunk_state = 'located' AND copy_state = 'verified'
