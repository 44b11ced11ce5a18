"""The doctor: finds what a crash can leave of a source, says it, and mends what can be mended
without a run.

What only a run can go on with is left to `steps`. Findings are printed by `cli.doctor`.
"""
