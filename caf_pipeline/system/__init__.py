"""The operating system and the wire.

Files that survive a crash, folder locks, Parquet, addresses, deadlines, ranges of a file, the environment of child processes.
Nothing here knows what a chunk is.
"""
