"""The state of sources, plans, chunks and objects, in Postgres.

The ledger makes a move only when a caller requests it; `chunk_state` says which moves are legal.
"""
