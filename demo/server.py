"""The demo's S3 server (moto in its own process) and the files of its bucket.

moto keeps everything in memory. A new server gets the files of all earlier demos, with their
modification times as LastModified, so that they equal the archived objects. Objects that a user
adds are lost when the server ends.
"""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

import boto3
import ports
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from rich.console import Console
from rich.progress import track

from caf_pipeline.settings import load_settings
from caf_pipeline.system.child_environment import Need, child_environment
from caf_pipeline.system.secret_files import make_private

SETTINGS = load_settings()
DEMO = SETTINGS.source("demo")
ENDPOINT = DEMO.endpoint_url
BUCKET = DEMO.bucket

FOLDERS_FILE = SETTINGS.home / "demo-folders.json"
"""The folders of all demos so far. "" stands for this machine's Python files."""

# moto accepts any key, and the demo must not depend on the user's keys.
KEYS = {
    "AWS_ACCESS_KEY_ID": "demo",
    "AWS_SECRET_ACCESS_KEY": "demo",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}

PACKAGES = ("boto3", "dagster", "numpy", "pyarrow", "rich", "sqlalchemy")
"""Installed packages to archive: some thousand files of up to tens of MiB."""
LARGEST_BYTES = 64 << 20
START_SECONDS = 60
ASK_SECONDS = 5


def client(changes: Config | None = None) -> Any:  # noqa: ANN401 - boto3's clients have no type of their own
    """Return a client of the demo's server."""
    config = Config(
        s3={"addressing_style": "path"},
        retries={"max_attempts": 2},
        request_checksum_calculation="when_required",
    )
    return boto3.client(
        "s3",
        endpoint_url=ENDPOINT,
        region_name=KEYS["AWS_DEFAULT_REGION"],
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        config=config.merge(changes) if changes else config,
    )


def _answers() -> bool:
    return ports.answers(*_address())


def _address() -> tuple[str, int]:
    address = urlsplit(ENDPOINT)
    return address.hostname or "127.0.0.1", address.port or 80


def runs() -> bool:
    """Return whether the demo's server is already running, for example in `make ui`.

    Ends this process if another program uses the port.
    """
    config = Config(
        connect_timeout=ASK_SECONDS, read_timeout=ASK_SECONDS, retries={"total_max_attempts": 1}
    )
    try:
        if _answers() and BUCKET in [
            bucket["Name"] for bucket in client(config).list_buckets()["Buckets"]
        ]:
            return True
    except (BotoCoreError, ClientError, ResponseParserError, LookupError, TypeError):
        pass  # another program listens there
    hint = "set another port in endpoint_url of [sources.demo] in caf.toml"
    ports.require_free(*_address(), user="the demo's S3 server", hint=hint)
    return False


@contextmanager
def running() -> Iterator[None]:
    """Keep the server running, unless another terminal already does."""
    if runs():
        yield
        return
    command = [sys.executable, __file__]
    environment = child_environment(Need.SETTINGS)
    server = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
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


def main() -> None:
    """Serve until SIGTERM, or until standard input ends with the parent process."""
    from moto.core import DEFAULT_ACCOUNT_ID  # noqa: PLC0415 - filling the bucket needs no moto
    from moto.s3.models import s3_backends  # noqa: PLC0415
    from moto.server import main as serve  # noqa: PLC0415

    def end_with_input() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_input, daemon=True).start()
    moto = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    moto.create_bucket(BUCKET, KEYS["AWS_DEFAULT_REGION"])
    for folder in _demo_folders():
        for path, key in files_of(Path(folder) if folder else None):
            stored = moto.put_object(BUCKET, key, path.read_bytes())
            modified = datetime.fromtimestamp(path.stat().st_mtime, UTC)
            stored.last_modified = modified.replace(tzinfo=None)  # moto's times have no zone
    serve(["-H", "127.0.0.1", "-p", str(urlsplit(ENDPOINT).port)])


def _demo_folders() -> list[str]:
    return json.loads(FOLDERS_FILE.read_text(encoding="utf-8")) if FOLDERS_FILE.exists() else []


def show(folder: Path | None) -> list[tuple[Path, str]]:
    """Add a folder to those that new servers hold, and return each (file, key) of the folder.

    None is this machine's Python files.
    """
    folders = _demo_folders()
    name = str(folder) if folder else ""
    if name not in folders:
        make_private(FOLDERS_FILE.parent)
        FOLDERS_FILE.touch(mode=0o600)
        FOLDERS_FILE.write_text(json.dumps([*folders, name]), encoding="utf-8")
    return files_of(folder)


def files_of(folder: Path | None) -> list[tuple[Path, str]]:
    """Return each (file, key) of a folder, or of this machine's Python files if None."""
    return folder_files(folder, folder.name) if folder else python_files()


def python_files() -> list[tuple[Path, str]]:
    """Return each (file, key) of the standard library and of some installed packages."""
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    roots = [
        (library, f"python/{library.name}"),
        *((packages / name, f"packages/{name}") for name in PACKAGES),
    ]
    return [pair for root, prefix in roots for pair in folder_files(root, prefix)]


def folder_files(root: Path, prefix: str) -> list[tuple[Path, str]]:
    """Return each (file, key) of a folder's regular files, without caches and packages."""
    pairs = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(
            name for name in names if name not in ("__pycache__", "site-packages", "test")
        )
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGEST_BYTES:
                pairs.append((path, f"{prefix}/{path.relative_to(root).as_posix()}"))
    return pairs


def fill(files: list[tuple[Path, str]], console: Console) -> None:
    """Put the files into the bucket, except files that it has with the same size."""
    s3 = client()
    s3.create_bucket(Bucket=BUCKET)
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    sizes = {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", ())}
    missing = [(path, key) for path, key in files if sizes.get(key) != path.stat().st_size]
    if not missing:
        return

    def put(file: tuple[Path, str]) -> None:
        s3.put_object(Bucket=BUCKET, Key=file[1], Body=file[0].read_bytes())

    with ThreadPoolExecutor(8) as pool:
        for _ in track(
            pool.map(put, missing), "filling the bucket", total=len(missing), console=console
        ):
            pass


if __name__ == "__main__":
    main()
