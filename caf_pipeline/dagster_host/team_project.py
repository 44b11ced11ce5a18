"""Finds the Dagster project of a team that a folder belongs to, by the rules of `dg`."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from caf_pipeline.errors import SettingsError

HOME_VARIABLE: Final = "DAGSTER_HOME"

_OWN_MODULE: Final = "caf_pipeline"


@dataclass(frozen=True)
class TeamProject:
    """A Dagster project that is not this software's.

    Attributes:
        location_name: the code location, as `dg dev` names it.
        module: has the project's definitions.
    """

    root: Path
    location_name: str
    module: str

    @cached_property
    def variables(self) -> Mapping[str, str]:
        """The variables of `.env`, which win over the environment, as in `dg`."""
        from dotenv import dotenv_values  # noqa: PLC0415 - only a team's project needs it

        values = dotenv_values(self.root / ".env")
        return {name: value for name, value in values.items() if value is not None}

    @property
    def dagster_home(self) -> Path:
        """The project's DAGSTER_HOME. Raises a SettingsError if it is not set to a folder."""
        value = self.variables.get(HOME_VARIABLE) or os.environ.get(HOME_VARIABLE, "")
        folder = Path(value).expanduser()
        if not value or not folder.is_absolute() or not folder.is_dir():
            problem = f"is not a folder: {value}" if value else "is not set"
            raise SettingsError(
                f"{self.root} is a Dagster project, and {HOME_VARIABLE} {problem}",
                hint=f"set {HOME_VARIABLE} to the absolute path that `dg dev` uses, or run the "
                "source by `dg launch --assets …`",
            )
        return folder


def team_project(folder: Path) -> TeamProject | None:
    """Return the nearest project at or above a folder, unless it is this software's."""
    for root in (folder, *folder.parents):
        values = _dg_values(root)
        project = values.get("project", {})
        if module := project.get("root_module"):
            if module == _OWN_MODULE:
                return None
            return TeamProject(
                root=root,
                location_name=project.get("code_location_name") or root.name,
                module=project.get("code_location_target_module") or f"{module}.definitions",
            )
    return None


def _dg_values(folder: Path) -> Mapping[str, Any]:
    # `dg` ignores pyproject.toml if there is a dg.toml.
    for name, keys in (("dg.toml", ()), ("pyproject.toml", ("tool", "dg"))):
        try:
            values: dict[str, Any] = tomllib.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none, or not TOML
            continue
        for key in keys:
            values = values.get(key, {})
        return values
    return {}
