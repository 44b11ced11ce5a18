-- Returns the longest beginnings of a key that archived keys have, at most 16, in any case of their characters. `swapped` is the key
-- with the case of each character swapped. Each step takes two look-ups in the primary key's index.
WITH RECURSIVE own AS (SELECT source_id FROM sources WHERE name = %(source)s),
steps (length, beginning) AS (
    SELECT 0, '' COLLATE "C"
    UNION ALL
    SELECT length, beginning FROM (
        SELECT steps.length + 1 AS length, next.beginning
        FROM steps CROSS JOIN LATERAL (
            SELECT steps.beginning || substr(%(key)s, steps.length + 1, 1)
            UNION SELECT steps.beginning || substr(%(swapped)s, steps.length + 1, 1)) AS next (beginning)
        WHERE steps.length < char_length(%(key)s) AND starts_with((
            SELECT file_path FROM file_locations WHERE source_id = (SELECT source_id FROM own) AND file_path >= next.beginning
            ORDER BY file_path LIMIT 1), next.beginning)
        LIMIT 16) AS few)
SELECT beginning FROM steps WHERE length = (SELECT max(length) FROM steps) ORDER BY beginning
