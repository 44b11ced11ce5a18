"""Other file formats, without I/O: ChunkIO, clp-s, tar, and the cotar index of a tar.

`cli` reads and writes such files.
"""
