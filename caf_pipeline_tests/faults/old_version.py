"""The code of version 0.3.0, taken from this repository's history, as a command that kills itself at a named moment.

`PYTHONPATH` and a `.dist-info` folder make the old tree what is installed: its `caf_pipeline`, its `sql/`, its `dagster.yaml`,
its version. The interpreter and the other packages are those of these tests; for yoyo, which it had besides, see `extract`.

`python -P old_version.py MOMENT ARGUMENTS…` runs the old `caf`. MOMENT is `module:name.of.function:WHEN:NUMBER`: before or after
which call of it; "" for a run to its end. This file imports nothing of ours, so that the old tree's modules are the only ones.
"""

import functools
import importlib
import importlib.metadata
import itertools
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final

COMMIT: Final = "3431e3c9e3c4e737d2c6f45954eb52d9c4d022ef"
VERSION: Final = "0.3.0"

_REPOSITORY: Final = Path(__file__).parents[2]
_METADATA: Final = f"Metadata-Version: 2.1\nName: caf-pipeline\nVersion: {VERSION}\n"
_ENTRY_POINTS: Final = "[caf_pipeline.commands]\nrun = caf_pipeline.defs.command:run_source\n"
"""What the installation of 0.3.0 wrote of its pyproject.toml, as far as `caf run` reads it."""


def history_has_it() -> bool:
    """Whether this is a working copy whose history reaches back to that version."""
    asked = subprocess.run(["git", "-C", _REPOSITORY, "cat-file", "-e", f"{COMMIT}^{{commit}}"], capture_output=True, check=False)
    return asked.returncode == 0


def extract(folder: Path) -> Path:
    """Put the old tree into a new folder, as if it were installed there; return the folder."""
    command = ["git", "-C", _REPOSITORY, "archive", "--format=zip", COMMIT]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with zipfile.ZipFile(BytesIO(archive)) as tree:
        tree.extractall(folder)
    # 0.3.0 ran its migrations by yoyo, which is no longer installed; the present module leaves the same rows in the same table.
    shutil.copy(_REPOSITORY / "caf_pipeline" / "ledger" / "migrations.py", folder / "caf_pipeline")
    installed = folder / f"caf_pipeline-{VERSION}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(_METADATA)
    (installed / "entry_points.txt").write_text(_ENTRY_POINTS)
    return folder


def run(
    tree: Path, *arguments: str, moment: str, folder: Path, environment: Mapping[str, str], seconds: float
) -> "subprocess.CompletedProcess[str]":
    """Run the old `caf` in a folder, to its end or to its kill."""
    return subprocess.run(
        [sys.executable, "-P", __file__, moment, *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(tree)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


# --- the process ---------------------------------------------------------------------------------------------------


def _kill_at(moment: str) -> None:
    module, path, when, number = moment.split(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
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


def main() -> int:
    """Run the old command line; return its exit status."""
    import caf_pipeline

    tree = Path(os.environ["PYTHONPATH"])
    imported = Path(caf_pipeline.__file__ or "")
    version = importlib.metadata.version("caf-pipeline")
    if not imported.is_relative_to(tree) or version != VERSION:
        sys.exit(f"this is not the old code: version {version}, {imported}")
    moment, *arguments = sys.argv[1:]
    # Checkpoints of the packing journal as often as objects this small need, so that a kill falls behind one.
    pack, checkpoints = importlib.import_module("caf_pipeline.pack"), importlib.import_module("caf_pipeline.checkpoints")
    pack.pace_of = lambda settings: checkpoints.Pace(due_bytes=60_000, due_outcomes=4, ahead_bytes=120_000)
    if moment:
        _kill_at(moment)
    command = importlib.import_module("caf_pipeline.cli")
    return int(command.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
