"""Where chunks are kept: a folder, or Jackal.

Only `wiring` opens one; each passes the contract suite of a store.

A store knows stored bytes and their Merkle root, and nothing of objects. What is recorded of copies
is `ledger`, when a chunk is posted, uploaded and read back is `steps`, and whom a single object is
read from is `retrieval`.
"""
