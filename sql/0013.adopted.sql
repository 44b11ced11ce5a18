-- A CAF file of another program, which it posted and the ledger took over: it has no manifest, so that of its objects' headers
-- and user metadata nothing is known. NULL for chunks that were packed here, also where a rebuild restored them.
ALTER TABLE caf_files ADD COLUMN adopted_at timestamptz;
