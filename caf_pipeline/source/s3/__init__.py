"""S3 and compatible servers: clients, listings, exact GETs, and the meaning of S3's error codes.

Reading many objects concurrently is in `packing`.
"""
