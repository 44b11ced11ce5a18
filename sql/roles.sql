-- Three roles for a ledger on your own server. Run this file as the owner of the tables, in the
-- ledger's database, and again after an upgrade: psql -f roles.sql. Then grant a role to each user:
-- GRANT caf_reader TO somebody.

-- Reads archived objects and the whole ledger, but no secret or key.
DO $$ BEGIN CREATE ROLE caf_reader NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
GRANT SELECT ON ALL TABLES IN SCHEMA public TO caf_reader;
REVOKE SELECT ON packing_secrets, post_keys FROM caf_reader;

-- Plans, packs, uploads and locates. A worker may delete a full read that no longer counts, but
-- cannot record one.
DO $$ BEGIN CREATE ROLE caf_worker NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO caf_worker;
REVOKE INSERT, UPDATE, DELETE ON schema_files FROM caf_worker;
REVOKE INSERT, UPDATE ON full_reads FROM caf_worker;

-- Reads whole chunks and records that: 'caf safe-to-delete' runs as a verifier.
DO $$ BEGIN CREATE ROLE caf_verifier NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
GRANT caf_worker TO caf_verifier;
GRANT INSERT, UPDATE ON full_reads TO caf_verifier;
