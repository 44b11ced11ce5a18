"""Runs a command and prints its costs as JSON: `python -IS benchmarks/timed.py COMMAND…`.

This is a small process on purpose. On Linux, the peak memory of a child process starts at that of
its parent.
"""

import json
import os
import sys
import time

started = time.monotonic()
process = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(process, 0)
print(
    json.dumps(
        {
            "exit": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - started,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss * 1024,
        }
    ),
    file=sys.stderr,
)
