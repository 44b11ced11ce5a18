-- Returns for each source its oldest chunk under way, skipped objects, and what was noticed. The row comparison makes the planner
-- read the index caf_files_under_way in its order: the oldest chunk under way is the first by its id.
SELECT sources.name AS source,
    (SELECT created_at FROM caf_files WHERE (caf_files.source_id, caf_file_id) > (sources.source_id, 0)
        AND caf_files.source_id <= sources.source_id AND state IN ('planned', 'packing', 'sealed')
        ORDER BY caf_files.source_id, caf_file_id LIMIT 1) AS oldest_planned_at,
    (SELECT count(*) FROM current_skips WHERE current_skips.source_id = sources.source_id) AS skipped_objects,
    sources.created_at AS registered_at,
    (SELECT read_at FROM queue_reads WHERE queue_reads.source_id = sources.source_id) AS queue_read_at,
    (SELECT taken_at FROM last_whole_inventories AS last WHERE last.source_id = sources.source_id) AS inventory_at,
    (SELECT min(noticed_at) FROM noticed_keys WHERE noticed_keys.source_id = sources.source_id) AS noticed_at,
    (SELECT count(*) FROM noticed_keys WHERE noticed_keys.source_id = sources.source_id) AS noticed_keys,
    (SELECT count(*) FROM messages_set_apart AS apart WHERE apart.source_id = sources.source_id) AS messages_set_apart,
    (SELECT count(*) FROM chunks WHERE chunks.source_id = sources.source_id AND chunk_state = 'located'
        AND copy_state = 'verified' AND suspected_at IS NOT NULL) AS suspected_chunks,
    (SELECT coalesce(max(unknown), 0) FROM store_looks WHERE store_looks.source_id = sources.source_id) AS unknown_posts
FROM sources WHERE sources.name = ANY(%(sources)s)
