"""Which thorough tests a change needs: `--changed-since=FILE` and `--record=FILE`.

`make test-all` writes the record: the tested commit, and the tests that did not pass there. CI runs
the other tests, and of the thorough ones those that did not pass or that depend on a change since
that commit. If it cannot know, it runs all.
"""

import ast
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from caf_pipeline_tests.support.package_modules import MODULES, imports_of, top

ROOT: Final = Path(__file__).parents[2]
TESTS: Final = "caf_pipeline_tests"

_READ: Final = ("docs", "demo", "deploy", "benchmarks", "README.md", "CHANGELOG.md")
"""Tests read or start these, and name them."""

_OF_NO_TEST: Final = ("CONTRIBUTING.md", "LICENSE", ".gitignore", ".ci")
_OF_EVERY_TEST: Final = re.compile(rf"caf_pipeline/setting|{TESTS}/support/|.*conftest\.py$")
_PROGRAM: Final = {"entry", "definitions", "filesystem", "dagster_host"}
"""The string "caf" starts the command, or fsspec's file system."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection", "thorough tests by change")
    group.addoption(
        "--changed-since", metavar="FILE", type=Path, help="only thorough tests that a change needs"
    )
    group.addoption(
        "--record", metavar="FILE", type=Path, help="write the commit here when all tests ended"
    )


class Change:
    """The changed paths since a tested commit, and the folders of the package that they reach."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths = set(paths)
        self.roots = {path.split("/")[0] for path in self.paths}
        self.folders = {
            top(".".join(Path(path).with_suffix("").parts[1:]))
            for path in self.paths
            if path.startswith("caf_pipeline/")
        }
        importers = folder_imports()
        while more := {name for name, below in importers.items() if below & self.folders} - (
            self.folders
        ):
            self.folders |= more

    @property
    def needs_all_tests(self) -> bool:
        return any(
            _OF_EVERY_TEST.match(path)
            or not (
                path.split("/")[0] in (*_READ, *_OF_NO_TEST)
                or (path.startswith(("caf_pipeline/", f"{TESTS}/")) and path.endswith(".py"))
            )
            for path in self.paths
        )

    def concerns(self, modules: Iterable[str]) -> bool:
        """Return whether tests of these modules depend on the change."""
        reached, names = reach(frozenset(modules))
        folders = {
            top(name.removeprefix("caf_pipeline."))
            for name in names
            if name.startswith("caf_pipeline.")
        } | {name.split(".")[1] for name in reached}
        return bool(
            {f"{name.replace('.', '/')}.py" for name in reached} & self.paths
            or (folders | (_PROGRAM if "caf" in names else set())) & self.folders
            or {part for name in names for part in (name.split("/")[0], name.split(".")[0])}
            & self.roots
            & set(_READ)
        )


@cache
def folder_imports() -> dict[str, set[str]]:
    """Return what each folder of the package imports of the others."""
    imports: dict[str, set[str]] = {}
    for module in MODULES:
        imports.setdefault(top(module), set()).update(
            top(name.removeprefix("caf_pipeline."))
            for name in imports_of(module)
            if name.startswith("caf_pipeline.")
        )
    return imports


@cache
def names_of(module: str) -> set[str]:
    """Return what a test's module imports, and the strings in it."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else ():
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {node.value, *re.findall(r"\bcaf_pipeline(?:_tests)?(?:\.\w+)+", node.value)}
    return names


@cache
def reach(modules: frozenset[str]) -> tuple[set[str], set[str]]:
    """Return the modules of the tests that these import, and all names in them."""
    reached: set[str] = set()
    names: set[str] = set()
    ahead = set(modules) - {f"{TESTS}.conftest"}  # it names all fixtures, and needs all tests
    while ahead:
        module = ahead.pop()
        reached.add(module)
        names |= names_of(module)
        mentioned = {name for name in names_of(module) if name.startswith(f"{TESTS}.")}
        mentioned |= {name.rpartition(".")[0] for name in mentioned}
        ahead |= {
            name
            for name in mentioned - reached
            if "conftest" not in name and (ROOT / f"{name.replace('.', '/')}.py").exists()
        }
    return reached, {name for name in names if not name.startswith(f"{TESTS}.")}


def change_since(commit: str, root: Path = ROOT) -> Change | None:
    """Return the change of the work tree since a commit; None if HEAD does not descend from it."""
    if git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    changed = git(root, "diff", "--no-renames", "--name-only", "-z", commit, "--")
    new = git(root, "ls-files", "--others", "--exclude-standard", "-z")
    assert changed is not None
    assert new is not None
    return Change(path for path in (changed + new).split("\0") if path)


def git(root: Path, *arguments: str) -> str | None:
    """Return git's output; None if it fails."""
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


class Selection:
    """Drops thorough tests that the change since the recorded commit does not need."""

    def __init__(self, record: Path, root: Path = ROOT) -> None:
        text = (root / record).read_text(encoding="utf-8") if (root / record).exists() else ""
        self.commit, *not_passed = text.splitlines() or ["no commit"]
        self.not_passed = set(not_passed)
        self.change = change_since(self.commit, root)

    @property
    def all(self) -> bool:
        return self.change is None or self.change.needs_all_tests

    def pytest_report_header(self) -> str:
        if self.change is None:
            return "all thorough tests: HEAD descends from no recorded commit"
        folders = "all" if self.all else ", ".join(sorted(self.change.folders)) or "none"
        return f"thorough tests since {self.commit[:12]}, of folders: {folders}"

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self.all:
            return
        dropped = [item for item in items if not self._runs(item)]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if self._runs(item)]

    def _runs(self, item: pytest.Item) -> bool:
        assert self.change is not None
        return (
            not item.get_closest_marker("thorough")
            or bool({item.nodeid, item.nodeid.partition("::")[0]} & self.not_passed)
            or self.change.concerns(_modules_of(item))
        )


def _modules_of(item: pytest.Item) -> Iterable[str]:
    """Return the modules of a test, its class, and its fixtures.

    Fixtures whose names begin with an underscore are of every test. They use what others set up.
    """
    assert isinstance(item, pytest.Function)
    yield item.module.__name__
    yield item.function.__module__
    for name, fixtures in item._fixtureinfo.name2fixturedefs.items():
        if not name.startswith("_"):
            yield from (fixture.func.__module__ for fixture in fixtures)


class Record:
    """Writes the commit and the tests that did not pass, if a session of its work tree ends."""

    def __init__(self, record: Path, root: Path = ROOT) -> None:
        self._root = root
        self._record = record
        self._commit = self._clean_commit()
        self._not_passed: set[str] = set()

    def _clean_commit(self) -> str | None:
        """Return the commit of a work tree without changes, but for the record."""
        status = git(self._root, "status", "--porcelain", "--", ".", f":!{self._record}")
        return git(self._root, "rev-parse", "HEAD") if status == "" else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._not_passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._not_passed.add(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        if self._commit and self._commit == self._clean_commit():
            lines = "".join(f"{test}\n" for test in sorted(self._not_passed))
            (self._root / self._record).write_text(self._commit + lines, encoding="utf-8")
        else:
            print(f"\n{self._record} is not written: the work tree has changes")


def pytest_configure(config: pytest.Config) -> None:
    if record := config.getoption("--changed-since"):
        config.pluginmanager.register(Selection(record))
    if (record := config.getoption("--record")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(record))
