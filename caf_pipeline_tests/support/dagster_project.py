"""A Dagster project as `create-dagster project` makes it, with definitions of a team's own."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from caf_pipeline_tests.support.command_line import FOREIGN, KEYS, PLACE_VARIABLE
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS

_PYPROJECT = """
[project]
name = "team"
requires-python = ">=3.11"
version = "0.1.0"

[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "team"
registry_modules = ["team.components.*"]

[tool.dg.cli]
suppress_warnings = ["project_and_activated_venv_mismatch"]
"""

_DEFINITIONS = """
from pathlib import Path

from dagster import definitions, load_from_defs_folder


@definitions
def defs():
    return load_from_defs_folder(path_within_project=Path(__file__).parent)
"""

_OWN = """
import dagster as dg


@dg.asset
def numbers(store: dg.ResourceParam[str]) -> str:
    return store


@dg.op
def load_batch() -> int:
    return 1


@dg.job
def archive_photos():
    load_batch()


@dg.schedule(job=archive_photos, cron_schedule="0 0 * * *")
def nightly():
    return {}


defs = dg.Definitions(
    assets=[numbers],
    jobs=[archive_photos],
    schedules=[nightly],
    resources={"store": "theirs"},
    executor=dg.multiprocess_executor,
)
"""
"""Its names are plain names that an archive might have, too."""


@dataclass(frozen=True)
class DagsterProject:
    """The project's root; `dg` works in it, with the packages of a folder before others."""

    root: Path
    packages: Path | None = None

    @property
    def defs(self) -> Path:
        return self.root / "src" / "team" / "defs"

    @property
    def home(self) -> Path:
        return self.root / "dagster_home"

    def dg(self, *arguments: str, program: str = "dg") -> "subprocess.CompletedProcess[str]":
        """Run `dg`, or another program, with the test server's keys. It must succeed."""
        done = subprocess.run(
            [str(Path(sys.executable).with_name(program)), *arguments],
            cwd=self.root,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == PLACE_VARIABLE or not name.startswith(FOREIGN)
        }
        folders = [str(folder) for folder in (self.packages, self.root / "src") if folder]
        place = {"PYTHONPATH": os.pathsep.join(folders), "DAGSTER_HOME": str(self.home)}
        return kept | KEYS | place


def make_project(root: Path, packages: Path | None = None) -> DagsterProject:
    project = DagsterProject(root, packages)
    project.defs.mkdir(parents=True)
    project.home.mkdir()
    package = project.defs.parent
    (package / "components").mkdir()
    for path, text in {
        root / "pyproject.toml": _PYPROJECT,
        package / "__init__.py": "",
        package / "components" / "__init__.py": "",
        package / "definitions.py": _DEFINITIONS,
        project.defs / "__init__.py": "",
        project.defs / "own.py": _OWN,
    }.items():
        path.write_text(text)
    return project
