-- Returns the address of a source, and how many plans and chunks it has.
SELECT address, (SELECT count(*) FROM plans WHERE plans.source_id = sources.source_id) AS plans,
    (SELECT count(*) FROM caf_files WHERE caf_files.source_id = sources.source_id) AS chunks
FROM sources WHERE source_id = %(id)s
