"""The import directions of docs/design.md, held for every module of the package."""

import ast
from pathlib import Path

import pytest

import caf_pipeline

PACKAGE = Path(caf_pipeline.__file__).parent

# From the bottom up. A module imports from groups above its own line in this list, and from its own group only where the
# group says so. A module that stands nowhere fails the test: whoever adds one decides where it belongs.
GROUPS: list[tuple[str, set[str], bool]] = [
    ("errors", {"errors"}, False),
    (
        "core",
        {
            "caf",
            "caf_index",
            "merkle",
            "parquet_queries",
            "inventory",
            "current",
            "deletable",
            "manifest",
            "plan",
            "lifecycle",
            "checksums",
            "durable",
            "in_use",
            "addresses",
            "chunkio",
            "plurals",
        },
        True,
    ),
    (
        "doors and settings",
        {"interfaces", "settings", "settings_errors", "setting_values", "unreachable", "child_environment", "waits"},
        True,
    ),
    (
        "steps",
        {
            "workplace",
            "brake",
            "stored_bytes",
            "fetch",
            "journal",
            "checkpoints",
            "replaying",
            "resuming",
            "pack",
            "chunk_file",
            "sampling",
            "staging",
            "planning",
            "comparing",
            "first_plan",
            "archive",
            "chunk_packing",
            "retrieve",
            "accounts",
            "proofs",
            "doctor",
            "stray_files",
            "findings",
            "stray_chunks",
            "repair",
            "reading_back",
            "verdicts",
            "deletion_files",
            "deletion",
            "rebuild",
            "stored_chunk",
        },
        True,
    ),
    ("adapters", set(), False),
    ("assembly", {"assembly"}, False),
    ("surfaces", set(), False),
]
ADAPTERS: dict[str, set[str]] = {
    "s3": {"s3", "s3_errors", "s3_clients", "s3_listing", "s3_reading"},
    "directory_store": {"directory_store"},
    "ledger": {
        "ledger",
        "database",
        "embedded_postgres",
        "migrations",
        "leases",
        "bulk_loads",
        "standing",
        "current_content",
        "transaction_log",
        "processes",
        "provider_records",
        "switchboard",
        "wait_rows",
        "copies",
        "restoring",
        "upkeep",
    },
    "jackal": {"jackal"},
    "ranges": {"ranges", "redirects"},
}
SURFACES: dict[str, set[str]] = {"dagster": {"definitions", "defs"}, "cli": {"cli", "entry"}}

CORE_MAY_USE = {"pyarrow", "numpy", "duckdb", "msgspec", "blake3", "awscrt", "siphash24", "typing_extensions"}
"""What the core may import from outside the standard library: computing, and neither network nor Dagster."""


def unit_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import, which this test cannot place"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "caf_pipeline" else {module}
    return found


def place_of(unit: str) -> tuple[int, str]:
    """(level, part) of a module; the part tells adapters, and surfaces, from each other."""
    for level, (name, units, _) in enumerate(GROUPS):
        if unit in units:
            return level, name
        parts = {"adapters": ADAPTERS, "surfaces": SURFACES}.get(name, {})
        for part, members in parts.items():
            if unit in members:
                return level, part
    raise AssertionError(f"caf_pipeline.{unit} stands in no group: decide where it belongs")


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def unit_of_path(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_groups_above_its_own(path):
    level, part = place_of(unit_of_path(path))
    for name in imports_of(path):
        if not name.startswith("caf_pipeline."):
            continue
        other_level, other_part = place_of(unit_of(name))
        within = GROUPS[level][2] or (other_part == part and part in (*ADAPTERS, *SURFACES))
        assert other_level < level or (other_level == level and within), f"{path.name} imports {name}"


def test_steps_see_no_adapter():
    adapters = set().union(*ADAPTERS.values())
    for unit in GROUPS[3][1]:
        used = {unit_of(name) for name in imports_of(PACKAGE / f"{unit}.py") if name.startswith("caf_pipeline.")}
        assert not used & adapters


def test_the_core_imports_neither_network_nor_dagster():
    import sys

    for unit in GROUPS[1][1] | GROUPS[0][1]:
        outside = {name.split(".")[0] for name in imports_of(PACKAGE / f"{unit}.py")} - {"caf_pipeline"}
        assert outside - set(sys.stdlib_module_names) <= CORE_MAY_USE, unit
        assert not outside & {"socket", "urllib", "http", "subprocess", "asyncio"}, unit


def test_the_core_does_not_look_at_the_clock_or_the_environment():
    for unit in GROUPS[1][1]:
        text = (PACKAGE / f"{unit}.py").read_text(encoding="utf-8")
        for forbidden in ("time.time", "datetime.now", "os.environ", "getenv", "utcnow"):
            assert forbidden not in text, f"{unit} uses {forbidden}"


def test_no_module_is_named_after_nothing():
    names = {path.stem for path in modules()}
    assert not names & {"utils", "helpers", "common", "models", "constants", "misc"}


def test_every_module_says_what_it_holds_and_what_not():
    for path in modules():
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert docstring, f"{path} has no docstring"
