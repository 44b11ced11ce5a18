-- Returns the operator's orders as a JSON object, and how many chunks a live run uploads or
-- repairs, at one moment. A released lease has expired.
SELECT (SELECT coalesce(json_object_agg(name, value), '{}') FROM orders) AS orders, (
    SELECT count(*) FROM chunks JOIN leases ON leases.name = %(prefix)s || chunks.name
    WHERE state = ANY(%(states)s) AND expires_at > clock_timestamp()) AS uploads
