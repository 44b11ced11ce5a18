"""Processes collect garbage rarely, skip the interpreter's shutdown, and load no pandas."""

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import gc, weakref
from caf_pipeline.entry import collect_garbage_rarely

looks = []
gc.callbacks.append(lambda phase, info: looks.append((gc.get_threshold()[0], len(kept))) if phase == "start" else None)
kept = []
collect_garbage_rarely()
before = len(looks)
while len(looks) < before + 2:
    kept.append([])
first, second = looks[before:]
print(first[0] > second[0] > 700, first[1] > second[1] - first[1])
"""  # noqa: E501


def test_first_garbage_collection_is_late_and_later_ones_happen():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert (run.stdout, run.stderr) == ("True True\n", "")


LOADED_BEFORE = "import duckdb"
LOADED_AFTER_THE_FIRST_LOOK = """
many = [[] for _ in range(300_000)]
assert gc.get_freeze_count() > 200_000
import duckdb
"""
DUCKDB = """
import gc, sys
from caf_pipeline.entry import skip_shutdown, exit_with, collect_garbage_rarely

skip_shutdown()
collect_garbage_rarely()
{loaded}
cycle = [duckdb.connect(":memory:")]
cycle += [cycle, cycle[0].sql("SELECT 1")]
sys.exit({end})
"""


@pytest.mark.parametrize("end", ["exit_with(3)", "3"], ids=["at once", "as usual"])
@pytest.mark.parametrize(
    "loaded", [LOADED_BEFORE, LOADED_AFTER_THE_FIRST_LOOK], ids=["before", "after the first look"]
)
def test_duckdb_reports_no_leaks_at_exit(loaded, end):
    run = subprocess.run(
        [sys.executable, "-c", DUCKDB.format(loaded=loaded, end=end)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.stdout, run.stderr, run.returncode) == ("", "", 3)


ENDING = """
import atexit, concurrent.futures, sys, threading, weakref
from caf_pipeline.entry import skip_shutdown, exit_with

class Left:
    def __del__(self):
        print("looked at", flush=True)

skip_shutdown()
left = Left()
left.cycle = left
atexit.register(print, "registered")
weakref.finalize(threading, print, "finalized")
asked = threading.Event()
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(lambda: (asked.wait(), print("worked", end=" ")))
threading.Timer(0.1, asked.set).start()
sys.exit({end})
"""


def test_process_ends_after_its_threads_and_atexit_functions():
    ends = {
        end: subprocess.run(
            [sys.executable, "-c", ENDING.format(end=end)],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        for end in ("exit_with(5)", "5")
    }
    at_once, usual = ends.values()
    assert (at_once.returncode, usual.returncode) == (5, 5)
    assert at_once.stdout == "worked finalized\nregistered\n"
    assert usual.stdout == f"{at_once.stdout}looked at\n"


def test_unwritable_output_at_exit_is_a_failure():
    code = (
        "import sys; from caf_pipeline.entry import skip_shutdown, exit_with; skip_shutdown(); "
        "print('lost'); sys.exit(exit_with(0))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment,
        )
    assert run.returncode == 120  # as Python itself says
    assert "No space left" in run.stderr


NO_PANDAS = """
import sys
from caf_pipeline.entry import block_unused_modules

block_unused_modules()
import duckdb, pyarrow

listed = pyarrow.table({"number": [1, 2]})
print(duckdb.sql("SELECT sum(number) FROM listed").fetchall(), "pandas" in sys.modules)
"""


def test_process_loads_no_pandas():
    assert importlib.util.find_spec("pandas")
    run = subprocess.run(
        [sys.executable, "-c", NO_PANDAS], capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr) == ("[(3,)] False\n", "")
