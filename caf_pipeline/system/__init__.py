"""Operating system and network. S3 and Jackal are in `source` and `store`.

Files that survive a crash, folder locks, files below a folder, Parquet, ranges of a file; public
addresses, HTTP with limits, deadlines, alerts by webhook and e-mail; environments of child
processes, pipeline threads, numbers and sizes as text.
"""
