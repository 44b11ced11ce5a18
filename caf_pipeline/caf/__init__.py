"""The CAF file format: its index, reading and writing, and Jackal's Merkle root of a file.

Pure: no clock, no environment, no network. `inventory.manifest` handles S3's objects.
"""
