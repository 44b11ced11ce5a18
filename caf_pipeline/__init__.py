"""Archives S3 objects on Jackal: inventory, chunks, proofs, and one look-up for each object.

`docs/design.md` says which module holds what, and `interfaces` is the architecture on one page.
"""
