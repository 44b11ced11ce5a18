"""The S3 server of the measurements: versitygw where it is or Go can install it, else moto's, which is the slower one.

A slow server hides what packing costs beside reading, so the report names the server.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
from obstore.store import S3Store

VERSITYGW = "github.com/versity/versitygw/cmd/versitygw@latest"
KEY = "bench"
START_SECONDS = 60


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _versitygw(tools: Path) -> str | None:
    found = shutil.which("versitygw", path=f"{tools}:{os.environ['PATH']}")
    if found or not shutil.which("go"):
        return found
    subprocess.run(["go", "install", VERSITYGW], env={**os.environ, "GOBIN": str(tools.resolve())}, check=False)
    return shutil.which("versitygw", path=str(tools))


@contextmanager
def running(folder: Path, tools: Path) -> Iterator[tuple[str, str]]:
    """Yield (endpoint, name) of a server whose bucket `bench` exists."""
    port = _free_port()
    program = _versitygw(tools)
    if program:
        (folder / "gateway" / "bench").mkdir(parents=True)
        command = [program, "--access", KEY, "--secret", KEY, "--port", f"127.0.0.1:{port}", "posix", str(folder / "gateway")]
    else:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if time.monotonic() > deadline or server.poll() is not None:
                raise SystemExit(f"{command[0]} did not start")
            time.sleep(0.05)
        endpoint = f"http://127.0.0.1:{port}"
        if not program:
            _create_bucket(endpoint)
        yield endpoint, "versitygw" if program else "moto"
    finally:
        server.terminate()
        server.wait()


def _create_bucket(endpoint: str) -> None:
    import boto3  # noqa: PLC0415 - moto only

    boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=KEY, aws_secret_access_key=KEY
    ).create_bucket(Bucket="bench")


def open_store(endpoint: str) -> S3Store:
    """Return the bucket for filling it and for the peer's bare reading."""
    return S3Store(
        "bench",
        endpoint=endpoint,
        region="us-east-1",
        access_key_id=KEY,
        secret_access_key=KEY,
        client_options={"allow_http": True},
    )


def fill(store: S3Store, prefix: str, *, count: int, size_bytes: int) -> None:
    """Put objects of random bytes, each of its own."""
    for number in range(count):
        obstore.put(store, f"{prefix}/{number:07d}", os.urandom(size_bytes))
