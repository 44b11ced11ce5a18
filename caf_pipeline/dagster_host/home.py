"""DAGSTER_HOME: one ignored folder that holds everything Dagster keeps on this machine, with our dagster.yaml linked in.

`python -m caf_pipeline.dagster_host.home` prepares it and prints its path. Imports nothing of Dagster, which would take
seconds.
"""

import os
import sys
from pathlib import Path
from typing import Final

from caf_pipeline.errors import CafError, SettingsError, with_hint
from caf_pipeline.settings import Settings, load_settings

INSTANCE_FILE: Final = "dagster.yaml"
HOME_VARIABLE: Final = "DAGSTER_HOME"

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_PLACES: Final = (_PACKAGE.parent / INSTANCE_FILE, _PACKAGE / INSTANCE_FILE)
"""Where dagster.yaml is: beside the package in a working copy, inside it when installed from a wheel."""


def dagster_home(settings: Settings) -> Path:
    """Return the folder that is DAGSTER_HOME, whether it exists or not."""
    return (settings.home / "dagster").absolute()


def prepare_dagster_home(settings: Settings) -> Path:
    """Make the folder, link dagster.yaml into it, and set DAGSTER_HOME for this process and its children.

    A dagster.yaml that is a file there, or a link to one that is not of this software, is the operator's own and stays.

    Raises:
        SettingsError: the folder cannot be made or written.
    """
    folder = dagster_home(settings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _link(folder / INSTANCE_FILE)
    except OSError as error:
        raise SettingsError(
            f"Dagster's folder {folder} cannot be made: {error.strerror}", hint="set 'home' to a folder that can be written"
        ) from error
    os.environ[HOME_VARIABLE] = str(folder)
    return folder


def is_own(file: Path) -> bool:
    """Tell whether a dagster.yaml is there that is the operator's: a file, or a link to one that no copy of this software has.

    A link to nothing is taken for one to a copy that is gone.
    """
    beside = file.resolve().parent
    of_a_copy = beside.name == _PACKAGE.name or (beside / _PACKAGE.name).is_dir()
    return file.exists() and not (file.is_symlink() and of_a_copy)


def _link(link: Path) -> None:
    wanted = next((place for place in _PLACES if place.is_file()), None)
    if wanted is None:
        raise SettingsError(f"{INSTANCE_FILE} is neither at {_PLACES[0]} nor at {_PLACES[1]}", hint="install the package again")
    if is_own(link):
        return
    if link.is_symlink():
        if link.readlink() == wanted:
            return
        link.unlink()
    try:
        link.symlink_to(wanted)
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
