-- Returns the time of the latest inventory before the given one that covers the key.
SELECT max(earlier.taken_at)
FROM inventories AS own JOIN inventories AS earlier ON earlier.source_id = own.source_id
    AND (earlier.taken_at, earlier.name) < (own.taken_at, own.name)
WHERE own.source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND own.name = %(inventory)s
    AND earlier.after_key < %(key)s AND coalesce(earlier.until_key >= %(key)s, true)
