-- Returns an object that a plan claims and that is located in a chunk in good standing, and that
-- chunk's name. LATERAL with LIMIT: one lookup a claim. Without statistics on the claims just
-- loaded, the planner would read all locations.
SELECT claims.file_path, located.name
FROM caf_files AS planned
JOIN claims ON claims.caf_file_id = planned.caf_file_id
CROSS JOIN LATERAL (
    SELECT chunks.name FROM file_locations AS archived JOIN chunks ON chunks.caf_file_id = archived.caf_file_id
    WHERE archived.source_id = claims.source_id AND archived.file_path = claims.file_path
        AND archived.version_id = claims.version_id AND archived.etag = claims.etag AND archived.size_bytes = claims.size_bytes
        AND archived.rewritten_at = claims.rewritten_at AND archived.part = 0 AND chunks.state = ANY(%(good)s) AND NOT from_unknown_post
    LIMIT 1) AS located
WHERE planned.plan_id = %(plan_id)s
LIMIT 1
