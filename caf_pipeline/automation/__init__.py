"""The decisions of sensors and jobs: launching, new objects, alerts, pruning, restoring, dead runs.

The definitions that Dagster loads are in `defs`. This package imports nothing private of Dagster.
"""
