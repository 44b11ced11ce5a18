"""The code of an older commit, as commands that kill themselves at a named moment.

`PYTHONPATH` and a `.dist-info` folder make the old tree the installed version: its `caf_pipeline`,
`sql/`, `dagster.yaml` and version. Interpreter and other packages are those of these tests.

`python -P old_version.py MOMENT ARGUMENTS…` runs an old `caf`. A moment is
`module:name.of.function:WHEN:NUMBER`: before or after which call. This file imports nothing of the
project, so that only the old tree's modules are loaded.
"""

import functools
import importlib
import itertools
import os
import pkgutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final

COMMIT: Final = "HEAD"
"""Ledgers before 0.5.0 are not upgraded. Until then, upgrades start at the last commit."""

_REPOSITORY: Final = Path(__file__).parents[2]


def can_be_upgraded() -> bool:
    """Return whether the commit has this working copy's SQL files."""
    compared = subprocess.run(
        ["git", "-C", _REPOSITORY, "diff", "--quiet", COMMIT, "--", "sql"], check=False
    )
    return compared.returncode == 0


def extract(folder: Path) -> Path:
    """Extract the old tree, as if installed, into a new folder; return the folder."""
    command = ["git", "-C", _REPOSITORY, "archive", "--format=zip", COMMIT]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with zipfile.ZipFile(BytesIO(archive)) as tree:
        tree.extractall(folder)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    installed = folder / f"caf_pipeline-{project['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: caf-pipeline\nVersion: {project['version']}\n"
    )
    groups = project.get("entry-points", {})
    lines = [
        line
        for group, names in groups.items()
        for line in (f"[{group}]", *(f"{name} = {to}" for name, to in names.items()))
    ]
    (installed / "entry_points.txt").write_text("\n".join([*lines, ""]))
    return folder


def run_killed(
    tree: Path, *arguments: str, moment: str, folder: Path, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Run the old `caf` until it is killed or ends; return exit status and output."""
    done = subprocess.run(
        [sys.executable, "-P", __file__, moment, *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(tree)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


# --- the process ----------------------------------------------------------------------------------


def _kill_at(moment: str) -> None:
    module, path, when, number = moment.split(":")
    owner_path, _, name = path.rpartition(".")
    owner: Any = pkgutil.resolve_name(f"{module}:{owner_path}")
    original: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count(1)

    @functools.wraps(original)
    def watched(*arguments: Any, **named: Any) -> Any:
        fatal = next(calls) == int(number)
        if fatal and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **named)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, watched)


def main() -> None:
    import caf_pipeline

    imported = Path(caf_pipeline.__file__ or "")
    if not imported.is_relative_to(Path(os.environ["PYTHONPATH"])):
        sys.exit(f"this is not the old code: {imported}")
    moment, *arguments = sys.argv[1:]
    _kill_at(moment)
    sys.exit(importlib.import_module("caf_pipeline.cli").main(arguments))


if __name__ == "__main__":
    main()
