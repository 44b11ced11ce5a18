"""Archives S3 objects on Jackal: inventory, chunks, proofs, and one look-up for each object.

Modules beside the folders serve several of them, start a process, or open what the settings name.
`docs/explanation/architecture.md` describes the folders, and which may import which.
"""
