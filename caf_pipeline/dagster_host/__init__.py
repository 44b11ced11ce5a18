"""The process around Dagster.

`caf run` with its worker processes, `caf backfill`, `caf setup` and `caf runs`; run launchers (this
machine, Celery, Kubernetes), storage, DAGSTER_HOME, logs, Ctrl-C, the progress bar. Dagster's own
concepts (assets, jobs, sensors) are `defs`; the commands that need no Dagster are `cli`.
"""
