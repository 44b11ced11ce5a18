"""Decides which objects may be deleted at their source, and writes the list of them.

Nothing here deletes: S3 does, from the list. `source.protocol` lists the source.
"""
