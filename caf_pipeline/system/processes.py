"""This process's identity and memory, and whether another process of this machine is alive.

Source: proc(5), proc_pid_stat(5), namespaces(7).
"""

import multiprocessing
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

CGROUP: Final = Path("/sys/fs/cgroup")
"""Limits of a container (Linux, cgroup v2)."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The run that holds a lease. `process_started` guards its process against a reused pid."""

    run: str
    boot_id: str
    pid: int
    process_started: float


@cache
def boot_id() -> str:
    """Return the machine's boot and this process's pid namespace.

    Processes with the same value see each other's pids. Containers share only the boot.
    """
    if sys.platform == "linux":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    import psutil  # noqa: PLC0415  slow to load, and not needed on Linux

    return f"{os.uname().nodename}/{psutil.boot_time():.0f}"


def this_process(run: str) -> Holder:
    """Return this process as a holder of leases."""
    pid = os.getpid()
    started = _started(pid)
    assert started is not None
    return Holder(run=run, boot_id=boot_id(), pid=pid, process_started=started)


def parent_process(run: str) -> Holder | None:
    """Return the process that started this one by `multiprocessing`, as a holder."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return None
    # A parent that has ended gets a start that no process has.
    started = _started(parent.pid) or 0.0
    return Holder(run=run, boot_id=boot_id(), pid=parent.pid, process_started=started)


def is_alive(boot: str, pid: int, process_started: float) -> bool | None:
    """Return whether a process runs, paused or not; None if it is not visible from here.

    A killed process that was not yet reaped is dead.
    """
    if boot != boot_id():
        return None
    started = _started(pid)
    if started is None and _is_of_another_user(pid):
        return None  # /proc may be mounted with `hidepid`
    return started == process_started


def _is_of_another_user(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        pass
    return False


def _started(pid: int) -> float | None:
    if sys.platform == "linux":
        # psutil adds the wall-clock boot time. A step of the clock would declare every holder dead.
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        state, ticks = fields[0], fields[19]
        return None if state in b"ZX" else int(ticks) / os.sysconf("SC_CLK_TCK")
    import psutil  # noqa: PLC0415  slow to load

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def memory_bytes(cgroup: Path = CGROUP) -> int:
    """Return the memory of this machine or container."""
    size_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no file, or "max"
        size_bytes = min(size_bytes, int((cgroup / "memory.max").read_text()))
    return size_bytes
