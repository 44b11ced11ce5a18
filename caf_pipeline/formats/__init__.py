"""Other file formats: ChunkIO logs, clp-s archives, tar archives, and their cotar index.

Like `caf`, this package does no I/O. `cli` reads and writes files of these formats, and
`packing.journal` defines the entries of a journal.
"""
