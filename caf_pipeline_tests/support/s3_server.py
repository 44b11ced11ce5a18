"""Moto's S3 server in a process of its own, and a scripted server.

`new_bucket` is a new bucket on the session's `s3_server`. `scripted_s3` answers as a test says, for
slow-downs, broken bodies and false listings.
"""

import itertools
import re
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from pydantic import SecretStr

from caf_pipeline.settings import SourceSettings
from caf_pipeline.source.s3.clients import build_client
from caf_pipeline.source.s3.get_client import GetClient
from caf_pipeline.source.s3.source import S3Source
from caf_pipeline.system.child_environment import child_environment
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS

KEY_ID, SECRET = "AKIATESTTESTTEST", "a-secret-that-no-message-may-hold"
_ADDRESS = re.compile(r"Running on (http://[\d.]+:\d+)")
_numbers = itertools.count(1)


def settings_for(endpoint: str, bucket: str, **changes: Any) -> SourceSettings:
    """Return the settings of a public source on a test server."""
    keys = {"access_key_id": SecretStr(KEY_ID), "secret_access_key": SecretStr(SECRET)}
    place = {"bucket": bucket, "endpoint_url": endpoint, "public": True}
    return SourceSettings(**{**place, **keys, **changes})


@dataclass(frozen=True)
class Bucket:
    """A bucket on a server, and a client with all permissions."""

    endpoint: str
    name: str
    client: Any

    def put(self, key: bytes | str, body: bytes = b"", **options: Any) -> dict[str, Any]:
        return self.client.put_object(Bucket=self.name, Key=_text(key), Body=body, **options)

    def delete(self, key: bytes | str) -> None:
        self.client.delete_object(Bucket=self.name, Key=_text(key))

    def keep_versions(self, status: str = "Enabled") -> None:
        self.client.put_bucket_versioning(
            Bucket=self.name, VersioningConfiguration={"Status": status}
        )

    def settings(self, **changes: Any) -> SourceSettings:
        return settings_for(self.endpoint, self.name, **changes)

    def source(self, prefix: str = "", **options: Any) -> S3Source:
        """Return the bucket as a source."""
        return S3Source(
            self.name,
            prefix,
            self.client,
            GetClient(self.client, self.name),
            **{"name": "demo", "attempts": 2, **options},
        )


def _text(key: bytes | str) -> str:
    return key.decode() if isinstance(key, bytes) else key


@cache
def client_for(endpoint: str, **changes: Any) -> Any:
    """Return a cached client; building one takes longer than most tests."""
    return build_client(settings_for(endpoint, "any", **changes))


def make_bucket(endpoint: str, name: str | None = None) -> Bucket:
    """Create a bucket, by default with a new name."""
    name = name or f"test-bucket-{next(_numbers)}"
    client = client_for(endpoint)
    client.create_bucket(Bucket=name)
    return Bucket(endpoint, name, client)


@contextmanager
def running_moto() -> Iterator[str]:
    """Run moto's server in a process while the context lasts; yield its address."""
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        process = subprocess.Popen(
            command, env=child_environment(), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield _address_of(process, output)
        finally:
            process.kill()
            process.wait()


def _address_of(process: "subprocess.Popen[bytes]", output: Any) -> str:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        output.seek(0)
        if match := _ADDRESS.search(output.read()):
            return match.group(1)
        time.sleep(0.05)
    output.seek(0)
    raise RuntimeError(f"moto's server does not start: {output.read()}")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of the session's S3 server."""
    with running_moto() as address:
        yield address


@pytest.fixture
def new_bucket(s3_server: str) -> Bucket:
    """A new, empty bucket."""
    return make_bucket(s3_server)


@dataclass
class Request:
    """A request to a scripted server. `query` has one value for each name."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]


@dataclass
class ScriptedAnswer:
    """An answer of a scripted server.

    If `length` is not the body's, the Content-Length is false and the connection then closes.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


def s3_error(status: int, code: str, message: str = "") -> ScriptedAnswer:
    """Return an error in S3's form."""
    body = (
        '<?xml version="1.0" '
        f'encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
    )
    return ScriptedAnswer(status, body.encode(), {"Content-Type": "application/xml"})


@dataclass
class ScriptedS3:
    """A server that answers with the result of `answer`, and records its requests."""

    endpoint: str = ""
    answer: Callable[[Request], ScriptedAnswer] = lambda request: ScriptedAnswer()
    requests: list[Request] = field(default_factory=list)

    def source(
        self, prefix: str = "", *, requester_pays: bool = False, inventory: str = "", **changes: Any
    ) -> S3Source:
        client = client_for(self.endpoint, **changes)
        gets = GetClient(client, "bucket-of-script", requester_pays=requester_pays)
        options = {
            "name": "demo",
            "attempts": 2,
            "requester_pays": requester_pays,
            "inventory": inventory,
        }
        return S3Source("bucket-of-script", prefix, client, gets, **options)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: ScriptedS3

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        query = {
            name: values[0]
            for name, values in parse_qs(split.query, keep_blank_values=True).items()
        }
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, unquote(split.path), query, headers)
        self.script.requests.append(request)
        answer = self.script.answer(request)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header(
            "Content-Length", str(len(answer.body) if answer.length is None else answer.length)
        )
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
        self.close_connection = True

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def serving(script: ScriptedS3, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve a script on a free port while the context lasts; yield the port."""
    handler = type("Handler", (_Handler,), {"script": script})
    with _Server(("127.0.0.1", 0), handler) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # with 5, the kernel drops connections that come together

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: tests use clients that distrust the server or give up."""


@pytest.fixture(scope="session")
def scripted_server() -> Iterator[ScriptedS3]:
    """The session's server, for `scripted_s3`."""
    script = ScriptedS3()
    with serving(script) as port:
        script.endpoint = f"http://127.0.0.1:{port}"
        yield script


@pytest.fixture
def scripted_s3(scripted_server: ScriptedS3) -> ScriptedS3:
    """A scripted server; set its `answer`."""
    scripted_server.requests.clear()
    scripted_server.answer = lambda request: ScriptedAnswer()
    return scripted_server
