-- Returns the rows of look_up as of a time. An exception is the last one stated up to then; the
-- first one stated later comes as 'next'. LATERAL with LIMIT keeps the planner to one lookup a key.
SELECT * FROM look_up(%(source)s, %(keys)s, %(good)s) WHERE kind <> 'exception'
UNION ALL
SELECT stated.kind, asked.key, stated.object_version, stated.stated_at, NULL, NULL, stated.inventory, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM unnest(%(keys)s::text[]) AS asked (key)
CROSS JOIN (SELECT source_id FROM sources WHERE name = %(source)s) AS own
CROSS JOIN LATERAL (
    (SELECT 'exception' AS kind, object_version, stated_at, inventory FROM current_exceptions
        WHERE source_id = own.source_id AND file_path = asked.key AND stated_at <= %(as_of)s ORDER BY stated_at DESC LIMIT 1)
    UNION ALL
    (SELECT 'next', object_version, stated_at, inventory FROM current_exceptions
        WHERE source_id = own.source_id AND file_path = asked.key AND stated_at > %(as_of)s ORDER BY stated_at LIMIT 1)
    ) AS stated
