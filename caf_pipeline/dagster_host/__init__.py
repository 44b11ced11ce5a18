"""The processes around Dagster.

`caf run` with its worker processes, `caf backfill`, `caf setup`, `caf runs` and `caf remove`; run
launchers (this machine, Celery, Kubernetes), storage, DAGSTER_HOME, logs, Ctrl-C, the progress bar.
The definitions (assets, jobs, sensors) are in `defs`.
"""
