"""The storage under the name that a dagster.yaml of version 0.3.0 gives it; it is in `dagster_host.storage`."""

from caf_pipeline.dagster_host.storage import ChosenStorage

__all__ = ["ChosenStorage"]
