"""The packing journal, with which the next run resumes an interrupted packing.

It covers the entries, the pace of writing, the replay against staged bytes, and the takeover of
files. `formats.chunkio` defines how an entry lies in its file. `maintenance.doctor` finds other
remains of a crash.
"""
