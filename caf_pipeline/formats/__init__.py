"""Other formats, without I/O: age, ChunkIO, clp-s, tar, cotar. `cli` reads and writes files."""
