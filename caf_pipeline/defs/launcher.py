"""The run launcher under the name that a dagster.yaml of version 0.3.0 gives it; it is in `dagster_host.run_launcher`."""

from caf_pipeline.dagster_host.run_launcher import CheckedRunLauncher

__all__ = ["CheckedRunLauncher"]
