-- Counts the location rows, pending rows and claims of a source by chunk. One statement sees one moment: a load of locations is
-- in all of it or in none. A part counts as claimed by its chunk: the object has one claim for all parts. Own chunks take rows over
-- from a chunk of an unknown post, which therefore lacks none.
WITH located AS (SELECT caf_file_id, count(*) AS locations FROM file_locations
        WHERE source_id = %(source_id)s GROUP BY caf_file_id),
    claimed AS (SELECT caf_file_id, count(*) AS claims FROM claims
        WHERE source_id = %(source_id)s GROUP BY caf_file_id),
    sealed AS (SELECT caf_file_id, count(*) AS pending FROM pending_locations
        WHERE source_id = %(source_id)s GROUP BY caf_file_id),
    of_source AS (SELECT caf_file_id, chunks.name, chunks.state, chunks.member_count, located_count, chunks.from_unknown_post, chunks.adopted_at
        FROM chunks JOIN caf_files USING (caf_file_id) WHERE chunks.source_id = %(source_id)s)
SELECT caf_file_id, name AS chunk, state, coalesce(locations, 0) AS locations, coalesce(pending, 0) AS pending,
    CASE WHEN object_parts.part IS NULL THEN coalesce(claims, 0) WHEN state = ANY(%(claiming)s) THEN member_count ELSE 0 END
        AS claims,
    coalesce(member_count, 0) AS member_count, coalesce(CASE WHEN from_unknown_post THEN locations ELSE located_count END, 0) AS located_count, adopted_at IS NOT NULL AS adopted
FROM of_source FULL JOIN located USING (caf_file_id) FULL JOIN claimed USING (caf_file_id)
    FULL JOIN sealed USING (caf_file_id)
    LEFT JOIN object_parts USING (caf_file_id)
ORDER BY caf_file_id
