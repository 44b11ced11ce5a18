"""Operating system and network. Nothing here knows about chunks, S3 or Jackal.

Files that survive a crash, folder locks, files below a folder, Parquet, ranges of a file; public
addresses, HTTP with limits, deadlines, alerts by webhook and e-mail; environments of child
processes, pipeline threads, numbers and sizes as text.
"""
