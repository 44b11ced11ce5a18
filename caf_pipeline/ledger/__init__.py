"""What is known, in Postgres.

Sources, plans, chunks and their guarded moves, leases, locations, proofs, transactions, and the
orders that operators give while runs go on. No step decides anything here: a move is allowed or
refused (`chunk_state`), and never made by itself.
"""
