"""What a process of ours does without, though it is installed."""

import importlib.util
import subprocess
import sys

PROGRAM = """
import sys
from caf_pipeline.system.left_out import leave_out_unused

leave_out_unused()
import duckdb, httpx, pyarrow

listed = pyarrow.table({"number": [1, 2]})
print(duckdb.sql("SELECT sum(number) FROM listed").fetchall(), {"pandas", "httpx._main"} & {*sys.modules})
"""


def test_a_process_of_ours_loads_no_pandas_for_its_lists_and_no_command_line_of_httpx():
    assert importlib.util.find_spec("pandas")
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("[(3,)] set()\n", "")
