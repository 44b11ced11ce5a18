-- Writes the parts of the table splitting. Parts of other plans keep their rows: location_part gets numbers that no other plan
-- has. A plan has less than 100,000 chunks. MATERIALIZED: the subqueries run once for an object. Run for each part, they would
-- pass over the rows that this statement has already written.
WITH numbered AS MATERIALIZED (
    SELECT file_path, version_id, etag, object_bytes, rewritten_at, coalesce(
        (SELECT min(old.location_part - old.part) FROM object_parts AS old WHERE old.plan_id = %(plan_id)s
            AND (old.file_path, old.version_id, old.etag, old.object_bytes, old.rewritten_at)
                = (object.file_path, object.version_id, object.etag, object.object_bytes, object.rewritten_at)),
        (SELECT 100000 * count(DISTINCT old.plan_id) FROM object_parts AS old WHERE old.source_id = %(source_id)s
            AND (old.file_path, old.version_id, old.etag, old.object_bytes, old.rewritten_at)
                = (object.file_path, object.version_id, object.etag, object.object_bytes, object.rewritten_at))
        ) AS parts_before
    FROM (SELECT DISTINCT file_path, version_id, etag, object_bytes, rewritten_at FROM splitting) AS object)
INSERT INTO object_parts (plan_id, source_id, caf_file_id, file_path, version_id, etag, object_bytes, rewritten_at, part,
    part_count, start_byte, end_byte, location_part)
SELECT %(plan_id)s, %(source_id)s, caf_file_id, file_path, version_id, etag, object_bytes, rewritten_at, part, part_count,
    start_byte, end_byte, part + parts_before
FROM splitting JOIN numbered USING (file_path, version_id, etag, object_bytes, rewritten_at)
