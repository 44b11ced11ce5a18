"""One chunk into staging: its objects fetched side by side, written as one CAF file and into its
Merkle root, sampled.

States and claims are `steps.chunk_steps`; where chunks are kept is `store`.
"""
