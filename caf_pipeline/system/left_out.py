"""Modules that a process does not load, though they are installed."""

import sys
from typing import Final

_UNUSED: Final = frozenset(("pandas", "httpx._main", "mako.ext.pygmentplugin"))
"""pyarrow loads pandas where it is installed, for the first list that it makes an array of: half a second of CPU time. httpx
loads its own command line: a tenth. mako, which Dagster's migrations have for their templates, loads what colours its errors: a
twentieth."""


class _Finder:
    """Fails the import of these modules, as where they are not installed: who imports them can do without."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in _UNUSED:
            raise ModuleNotFoundError(f"{name} is left out of this process", name=name)


def leave_out_unused() -> None:
    """Let this process do without modules that others load for it and that nothing here uses.

    Only for a process that runs no code but this project's.
    """
    sys.meta_path.insert(0, _Finder)
