-- Forgets marked keys up to a bound. A chunk that claimed an object before it came back from cold
-- storage may skip the object as cold: a restored key stays until that chunk has ended.
DELETE FROM noticed_keys USING sources WHERE noticed_keys.source_id = sources.source_id AND sources.name = %(source)s
    AND listing = %(listing)s AND (%(until)s::bytea IS NULL OR file_path <= %(until)s)
    AND NOT CASE WHEN restored THEN EXISTS (SELECT FROM claims JOIN caf_files USING (caf_file_id)
        WHERE claims.source_id = noticed_keys.source_id AND claims.file_path = convert_from(noticed_keys.file_path, 'UTF8')
            AND caf_files.created_at < noticed_at) ELSE false END
