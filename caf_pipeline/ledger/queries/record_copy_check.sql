-- Records a check of a chunk's copy. The next check is due in `again_in` seconds if too few
-- providers' copies have the required windows.
UPDATE chunk_copies SET checked_at = now(), suspected_at = NULL, unanswered_at = CASE WHEN %(unanswered)s THEN now() END,
    look_again_at = CASE WHEN %(enough)s > (SELECT count(*) FROM replicas WHERE caf_file_id = %(id)s AND listed AND fault = ''
        AND windows >= %(required)s) THEN now() + make_interval(secs => %(again_in)s::double precision) END
WHERE caf_file_id = %(id)s
