"""Stored bytes given back: what there is, one object by one look-up and one range read, many by
few, what a stored file says.

Other programs come in by `archive`. Reading whole chunks to compare them is
`maintenance.full_read`.
"""
