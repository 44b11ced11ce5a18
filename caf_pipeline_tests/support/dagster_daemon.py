"""A real Dagster daemon for tests, with its code server and its runs, and an instance on which it looks each second."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from caf_pipeline.dagster_host.home import prepare_dagster_home

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 150


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)


def impatient_home(settings) -> Path:
    """Our dagster.yaml, with monitoring that looks each second."""
    home = prepare_dagster_home(settings)
    instance = yaml.safe_load((ROOT / "dagster.yaml").read_text())
    instance["run_monitoring"] |= {"poll_interval_seconds": 1, "free_slots_after_run_end_seconds": 1}
    (home / "dagster.yaml").unlink()
    (home / "dagster.yaml").write_text(yaml.safe_dump(instance))
    return home


@contextmanager
def daemon(module: str, folder: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon, its code server and its runs, in a process group of their own that is killed at the end."""
    with (folder / "daemon.log").open("ab") as log:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("dagster-daemon"), "run", "-m", module, "-d", str(ROOT)],
            env=os.environ | environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
