"""What an interrupted packing leaves, so that the next run resumes it.

The journal's entries, when they are written, how they are replayed against the staged bytes, and
who takes the files over. How an entry lies in its file is `formats.chunkio`; what else a crash
leaves is found by `maintenance.doctor`.
"""
