"""Files that a wheel has inside the package, and a checkout beside it."""

from pathlib import Path
from typing import Final

from caf_pipeline.errors import SettingsError

PACKAGE: Final = Path(__file__).resolve().parents[1]


def package_file(name: str) -> Path:
    """Return the path of a file or folder. Raises a SettingsError if the package lacks it."""
    for folder in (PACKAGE, PACKAGE.parent):
        if (folder / name).exists():
            return folder / name
    raise SettingsError(
        f"{name} is neither in {PACKAGE} nor in {PACKAGE.parent}", hint="install the package again"
    )
