"""The S3 server of the measurements: versitygw where `make bench` could install it, else moto's,
which is the slower one.

A slow server hides what packing costs beside reading, so the report names the server. What is put
there stays below `.caf/bench`.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from benchmarks.inputs import KEPT, bodies

TOOLS = Path(".caf/tools")
KEY = "bench"
BUCKET = "bench"
SOURCE_KEYS = {
    f"CAF_SOURCES__BENCH__{name}": KEY for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
}
"""The server's keys as the environment gives them to our source `bench`."""
COPY = 'rclone copy --transfers 16 "$1" "$2"'
"""The peer's copy of `bench:bench/PREFIX` to a folder, in the environment of `S3Server.rclone`."""
START_SECONDS = 60
FILLERS = 8


@dataclass(frozen=True)
class S3Server:
    """A server with one bucket.

    `name` is the program's, `folder` where what it keeps is noted; None where nothing stays.
    """

    endpoint: str
    name: str
    folder: Path | None

    def fill(self, prefix: str, sizes: Sequence[int]) -> None:
        """Put objects of these sizes below a prefix, where they are not there; the server keeps a
        checksum of each.
        """
        done = self.folder / f"{prefix}.done" if self.folder else None
        described = f"{len(sizes)} {sum(sizes)}"
        if done and done.exists() and done.read_text() == described:
            return
        client = self.client()

        def put(one: tuple[str, bytes]) -> None:
            client.put_object(Bucket=BUCKET, Key=f"{prefix}/{one[0]}", Body=one[1])

        with ThreadPoolExecutor(FILLERS) as pool:
            waiting: list[Any] = []
            for one in bodies(sizes):
                waiting.append(pool.submit(put, one))
                if len(waiting) >= 2 * FILLERS:  # no more bodies in memory than these
                    waiting.pop(0).result()
            for future in waiting:
                future.result()
        if done:
            done.write_text(described)

    def client(self) -> Any:
        """Return boto3's client, for what is not measured."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=KEY,
        )

    def rclone(self) -> dict[str, str | None]:
        """Return the environment in which rclone knows the server as the remote `bench:`."""
        remote = {
            "TYPE": "s3",
            "PROVIDER": "Other",
            "ENDPOINT": self.endpoint,
            "REGION": "us-east-1",
            "ACCESS_KEY_ID": KEY,
            "SECRET_ACCESS_KEY": KEY,
        }
        named = {f"RCLONE_CONFIG_BENCH_{name}": value for name, value in remote.items()}
        # Debian's rclone ends where a bundle is named.
        return {**named, "RCLONE_CONFIG": "/dev/null", "AWS_CA_BUNDLE": None}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running() -> Iterator[S3Server]:
    """Run a server while the context lasts."""
    port = _free_port()
    program = shutil.which("versitygw", path=f"{TOOLS}:{os.environ['PATH']}")
    folder = KEPT / "s3" if program else None
    if folder and program:
        (folder / "objects" / BUCKET).mkdir(parents=True, exist_ok=True)
        command = [
            program,
            "--access",
            KEY,
            "--secret",
            KEY,
            "--port",
            f"127.0.0.1:{port}",
            "posix",
            str(folder / "objects"),
        ]
    else:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"{command[0]} did not start")
            time.sleep(0.05)
        server = S3Server(f"http://127.0.0.1:{port}", "versitygw" if program else "moto", folder)
        if not program:
            server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        process.terminate()
        process.wait()
