"""Finds commands that need Dagster by entry point: `cli` never imports `dagster_host`."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, cast

from caf_pipeline.errors import CafError


def dagster_command(name: str) -> Callable[..., Any]:
    """Return a function of `dagster_host` by its entry point. Raises CafError if it is missing."""
    for entry in entry_points(group="caf_pipeline.commands", name=name):
        return cast(Callable[..., Any], entry.load())
    raise CafError(
        f"the installation has no entry point '{name}'",
        hint="install caf-pipeline again, as `make setup` does",
    )
