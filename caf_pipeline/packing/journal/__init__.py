"""The packing journal, with which the next run resumes an interrupted packing.

`formats.chunkio` defines how an entry lies in its file.
"""
