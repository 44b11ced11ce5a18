-- Returns the listed objects that need no plan: claimed, skipped and not due, or located as listed, but not by an unknown post.
-- LATERAL with LIMIT keeps the planner to one lookup a key: without it, it may read all of a table
-- of 10^8 rows.
WITH asked (key, version, with_time, modified, has_version_id, is_latest) AS (SELECT * FROM unnest(CAST(%(keys)s AS text[]),
    CAST(%(versions)s AS text[]), CAST(%(with_times)s AS text[]), CAST(%(times)s AS timestamptz[]),
    CAST(%(have_ids)s AS boolean[]), CAST(%(are_latest)s AS boolean[]))),
in_parts AS MATERIALIZED (SELECT file_path, object_version(version_id, etag, size_bytes, rewritten_at) AS object_version,
        last_modified FROM objects_in_parts
    WHERE source_id = %(source_id)s AND file_path = ANY(CAST(%(keys)s AS text[])) AND NOT from_unknown_post)
SELECT key, version FROM asked
LEFT JOIN LATERAL (SELECT true AS yes FROM claims WHERE source_id = %(source_id)s AND file_path = key
    AND object_version(version_id, etag, size_bytes, rewritten_at) IN (version, with_time) LIMIT 1) AS claimed ON true
LEFT JOIN LATERAL (SELECT true AS yes FROM skipped_objects WHERE source_id = %(source_id)s AND file_path = key
    AND object_version(version_id, etag, size_bytes, rewritten_at) IN (version, with_time)
    AND retry_at > now() LIMIT 1) AS skipped ON true
LEFT JOIN LATERAL (SELECT stated_at, object_version FROM current_exceptions
    WHERE source_id = %(source_id)s AND file_path = key ORDER BY stated_at DESC LIMIT 1) AS stated ON true
LEFT JOIN LATERAL (SELECT object_version FROM current_exceptions WHERE source_id = %(source_id)s AND file_path = key
    AND last_modified = modified AND starts_with(object_version, version) ORDER BY stated_at DESC LIMIT 1) AS compared ON true
LEFT JOIN LATERAL (
    SELECT max(known.last_modified) AS latest, max(known.last_modified) FILTER (WHERE is_it) AS last_modified,
        max(known.object_version) FILTER (WHERE is_it) AS object_version
    FROM (SELECT object_version(version_id, etag, size_bytes, rewritten_at) AS object_version, last_modified
        FROM file_locations JOIN chunks USING (caf_file_id)
        WHERE file_locations.source_id = %(source_id)s AND file_path = key AND part = 0 AND state = ANY(%(good)s)
            AND NOT from_unknown_post
        UNION ALL SELECT object_version, last_modified FROM in_parts WHERE file_path = key) AS known
    CROSS JOIN LATERAL (SELECT known.object_version IN (with_time, compared.object_version)
        OR known.object_version = version AND (has_version_id OR known.last_modified = modified) AS is_it) AS identity
    ) AS located ON true
WHERE claimed.yes OR skipped.yes OR CASE WHEN NOT is_latest THEN located.object_version IS NOT NULL
    WHEN stated.stated_at >= latest THEN stated.object_version = located.object_version ELSE located.last_modified = latest END
