"""Finds the commands that need Dagster: they are in `dagster_host`, which the command line does not
import.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from caf_pipeline.errors import CafError


def dagster_command(name: str) -> Callable[..., Any]:
    """Return a function of `dagster_host` by its entry point, since the command line does not
    import that folder.

    Raises: CafError: the installation is older than this source code, and does not have the entry
        point.
    """
    for entry in entry_points(group="caf_pipeline.commands", name=name):
        command: Callable[..., Any] = entry.load()
        return command
    raise CafError(
        f"the installation has no entry point '{name}'",
        hint="install caf-pipeline again, as `make setup` does",
    )
