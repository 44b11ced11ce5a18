"""A Redis server for tests. Tests are skipped if it is not installed; `.ci/run` installs it."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from caf_pipeline_tests.support.free_ports import free_port

_ATTEMPTS = 400


@contextlib.contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """Run a server with its state in `folder` while the context lasts; yield its URL."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    port = free_port()
    with (folder / "redis.log").open("ab") as log:
        command = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(_ATTEMPTS):
            assert process.poll() is None, (folder / "redis.log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()
