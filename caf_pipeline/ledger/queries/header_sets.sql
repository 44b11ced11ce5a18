-- Returns header sets by their names.
SELECT header_set, content_type, content_encoding, content_language, content_disposition, cache_control, expires, user_metadata
FROM header_sets WHERE header_set = ANY(%(names)s)
