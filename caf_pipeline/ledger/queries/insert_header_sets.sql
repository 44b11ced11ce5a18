-- Inserts the header sets of the table naming that are new. All transactions insert in one order: two that insert the same sets
-- in different orders would wait for each other.
INSERT INTO header_sets
SELECT DISTINCT ON (header_set) header_set, content_type, content_encoding, content_language, content_disposition,
    cache_control, expires, user_metadata::jsonb
FROM naming ORDER BY header_set
ON CONFLICT DO NOTHING
