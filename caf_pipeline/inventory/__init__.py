"""Snapshots of a source, chunk plans and manifests, without clock, environment or network.

Finds out which objects are current, which are not yet archived, and which chunk each goes to.
`source` lists buckets, and `steps.planning` records plans in the ledger.
"""
