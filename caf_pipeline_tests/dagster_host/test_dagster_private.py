"""Dagster's private modules are imported in one place, which fails when they change."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from dagster import DefaultRunLauncher
from dagster_postgres import PostgresEventLogStorage

from caf_pipeline import dagster_private
from caf_pipeline.dagster_host import logging_filters
from caf_pipeline_tests.support import dagster_private as of_tests
from caf_pipeline_tests.support.dagster_versions import supported_dagster

ROOT = Path(__file__).parents[2]
PLACES = [
    Path(dagster_private.__file__),
    Path(of_tests.__file__),
    ROOT / "demo" / "ui.py",  # of what only this program needs; loading it takes every run longer
]
MODULES = [
    path
    for folder in ("caf_pipeline", "caf_pipeline_tests", "demo", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
]


def private_imports(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if "dagster" not in text:  # to parse all takes seconds
        return []
    result = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        result += [
            name for name in names if re.match(r"dagster\w*(\.\w+)*\._|dagster_shared\b", name)
        ]
    return result


def test_private_names_are_imported_in_one_place_each():
    assert (
        10 < len(private_imports(Path(dagster_private.__file__))) <= 31
    )  # or this looks for the wrong thing
    assert [path for path in MODULES if path not in PLACES and private_imports(path)] == []
    names = [name for path in PLACES for name in private_imports(path)]
    assert len(names) == len(set(names))


def test_private_names_were_read_in_the_installed_version():
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert f"\ndagster=={dagster_private.READ_IN} " in lock


WITHOUT = """
import dagster
from dagster._core import launcher

{missing}
import caf_pipeline.definitions
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("missing", "name"),
    [
        ("del launcher.CheckRunHealthResult", "CheckRunHealthResult"),
        ("del dagster.DagsterInstance.get_ref", "get_ref"),
    ],
)
def test_missing_name_is_an_error_at_load(missing, name):
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing)],
        capture_output=True,
        text=True,
        check=False,
    )
    error = run.stderr.splitlines()[-1]
    assert error.startswith("caf_pipeline.errors.SettingsError")
    assert name in error
    assert supported_dagster() in error


def test_every_name_exists():
    names = names_in(dagster_private)
    assert [name for name in names if not hasattr(dagster_private, name)] == []


@pytest.mark.parametrize("module", [dagster_private, of_tests])
def test_every_name_is_used(module):
    used = {
        word
        for path in MODULES
        if path != Path(module.__file__)
        for word in re.findall(r"\w+", path.read_text("utf-8"))
    }
    assert names_in(module) - used == set()


def names_in(module):
    return {name.rpartition(".")[2] for name in private_imports(Path(module.__file__))}


def test_what_our_classes_use_of_the_class_they_extend_exists():
    assert callable(DefaultRunLauncher._get_grpc_client_for_termination)
    assert isinstance(DefaultRunLauncher._instance, property)
    assert isinstance(PostgresEventLogStorage._instance, property)
    assert callable(PostgresEventLogStorage._allocate_concurrency_slots)


def test_comments_name_the_current_version_of_dagster():
    named = {
        (path.name, version)
        for path in MODULES
        for version in re.findall(r"\b1\.\d\d\.\d+\b", path.read_text("utf-8"))
    }
    assert {version for _, version in named} == {dagster_private.READ_IN}, sorted(named)


@pytest.mark.parametrize("logger", logging_filters._DROPPED)
def test_a_filtered_logger_exists_in_dagster(logger):
    daemon = logger.startswith("dagster.daemon.")  # named after a class, not a module
    assert daemon or importlib.util.find_spec(logger)
