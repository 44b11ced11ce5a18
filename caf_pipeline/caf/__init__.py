"""The CAF file format: its index, reading and writing, and the Merkle root of a file on Jackal.

Pure: no clock, no environment, no network, no chunks and no objects. `inventory.manifest` handles
the members that describe S3's objects.
"""
