"""The S3 server of the benchmarks: versitygw if `make bench` could install it, else moto's.

A slow server hides the costs of packing, and moto's is the slower one. So the results name the
server. versitygw keeps its objects below `.caf/bench`.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3

from benchmarks.inputs import KEPT, bodies
from benchmarks.network import distant

TOOLS = Path(".caf/tools")
KEY = "bench"
BUCKET = "bench"
SOURCE_KEYS = {
    f"CAF_SOURCES__BENCH__{name}": KEY for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
}
"""Environment variables with the server's keys for the source `bench`."""
COPY = 'rclone copy --transfers 16 "$1" "$2"'
"""Script of the peer: copies `bench:bench/PREFIX` to a folder.

It needs the environment of `S3Server.rclone`. More transfers are slower without latency.
"""
TRANSFERS = ("--transfers 16", "--transfers 64", "--transfers 128")
"""Options of rclone. On a network with latency, the peer uses the fastest of them."""
START_SECONDS = 60
FILLERS = 8


@dataclass(frozen=True)
class S3Server:
    """An S3 server with one bucket.

    Attributes:
        endpoint: Address for the measured commands, perhaps of a proxy.
        direct: Address without a proxy.
        name: Name of the program.
        folder: Folder of the server's objects, with a note for each filled prefix. None
            if the objects do not outlive the server.
    """

    endpoint: str
    direct: str
    name: str
    folder: Path | None

    def fill(self, prefix: str, sizes: Sequence[int]) -> None:
        """Put objects of these sizes below a prefix with checksums, if they are missing."""
        done = self.folder / f"{prefix}.done" if self.folder else None
        description = f"{len(sizes)} {sum(sizes)}"
        if done and done.exists() and done.read_text() == description:
            return
        client = self.client()

        def put(item: tuple[str, bytes]) -> None:
            client.put_object(Bucket=BUCKET, Key=f"{prefix}/{item[0]}", Body=item[1])

        with ThreadPoolExecutor(FILLERS) as pool:
            waiting: list[Any] = []
            for item in bodies(sizes):
                waiting.append(pool.submit(put, item))
                if len(waiting) >= 2 * FILLERS:  # limits the bodies in memory
                    waiting.pop(0).result()
            for future in waiting:
                future.result()
        if done:
            done.write_text(description)

    @contextmanager
    def behind_network(self, milliseconds: int) -> Iterator["S3Server"]:
        """Put a network with this round trip before the server while the context lasts."""
        with distant(self.direct, milliseconds) as endpoint:
            yield replace(self, endpoint=endpoint)

    def client(self) -> Any:
        """Return a boto3 client. It is not used in measurements."""
        return boto3.client(
            "s3",
            endpoint_url=self.direct,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=KEY,
        )

    def rclone(self) -> dict[str, str | None]:
        """Return an environment in which rclone has the server as the remote `bench:`."""
        remote = {
            "TYPE": "s3",
            "PROVIDER": "Other",
            "ENDPOINT": self.endpoint,
            "REGION": "us-east-1",
            "ACCESS_KEY_ID": KEY,
            "SECRET_ACCESS_KEY": KEY,
        }
        variables = {f"RCLONE_CONFIG_BENCH_{name}": value for name, value in remote.items()}
        # Debian's rclone fails if AWS_CA_BUNDLE is set.
        return {**variables, "RCLONE_CONFIG": "/dev/null", "AWS_CA_BUNDLE": None}


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
            "--keep-alive",
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
        endpoint = f"http://127.0.0.1:{port}"
        server = S3Server(endpoint, endpoint, "versitygw" if program else "moto", folder)
        if not program:
            server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        process.terminate()
        process.wait()
