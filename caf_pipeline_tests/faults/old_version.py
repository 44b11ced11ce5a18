"""The code of an older commit, as commands that kill themselves at a named moment.

`PYTHONPATH` and a `.dist-info` folder make the old tree the installed version: its `caf_pipeline`,
`sql/`, `dagster.yaml` and version. Interpreter and other packages are those of these tests.

`python -P old_version.py` imports it, then forks an old `caf` for each order, which is a line of
JSON on standard input. A moment is `module:name.of.function:WHEN:NUMBER`: before or after which
call; "" runs to the end. `OldVersion` is the other end. This file imports nothing of the project,
so that only the old tree's modules are loaded.
"""

import functools
import importlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tomllib
import traceback
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final, Self

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


class OldVersion:
    """The process that forks each run of the old `caf`."""

    def __init__(self, tree: Path, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            env={**environment, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._process:
            os.killpg(self._process.pid, signal.SIGKILL)

    def run(
        self,
        *arguments: str,
        moment: str,
        folder: Path,
        environment: Mapping[str, str],
        seconds: float,
    ) -> tuple[int, str]:
        """Run the old `caf` to its end or kill; return exit status and output."""
        assert self._process.stdin
        assert self._process.stdout
        said = folder / "old-version.said"
        order = {
            "moment": moment,
            "arguments": arguments,
            "folder": str(folder),
            "environment": {**environment},
            "said": str(said),
        }
        print(json.dumps(order), file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired(arguments, seconds)
        return json.loads(self._process.stdout.readline()), said.read_text()


# --- the process ----------------------------------------------------------------------------------


def _kill_at(moment: str) -> None:
    module, path, when, number = moment.split(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for attribute in owners:
        owner = getattr(owner, attribute)
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


def _import_all() -> None:
    import caf_pipeline

    tree = Path(os.environ["PYTHONPATH"])
    imported = Path(caf_pipeline.__file__ or "")
    if not imported.is_relative_to(tree):
        sys.exit(f"this is not the old code: {imported}")
    for name in (
        "caf_pipeline.cli.app",
        "caf_pipeline.dagster_host.run_source",
        "caf_pipeline.store.jackal.write",
    ):
        importlib.import_module(name)


def _perform(order: dict[str, Any]) -> int:
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    for number, (path, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), *2 * [(order["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)]]
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    if order["moment"]:
        _kill_at(order["moment"])
    return int(importlib.import_module("caf_pipeline.cli").main(order["arguments"]))


def main() -> None:
    """Fork a process for each order; report its exit status."""
    _import_all()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 1
            try:
                status = _perform(json.loads(line))
            except BaseException:  # noqa: BLE001 - as the interpreter itself ends
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(ended)), flush=True)


if __name__ == "__main__":
    main()
