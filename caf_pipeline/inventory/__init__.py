"""What exists and what goes where, pure.

Objects and snapshots of a source, what is current of them, the plan that cuts them into chunks, and
the manifest by which a chunk describes its objects. No clock, no environment, no network: listing a
bucket is `source`, writing a plan into the ledger is `steps.planning`.
"""
