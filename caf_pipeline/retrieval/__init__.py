"""Stored bytes given back: one object by one look-up and one range read, and what a stored file says of itself as a chunk.

Reading whole chunks to compare them is `maintenance.full_read`.
"""
