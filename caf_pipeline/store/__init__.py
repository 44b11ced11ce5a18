"""Stores of chunks: a folder, or Jackal.

A store knows stored bytes and their Merkle root, but no objects. `ledger` records the copies,
`steps` posts and reads them. Only `wiring` opens a store.
"""
