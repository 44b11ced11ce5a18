"""Import hook that makes pandas look uninstalled, for `entry.block_unused_modules`."""

import sys


class NoPandas:
    """Blocks pandas. Its users have a fallback."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is left out of this process", name=name)


def allow_all_modules() -> None:
    """Remove the hook, since a team's definitions may use pandas."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not NoPandas]
