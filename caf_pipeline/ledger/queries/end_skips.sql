-- Makes skips due since a time, except skips of objects modified after another time.
UPDATE skipped_objects SET retry_at = %(listed_at)s
FROM unnest(%(keys)s::text[], %(versions)s::text[]) AS gone (key, version)
WHERE source_id = %(source_id)s AND file_path = gone.key
    AND object_version(version_id, etag, size_bytes, rewritten_at) = gone.version
    AND retry_at > %(listed_at)s AND coalesce(last_modified, last_at) < %(silent_from)s
