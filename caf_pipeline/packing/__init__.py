"""Packing writes one chunk into staging: it fetches objects and builds one CAF file.

`steps.chunk_steps` decides when a chunk is packed. `store` keeps finished chunks.
"""
