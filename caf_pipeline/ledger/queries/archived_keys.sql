-- Returns the first keys of a range that have locations. Only the primary key's index is read; a part of an object has a row of its own.
SELECT DISTINCT file_path FROM file_locations
WHERE source_id = (SELECT source_id FROM sources WHERE name = %(source)s) AND file_path >= %(start)s
    AND file_path < %(end)s
ORDER BY file_path LIMIT %(limit)s
