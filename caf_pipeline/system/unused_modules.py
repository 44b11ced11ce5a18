"""Import hook that makes modules look uninstalled, for `entry.block_unused_modules`."""

import sys
from typing import Final

_UNUSED: Final = frozenset({"pandas", "httpx._main"})
"""Their users have a fallback. httpx's command line loads click, rich and pygments."""


class NoUnusedModules:
    """Blocks unused modules."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in _UNUSED:
            raise ModuleNotFoundError(f"{name} is left out of this process", name=name)


def allow_all_modules() -> None:
    """Remove the hook, since a team's definitions may use pandas."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not NoUnusedModules]
