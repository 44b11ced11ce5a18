"""How often a process of ours looks for garbage."""

import gc
import subprocess
import sys

import pytest

from caf_pipeline.system.garbage import no_looks

PROGRAM = """
import gc, weakref
from caf_pipeline.system.garbage import look_rarely

looks = []
gc.callbacks.append(lambda phase, info: looks.append((gc.get_threshold()[0], len(kept))) if phase == "start" else None)
kept = []
look_rarely()
before = len(looks)
while len(looks) < before + 2:
    kept.append([])
first, second = looks[before:]
print(first[0] > second[0] > 700, first[1] > second[1] - first[1])
"""


def test_what_is_loaded_is_not_looked_at_before_the_work_begins_and_garbage_is():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("True True\n", "")


@pytest.fixture
def put_back():
    """Python looks for garbage afterwards as it did before."""
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_while_modules_are_loaded_nothing_is_looked_at_and_afterwards_all_is_as_it_was(put_back, enabled):
    (gc.enable if enabled else gc.disable)()
    with no_looks():
        assert not gc.isenabled()
    assert gc.isenabled() is enabled


LOADED_BEFORE = "import duckdb"
LOADED_AFTER_THE_FIRST_LOOK = """
many = [[] for _ in range(300_000)]
assert gc.get_freeze_count() > 200_000
import duckdb
"""
DUCKDB = """
import gc
from caf_pipeline.system.garbage import look_rarely

look_rarely()
{loaded}
cycle = [duckdb.connect(":memory:")]
cycle += [cycle, cycle[0].sql("SELECT 1")]
"""


@pytest.mark.parametrize("loaded", [LOADED_BEFORE, LOADED_AFTER_THE_FIRST_LOOK])
def test_duckdb_complains_of_nothing_that_is_left_in_a_cycle_at_the_end(loaded):
    run = subprocess.run([sys.executable, "-c", DUCKDB.format(loaded=loaded)], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr, run.returncode) == ("", "", 0)
