"""Which tests run when: the order of the files, and what `make test` runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from caf_pipeline_tests.support.scheduling import places

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
