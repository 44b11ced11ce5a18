-- Returns how many objects of a source are located in parts, their bytes, and how many claims are on objects in parts.
SELECT count(*) AS objects, coalesce(sum(size_bytes), 0)::bigint AS bytes,
    (SELECT count(*) FROM claims JOIN object_parts USING (caf_file_id)
        WHERE object_parts.source_id = %(source_id)s) AS claimed
FROM objects_in_parts WHERE source_id = %(source_id)s
