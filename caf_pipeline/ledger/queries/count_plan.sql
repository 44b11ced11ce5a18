-- Counts the objects and bytes of a plan. A restored plan is as large as its chunks that the ledger has; a plan that was
-- registered has all of them.
UPDATE plans SET object_count = greatest(plans.object_count, sums.objects),
    object_bytes = greatest(plans.object_bytes, sums.bytes)
FROM (SELECT coalesce(sum(object_count) FILTER (WHERE part IS NULL), 0)
        + count(DISTINCT (file_path, version_id, etag, object_parts.object_bytes, rewritten_at))
        FILTER (WHERE part IS NOT NULL) AS objects, sum(caf_files.object_bytes) AS bytes
    FROM caf_files LEFT JOIN object_parts USING (caf_file_id) WHERE caf_files.plan_id = %(plan_id)s) AS sums
WHERE plan_id = %(plan_id)s
