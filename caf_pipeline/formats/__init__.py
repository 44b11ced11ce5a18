"""Other file formats, pure like `caf`.

ChunkIO, in which the packing journal is written; the metadata of clp-s archives; tar archives, and
cotar, the index of one. Reading and writing files of these formats at a place is `cli`, what a
journal's entries mean is `packing.journal`.
"""
