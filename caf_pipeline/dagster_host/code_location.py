"""The definitions that a command executes: our own, or those of a team's project."""

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from dagster import Definitions
from dagster.components.definitions import LazyDefinitions

from caf_pipeline.asset_keys import DEFAULT_KEYS, AssetKeys
from caf_pipeline.dagster_host.team_project import TeamProject, team_project
from caf_pipeline.defs.build import build_defs
from caf_pipeline.defs.resources import Execute
from caf_pipeline.errors import SettingsError, first_line
from caf_pipeline.naming import LOCATION_NAME, RUN
from caf_pipeline.settings import Settings
from caf_pipeline.system.unused_modules import allow_all_modules


@dataclass(frozen=True)
class CodeLocation:
    """A code location as Dagster's UI shows it, with the options of its definitions."""

    name: str
    defs: Definitions
    keys: AssetKeys
    executes: Mapping[str, Execute]

    def with_resources(self, **resources: Any) -> Definitions:  # noqa: ANN401
        """Return the assets and jobs with some other resources, and Dagster's own loggers."""
        return Definitions(
            assets=self.defs.assets,
            asset_checks=self.defs.asset_checks,
            jobs=self.defs.jobs,
            resources={**(self.defs.resources or {}), **resources},
        )


def code_location(settings: Settings, sources: Iterable[str]) -> CodeLocation:
    """Return the code location that runs these sources.

    Loads the definitions of a team's project, with the variables of its `.env`.

    Raises:
        SettingsError: they cannot be loaded, lack a source, or use another ledger.
    """
    project = team_project(settings.folder)
    if project is None:
        return CodeLocation(LOCATION_NAME, build_defs(settings), DEFAULT_KEYS, {})
    defs = _load(project)
    run: Any = (defs.resources or {}).get(RUN)
    defined = run.settings.sources if run else {}
    for source in sources:
        if source not in defined:
            raise SettingsError(
                f"the definitions of {project.root} do not have source '{source}'",
                hint="check `sources` of the component in defs.yaml",
            )
    if _places(run.settings) != _places(settings):
        raise SettingsError(
            f"{project.module} and this command have different settings for `home`, the store or "
            "the ledger",
            hint="read the same file and variables: `set -a; . ./.env` exports those of .env",
        )
    return CodeLocation(project.location_name, defs, run.asset_keys, run.executes)


def _places(settings: Settings) -> tuple[object, ...]:
    return settings.home, settings.staging_folder, settings.database_url, settings.store


@cache
def _load(project: TeamProject) -> Definitions:
    os.environ.update(project.variables)
    allow_all_modules()
    sys.path += [str(folder) for folder in (project.root / "src", project.root)]
    try:
        with chdir(project.root):
            return _definitions(importlib.import_module(project.module))
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__:
            cause = cause.__cause__
        raise SettingsError(
            f"the definitions of {project.root} cannot be loaded: {first_line(cause)}",
            hint="install caf-pipeline in the project's environment; `dg check defs` shows errors",
        ) from error


def _definitions(module: ModuleType) -> Definitions:
    values = list(vars(module).values())
    for value in values:
        if isinstance(value, LazyDefinitions) and isinstance(loaded := value(), Definitions):
            return loaded
    return next(value for value in values if isinstance(value, Definitions))
