"""The package's modules, their order, and their imports."""

import ast
from pathlib import Path

import caf_pipeline

PORTS = {"source.protocol", "store.protocol", "ledger.records"}

PACKAGE = Path(caf_pipeline.__file__).parent


ORDER = (
    "errors | formats | setting_values | settings_errors | settings chunk_state | system"
    " | caf settings_file | inventory | waits | records | ports | throttle | source store ledger"
    " | encryption | run_context | reading | packing | retrieval | steps | maintenance | wiring"
    " | filesystem | naming | dagster_private asset_keys"
    " | automation | defs | component dagster_host | cli"
    " | entry | definitions"
)
"""From the bottom up. A module imports from its own folder and from lower ones.

Names that stand together, such as `source store ledger`, do not import each other.
"""

RANK = {name: rank for rank, names in enumerate(ORDER.split("|")) for name in names.split()}


MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports_of(module: str) -> set[str]:
    """Return the imports of a module, including those for types only."""
    imports = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        assert not (isinstance(node, ast.ImportFrom) and node.level), (
            f"{module} has a relative import"
        )
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports |= {f"{node.module}.{alias.name}" for alias in node.names}
    return imports


def top(module: str) -> str:
    return "ports" if ".".join(module.split(".")[:2]) in PORTS else module.partition(".")[0]
