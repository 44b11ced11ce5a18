-- Returns when an inventory that is planned was taken.
SELECT taken_at FROM inventories
WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND name = %(name)s
