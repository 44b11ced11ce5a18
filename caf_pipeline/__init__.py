"""Archives S3 objects on Jackal: inventory, chunks, proofs, and one look-up for each object.

`docs/architecture.md` says which folder holds what and may import whom.
"""
