"""Files beside the package in a checkout, which a wheel has inside it."""

from pathlib import Path
from typing import Final

from caf_pipeline.errors import SettingsError

PACKAGE: Final = Path(__file__).resolve().parents[1]


def package_file(name: str) -> Path:
    """Return the path of a file or folder. Raises a SettingsError if the package lacks it."""
    for folder in (PACKAGE.parent, PACKAGE):
        if (folder / name).exists():
            return folder / name
    raise SettingsError(
        f"{name} is neither in {PACKAGE.parent} nor in {PACKAGE}", hint="install the package again"
    )
