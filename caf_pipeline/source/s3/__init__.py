"""S3 and whatever speaks its API: clients, listings, exact GETs, and what S3's error codes mean.

Many GETs side by side are `packing.prefetch`.
"""
