"""The CAF file format: its index, its bytes written and read, and the Merkle root that Jackal knows
a file by.

Pure: no clock, no environment, no network, and nothing of chunks or objects. What an archive's own
members say of S3's objects is `inventory.manifest`.
"""
