-- Returns whether a load changed so much of file_locations since its statistics were made, that the planner may scan the table. It
-- is the rule of autovacuum, which hardly comes to an embedded server. Only an owner may make statistics.
SELECT pg_stat_get_mod_since_analyze(oid) + %(written)s > 50 + greatest(reltuples, 0) / 10 AND pg_has_role(relowner, 'USAGE')
FROM pg_class WHERE oid = 'file_locations'::regclass
