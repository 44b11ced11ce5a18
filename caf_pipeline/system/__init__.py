"""The operating system and the wire.

Files that survive a crash, folder locks, files below a folder, Parquet, ranges of a file;
addresses, guarded HTTP, deadlines, messages to people; the environment of child processes, work
done ahead, looking for garbage; numbers and sizes as people read them. Nothing here knows what a
chunk is: what S3 and Jackal say over the wire is `source` and `store`.
"""
