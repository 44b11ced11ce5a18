-- Records a check of a provider's copy. A window counts once, and not if it is earlier than the
-- last one. A gap between windows restarts the count, unless windows count apart. The count begins
-- after the last trouble: proofs from before a fault or an unlisting say nothing about the copy
-- now.
INSERT INTO replicas AS old (caf_file_id, store, provider, proof, last_proven, last_window, windows, fault)
SELECT caf_file_id, store, %(provider)s, %(proof)s, %(last_proven)s::bigint,
    CASE WHEN %(fault)s = '' THEN %(window)s::bigint END,
    CASE WHEN %(fault)s = '' AND %(window)s::bigint IS NOT NULL THEN 1 ELSE 0 END, %(fault)s
FROM chunk_copies WHERE caf_file_id = %(id)s
ON CONFLICT (caf_file_id, store, provider) DO UPDATE SET
    proof = excluded.proof, listed = true, fault = excluded.fault, checked_at = now(),
    last_proven = coalesce(excluded.last_proven, old.last_proven),
    last_window = CASE WHEN excluded.fault <> '' THEN NULL WHEN old.listed AND old.fault = ''
        THEN greatest(excluded.last_window, old.last_window) ELSE excluded.last_window END,
    windows = CASE WHEN excluded.fault <> '' THEN 0 WHEN NOT old.listed OR old.fault <> '' THEN excluded.windows
        WHEN excluded.last_window IS NULL OR excluded.last_window <= old.last_window THEN old.windows
        WHEN %(apart)s OR excluded.last_window = old.last_window + 1 THEN old.windows + 1 ELSE 1 END
