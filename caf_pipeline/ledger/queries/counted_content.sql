-- Returns the counts of the latest whole inventory that was counted. `located_since` counts the objects of the inventory's own
-- plans that were located after the count: they are current if the inventory lists current objects only.
SELECT name, taken_at, counted_at, all_versions, beside, left_out,
    older_objects AS older, gone_objects AS gone, current_objects AS current,
    (SELECT coalesce(sum(member_count), 0) FROM chunks JOIN plans USING (plan_id)
        WHERE chunks.source_id = %(source_id)s AND plans.snapshot = inventories.name AND located_at > counted_at
        AND state = ANY(%(good)s) AND NOT from_unknown_post AND NOT EXISTS (SELECT FROM object_parts
            WHERE object_parts.caf_file_id = chunks.caf_file_id))
    + (SELECT count(*) FROM objects_in_parts AS whole JOIN plans USING (plan_id)
        WHERE whole.source_id = %(source_id)s AND plans.snapshot = inventories.name AND located_at > counted_at)
        AS located_since
FROM inventories
WHERE source_id = %(source_id)s AND counted_at IS NOT NULL AND after_key = '' AND until_key IS NULL
ORDER BY taken_at DESC, name DESC LIMIT 1
