-- Adds a source's secret of the MACs in its posts, unless it has one.
INSERT INTO post_keys (source_id, key) SELECT source_id, %(key)s FROM sources WHERE name = %(source)s
ON CONFLICT DO NOTHING
