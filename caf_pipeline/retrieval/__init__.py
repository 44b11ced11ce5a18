"""Reads archived objects back: looks them up, lists them, reads one or many, and restores them.

Other programs use `archive.Archive`. `maintenance.full_read` reads whole chunks to compare them.
"""
