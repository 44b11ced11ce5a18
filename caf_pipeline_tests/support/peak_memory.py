"""The peak memory of this process alone.

A test compares what it grew by: what Python and its libraries take differs by machine.

`getrusage` would do, but on Linux a child begins with the peak of the process that forked it, so
that a test's figure depended on which tests ran before it.
"""

import resource
import sys
from pathlib import Path


def peak_bytes() -> int:
    """Return the most memory that this process has had resident since it began its program."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
