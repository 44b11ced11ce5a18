"""Which tests run when: the order of the files, what `make test` runs, and what a change needs."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from caf_pipeline_tests.support.scheduling import places
from caf_pipeline_tests.support.selection import Change, Record, Selection, change_since, git

TESTS = Path(__file__).parent
ROOT = TESTS.parent
TOO_SLOW = {"faults/test_services_daemon.py"}
"""Its only test takes minutes. Other files have a test for the same promise in `make test`."""


def test_the_order_names_existing_files_only():
    assert places(("test_scheduling.py",)) == {Path(__file__): 0}
    with pytest.raises(pytest.UsageError, match=r"no_such_file\.py"):
        places(("test_scheduling.py", "no_such_file.py"))


def test_make_test_runs_a_test_of_each_promise():
    page = (ROOT / "docs" / "explanation" / "design.md").read_text(encoding="utf-8")
    functions = re.findall(r"`(test_\w+?)(?:_…)?`", page)
    patterns = re.findall(r"`((?:\w+/)?\w*test_[\w*]+\.py|contracts/\w+\.py)`", page)
    assert [pattern for pattern in patterns if not list(TESTS.rglob(pattern))] == []
    files = {path for pattern in patterns for path in TESTS.rglob(pattern)}
    files -= {TESTS / name for name in TOO_SLOW}
    assert (len(functions) > 10, len(files) > 10) == (True, True)
    ran = run_by_make_test()
    names = {name for _, name in ran}
    assert not [name for name in functions if not any(test.startswith(name) for test in names)]
    assert not [
        path
        for path in files - {path for path, _ in ran}
        if not names & set(re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8")))
    ]


def run_by_make_test():
    """Return the file and the name of each test that `make test` runs."""
    (chosen,) = re.findall(r'-m "(.*?)"', (ROOT / "Makefile").read_text(encoding="utf-8"))
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    ids = [line.split("[")[0].split("::") for line in collected.stdout.splitlines() if "::" in line]
    return {(ROOT / path, name) for path, *_, name in ids}


def needed_by(*paths):
    """Return which of some tests' modules a change of paths concerns."""
    change = Change(paths)
    modules = ("cli.test_jackal", "steps.test_versions", "formats.test_tar", "test_readme")
    return [name for name in modules if change.concerns([f"caf_pipeline_tests.{name}"])]


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        ("caf_pipeline/cli/app.py", ["cli.test_jackal", "test_readme"]),
        ("caf_pipeline/steps/plan.py", ["cli.test_jackal", "steps.test_versions", "test_readme"]),
        ("caf_pipeline/dagster_host/ui.py", ["cli.test_jackal", "test_readme"]),
        ("caf_pipeline_tests/steps/test_versions.py", ["steps.test_versions"]),
        ("README.md", ["test_readme"]),
        ("CONTRIBUTING.md", []),
    ],
)
def test_a_change_needs_the_tests_above_it(path, needed):
    assert needed_by(path) == needed
    assert not Change([path]).needs_all_tests


@pytest.mark.parametrize(
    "path",
    [
        "sql/schema.sql",
        "caf_pipeline/ledger/queries/plan.sql",
        "caf_pipeline/settings/fields.py",
        "caf_pipeline/settings_file.py",
        "requirements.lock",
        "pyproject.toml",
        "native/src/lib.rs",
        "caf_pipeline_tests/support/postgres.py",
        "caf_pipeline_tests/conftest.py",
        "a/new/file",
    ],
)
def test_a_change_below_all_needs_all_tests(path):
    assert Change([path]).needs_all_tests


@pytest.fixture
def repository(tmp_path):
    """A repository with two commits; returns a function that runs git in it."""

    def run(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = git(tmp_path, *identity, *arguments)
        assert done is not None, arguments
        return done.strip()

    run("init", "--quiet")
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
        run("add", name)
        run("commit", "--quiet", "--message", name)
    return run


def test_a_change_has_committed_renamed_and_new_files(repository, tmp_path):
    base = repository("rev-parse", "HEAD")
    repository("mv", "first", "moved")
    (tmp_path / "new").touch()
    assert change_since(base, tmp_path).paths == {"first", "moved", "new"}


def test_a_commit_that_head_does_not_contain_proves_nothing(repository, tmp_path):
    other = repository("rev-parse", "HEAD")
    repository("reset", "--quiet", "--hard", "HEAD~1")
    assert change_since(other, tmp_path) is None
    assert change_since("0" * 40, tmp_path) is None
    assert change_since("no commit", tmp_path) is None


def test_a_shallow_clone_knows_no_tested_commit(repository, tmp_path):
    base = repository("rev-parse", "HEAD~1")
    clone = tmp_path / "clone"
    repository("clone", "--quiet", "--depth", "1", f"file://{tmp_path}", str(clone))
    assert change_since(base, clone) is None


RECORD = Path("tested")


def finish(tmp_path):
    """Return what a session leaves, in which one of two tests did not pass."""
    record = Record(RECORD, tmp_path)
    record.pytest_runtest_logreport(SimpleNamespace(passed=True, nodeid="a.py::other"))
    record.pytest_runtest_logreport(SimpleNamespace(passed=False, nodeid="a.py::test"))
    record.pytest_sessionfinish(1)
    return Selection(RECORD, tmp_path)


def test_record_names_the_commit_and_tests_that_did_not_pass(repository, tmp_path):
    selection = finish(tmp_path)
    assert selection.commit == repository("rev-parse", "HEAD")
    assert selection.not_passed == {"a.py::test"}
    assert selection.change.paths == {"tested"}
    assert finish(tmp_path).commit == selection.commit  # the record may differ


@pytest.mark.parametrize(
    "why", ["interrupted", "changed before", "changed meanwhile", "another commit"]
)
def test_no_other_state_than_a_tested_commit_is_recorded(repository, tmp_path, why):
    if why == "changed before":
        (tmp_path / "first").write_text("changed")
    record = Record(RECORD, tmp_path)
    if why == "changed meanwhile":
        (tmp_path / "new").touch()
    elif why == "another commit":
        repository("reset", "--quiet", "--hard", "HEAD~1")
    record.pytest_sessionfinish(2 if why == "interrupted" else 0)
    assert not (tmp_path / RECORD).exists()
    assert Selection(RECORD, tmp_path).all
