"""Runs a command and says what it took, as JSON: `python -IS benchmarks/timed.py COMMAND…`.

A process of its own, and a small one: on Linux the peak memory of a child begins with that of the
process that started it.
"""

import json
import os
import sys
import time

started = time.monotonic()
process = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, used = os.wait4(process, 0)
print(
    json.dumps(
        {
            "exit": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - started,
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "peak_bytes": used.ru_maxrss * 1024,
        }
    ),
    file=sys.stderr,
)
