"""Stored bytes given back: what there is, one object by one look-up and one range read, what a stored file says as a chunk.

Reading whole chunks to compare them is `maintenance.full_read`.
"""
