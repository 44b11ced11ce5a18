"""Stores of chunks: a folder, or Jackal.

A store knows stored bytes and their Merkle root, but no objects. `ledger` records what the copies
are, and `steps` decides when a chunk is posted, uploaded and read back. Only `wiring` opens a
store. Each implementation passes the contract suite.
"""
