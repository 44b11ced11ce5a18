"""The state of sources, plans, chunks and objects, in Postgres.

No step decides anything here. `chunk_state` says which moves are legal; the ledger makes a move
only when a caller requests it.
"""
