"""Other file formats, pure like `caf`: ChunkIO, in which the packing journal is written, and the metadata of clp-s archives."""
