"""The process around Dagster: `caf run` in one process, the run launcher, storage, DAGSTER_HOME, Ctrl-C, the progress bar.

Dagster's own concepts (assets, jobs, sensors) are `defs`.
"""
