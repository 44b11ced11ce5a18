"""The demo's S3 server: moto's, in a process of its own, and the files that go into it.

Not here: anything of the archive. moto keeps everything in memory, so each demo fills the bucket anew; unchanged files have
the same ETag and size and are the same objects to the archive.
"""

import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from rich.console import Console
from rich.progress import track

from caf_pipeline.child_environment import child_environment
from caf_pipeline.settings import load_settings

DEMO = load_settings().source("demo")
ENDPOINT = DEMO.endpoint_url
BUCKET = DEMO.bucket

# moto takes any key; what the demo shows must not depend on the user's own.
KEYS = {
    "AWS_ACCESS_KEY_ID": "demo",
    "AWS_SECRET_ACCESS_KEY": "demo",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}

PACKAGES = ("boto3", "dagster", "numpy", "pyarrow", "rich", "sqlalchemy")  # some thousand files, up to tens of MiB
LARGEST_BYTES = 64 << 20
START_SECONDS = 60


def client() -> Any:  # noqa: ANN401 - boto3's clients have no type of their own
    """Return a client of the demo's server."""
    config = Config(s3={"addressing_style": "path"}, retries={"max_attempts": 2}, request_checksum_calculation="when_required")
    return boto3.client(
        "s3",
        endpoint_url=ENDPOINT,
        region_name=KEYS["AWS_DEFAULT_REGION"],
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        config=config,
    )


def _answers() -> bool:
    address = urlsplit(ENDPOINT)
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((address.hostname, address.port)) == 0


@contextmanager
def running() -> Iterator[None]:
    """Keep the server up; one that runs already (`make ui` in another terminal) is used as it is."""
    if _answers():
        yield
        return
    port = str(urlsplit(ENDPOINT).port)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    server = subprocess.Popen(command, env=child_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers():
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the demo's S3 server did not start on {ENDPOINT}; is the port taken?")
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait()


def python_files() -> list[tuple[Path, str]]:
    """Return (file, key) of the standard library and of some installed packages."""
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    roots = [(library, f"python/{library.name}"), *((packages / name, f"packages/{name}") for name in PACKAGES)]
    return [pair for root, prefix in roots for pair in folder_files(root, prefix)]


def folder_files(root: Path, prefix: str) -> list[tuple[Path, str]]:
    """Return (file, key) of every regular file under a folder that is no cache and no installed package."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in ("__pycache__", "site-packages", "test"))
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGEST_BYTES:
                found.append((path, f"{prefix}/{path.relative_to(root).as_posix()}"))
    return found


def fill(files: list[tuple[Path, str]], console: Console) -> None:
    """Put the files into the bucket; those that are there with the same size are left."""
    s3 = client()
    s3.create_bucket(Bucket=BUCKET)
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    there = {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", ())}
    missing = [(path, key) for path, key in files if there.get(key) != path.stat().st_size]

    def put(file: tuple[Path, str]) -> None:
        s3.put_object(Bucket=BUCKET, Key=file[1], Body=file[0].read_bytes())

    with ThreadPoolExecutor(8) as pool:
        for _ in track(pool.map(put, missing), "filling the bucket", total=len(missing), console=console):
            pass
