"""Adapters that list and read a source's objects; only `wiring` opens one.

S3 is the only kind of source.
"""
