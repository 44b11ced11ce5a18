-- Returns whether chunks of the latest counted inventory, or of an earlier one, were located after
-- the count. `counted_content` counts chunks of the counted inventory's own plans, unless the
-- inventory lists older versions, too.
WITH counted AS (SELECT name, taken_at, counted_at, all_versions FROM inventories
    WHERE source_id = %(source_id)s AND counted_at IS NOT NULL AND after_key = '' AND until_key IS NULL
    ORDER BY taken_at DESC, name DESC LIMIT 1)
SELECT EXISTS (SELECT FROM counted CROSS JOIN chunks JOIN plans USING (plan_id)
    JOIN inventories ON inventories.source_id = chunks.source_id AND inventories.name = plans.snapshot
    WHERE chunks.source_id = %(source_id)s AND located_at > counted.counted_at AND NOT from_unknown_post
    AND inventories.taken_at <= counted.taken_at AND (inventories.name <> counted.name OR counted.all_versions))
