"""Describes the machine and the commit of a measurement."""

import os
import platform
import subprocess
from importlib.metadata import version

from caf_pipeline.caf.merkle import IMPLEMENTATION


def describe() -> str:
    """Return one line: processor, cores, memory, system and versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    names = ("awscrt", "pyarrow", "duckdb", "blake3")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB; {platform.system()} "
        f"{platform.release()}; "
        f"Python {platform.python_version()}; {versions}; Merkle roots in {IMPLEMENTATION} code"
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str:
    """Return the short hash of the current commit, with a + if tracked files have status."""
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    status = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"],
        capture_output=True,
        text=True,
        check=False,
    )
    return (head.stdout.strip() or "unknown") + ("+" if status.stdout else "")
