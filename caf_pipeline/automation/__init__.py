"""What sensors, schedules and jobs decide: launching, new objects, alerts, pruning, restoring, runs whose process is dead.

The definitions that Dagster loads are in `defs`. This package imports nothing of Dagster's private modules.
"""
