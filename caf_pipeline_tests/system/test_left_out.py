"""What a process of ours does without, though it is installed."""

import importlib.util
import subprocess
import sys

PROGRAM = """
import sys
from caf_pipeline.system.left_out import leave_out_unused

leave_out_unused()
import alembic.command, duckdb, httpx, pyarrow

listed = pyarrow.table({"number": [1, 2]})
unused = {"pandas", "httpx._main", "pygments"}
print(duckdb.sql("SELECT sum(number) FROM listed").fetchall(), unused & {*sys.modules})
"""


def test_a_process_of_ours_loads_no_pandas_for_its_lists_no_command_line_of_httpx_and_no_colours_of_mako():
    assert importlib.util.find_spec("pandas")
    assert importlib.util.find_spec("pygments")
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("[(3,)] set()\n", "")
