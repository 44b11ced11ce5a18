"""DAGSTER_HOME: one ignored folder that holds everything Dagster keeps on this machine.

Our dagster.yaml is linked into it, and our workspace.yaml, which `dg dev -w` loads from any folder
that has a caf.toml.

`python -m caf_pipeline.dagster_host.home` prepares it and prints its path. Imports nothing of
Dagster, which would take seconds.
"""

import os
import sys
from pathlib import Path
from typing import Final

from caf_pipeline.errors import CafError, SettingsError, with_hint
from caf_pipeline.settings import Settings, load_settings

INSTANCE_FILE: Final = "dagster.yaml"
WORKSPACE_FILE: Final = "workspace.yaml"
HOME_VARIABLE: Final = "DAGSTER_HOME"

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_FOLDERS: Final = (_PACKAGE.parent, _PACKAGE)
"""The folders of both files: beside the package in a working copy, inside it when installed from a
wheel.
"""


def dagster_home(settings: Settings) -> Path:
    """Return the folder that is DAGSTER_HOME, whether it exists or not."""
    return (settings.home / "dagster").absolute()


def prepare_dagster_home(settings: Settings) -> Path:
    """Make the folder, link both files into it, and set DAGSTER_HOME for this process and its
    children.

    A file of that name, or a link to a file that is not part of this software, is the operator's
    own and stays.

    Raises:
        SettingsError: the folder cannot be made or written.
    """
    folder = dagster_home(settings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (INSTANCE_FILE, WORKSPACE_FILE):
            _link(folder / name)
    except OSError as error:
        raise SettingsError(
            f"Dagster's folder {folder} cannot be made: {error.strerror}",
            hint="set 'home' to a folder that can be written",
        ) from error
    os.environ[HOME_VARIABLE] = str(folder)
    return folder


def is_own(file: Path) -> bool:
    """Return whether the file is the operator's: a regular file, or a link to a file outside every
    copy of this software.

    A dangling link counts as a link to a removed copy of this software.
    """
    beside = file.resolve().parent
    of_a_copy = beside.name == _PACKAGE.name or (beside / _PACKAGE.name).is_dir()
    return file.exists() and not (file.is_symlink() and of_a_copy)


def _link(link: Path) -> None:
    target = next(
        (folder / link.name for folder in _FOLDERS if (folder / link.name).is_file()), None
    )
    if target is None:
        raise SettingsError(
            f"{link.name} is neither in {_FOLDERS[0]} nor in {_FOLDERS[1]}",
            hint="install the package again",
        )
    if is_own(link):
        return
    if link.is_symlink():
        if link.readlink() == target:
            return
        link.unlink()
    try:
        link.symlink_to(target)
    except FileExistsError:  # another process of ours was faster
        return


def main() -> int:
    """Print the folder, for `export DAGSTER_HOME=$(…)`."""
    try:
        print(prepare_dagster_home(load_settings()))
    except CafError as error:
        print(with_hint(error), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
