"""The limit for each test."""

import subprocess
import sys
from pathlib import Path

import pytest

from caf_pipeline_tests.support.patience import PATIENCE_SECONDS

CONFTEST = """
from caf_pipeline_tests.support import time_limit
pytest_plugins = ["caf_pipeline_tests.support.time_limit"]
time_limit.LIMIT_SECONDS = 1
"""

TESTS = """
import threading

def waits_in_a_thread():
    threading.Event().wait()

def test_that_hangs():
    threading.Thread(target=waits_in_a_thread, daemon=True).start()
    try:
        threading.Event().wait()
    except Exception:
        pass  # as code under test that goes on after errors

def test_after_it():
    pass
"""


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [0, 2])
def test_a_hanging_test_fails_with_the_stacks_of_all_threads(tmp_path, processes):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_hanging.py").write_text(TESTS)
    options = ["--numprocesses", str(processes), "--dist", "loadfile", "--rootdir", tmp_path]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr
    assert "1 failed, 1 passed" in ended.stdout
    assert "in waits_in_a_thread" in ended.stdout
    assert "in test_that_hangs" in ended.stdout
