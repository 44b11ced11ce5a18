-- Returns what an operator has set, as an object of names and values, and how many chunks are uploaded or repaired by a live run: both
-- at one moment. A lease that was given back has expired.
SELECT (SELECT coalesce(json_object_agg(name, value), '{}') FROM orders) AS orders, (
    SELECT count(*) FROM chunks JOIN leases ON leases.name = %(prefix)s || chunks.name
    WHERE state = ANY(%(states)s) AND expires_at > clock_timestamp()) AS uploads
