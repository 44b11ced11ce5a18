-- Records a reading of an account's plan and balance; an older reading changes nothing. The latest end is kept with its space until a
-- later end is read, or a purchase of this ledger sets an earlier end.
INSERT INTO storage_plans AS old (account, read_at, balance, space_bytes, used_bytes, starts_at, ends_at, latest_end, latest_end_space)
VALUES (%(account)s, %(read_at)s, %(balance)s, %(space_bytes)s, %(used_bytes)s, %(starts_at)s, %(ends_at)s, %(ends_at)s, %(space_bytes)s)
ON CONFLICT (account) DO UPDATE SET read_at = excluded.read_at, balance = excluded.balance,
    space_bytes = excluded.space_bytes, used_bytes = excluded.used_bytes, starts_at = excluded.starts_at,
    ends_at = excluded.ends_at,
    latest_end = CASE WHEN %(bought)s THEN excluded.ends_at ELSE greatest(old.latest_end, excluded.ends_at) END,
    latest_end_space = CASE WHEN NOT %(bought)s AND old.latest_end > coalesce(excluded.ends_at, '-infinity')
        THEN old.latest_end_space ELSE excluded.space_bytes END
WHERE old.read_at <= excluded.read_at
