"""`caf run` under the names that the entry point of an earlier installation has; it is in `dagster_host.run_source`."""

from caf_pipeline.dagster_host.run_source import run_command

run_source = run_command  # version 0.3.0

__all__ = ["run_command", "run_source"]
