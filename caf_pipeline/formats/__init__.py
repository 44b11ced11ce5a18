"""Other file formats, without I/O: age, ChunkIO, clp-s, tar, and the cotar index of a tar."""
