"""Where chunks are kept: a folder, or Jackal. Only `wiring` opens one; each passes the contract suite of a store."""
