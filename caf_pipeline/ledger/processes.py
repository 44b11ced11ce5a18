"""Which process this is, and whether another one of this machine still lives.

Source: proc(5), proc_pid_stat(5), namespaces(7).
"""

import os
import sys
from functools import cache
from pathlib import Path

from caf_pipeline.ledger.records import Holder


@cache
def boot_id() -> str:
    """Return what all processes share whose pids this process can see: the machine's boot, and its
    pid namespace.

    Containers on one machine have the same boot id and count their pids apart.
    """
    if sys.platform == "linux":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    import psutil  # noqa: PLC0415  takes time to load that Linux has no use for

    return f"{os.uname().nodename}/{psutil.boot_time():.0f}"


def this_process(run: str) -> Holder:
    """Return this process as the holder of a lease for `run`."""
    pid = os.getpid()
    started = _started(pid)
    assert started is not None
    return Holder(run=run, boot_id=boot_id(), pid=pid, process_started=started)


def is_alive(boot: str, pid: int, process_started: float) -> bool | None:
    """Tell whether the process of a `Holder` still runs (a paused one does); None where that cannot
    be told from here.

    A process that was killed and not yet waited for is dead.
    """
    if boot != boot_id():
        return None
    return _started(pid) == process_started


def _started(pid: int) -> float | None:
    """Return the start of a running process, exact and the same at each call; None where there is
    none.
    """
    if sys.platform == "linux":
        # psutil adds the boot's wall-clock time, which shifts with the clock: a step of it would
        # declare everyone dead.
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        state, ticks = fields[0], fields[19]
        return None if state in b"ZX" else int(ticks) / os.sysconf("SC_CLK_TCK")
    import psutil  # noqa: PLC0415  as above

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
