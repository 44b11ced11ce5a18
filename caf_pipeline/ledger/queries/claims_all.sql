-- Returns whether a chunk claims as many objects as it has.
SELECT (SELECT count(*) FROM claims WHERE caf_file_id = %(id)s) = member_count FROM caf_files WHERE caf_file_id = %(id)s
