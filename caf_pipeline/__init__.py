"""Archives S3 objects on Jackal: inventory, chunks, proofs, and one look-up for each object.

Directly here is what several folders need (settings, errors, a chunk's states, what a step works
with, waits) and what starts a process or opens what the settings name; all else belongs in a
folder. `docs/explanation/architecture.md` says which, and who may import whom.
"""
