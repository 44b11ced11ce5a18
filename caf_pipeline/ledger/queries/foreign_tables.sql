-- Returns the tables and views of other programs, which a backup leaves out. pg_dump takes their names as patterns.
SELECT format('%%I.%%I', nspname, relname) FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE relkind IN ('r', 'p', 'v', 'm', 'f') AND nspname NOT IN ('pg_catalog', 'information_schema')
    AND nspname NOT LIKE 'pg\_toast%%' AND NOT (nspname = current_schema() AND relname = ANY(%(ours)s))
