"""Decides which objects may be deleted at their `source`. S3 deletes them, from a list."""
