"""A real S3 server for tests: moto's, in a process of its own on a free port.

Also one that answers what a test tells it.

s3_server      the session's server                      new_bucket    a new bucket on it, with a
client scripted_s3    a server for answers that moto never gives: slow-downs, broken bodies,
listings that lie
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
    """Return the settings of a source on a test server."""
    keys = {"access_key_id": SecretStr(KEY_ID), "secret_access_key": SecretStr(SECRET)}
    return SourceSettings(**{"bucket": bucket, "endpoint_url": endpoint, **keys, **changes})


@dataclass(frozen=True)
class Bucket:
    """A bucket on a server, and a client that may do anything with it."""

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
    """Return a client with the settings of tests; building one takes longer than most tests."""
    return build_client(settings_for(endpoint, "any", **changes))


def make_bucket(endpoint: str, name: str | None = None) -> Bucket:
    """Make a bucket, by default of a name that none had before."""
    name = name or f"test-bucket-{next(_numbers)}"
    client = client_for(endpoint)
    client.create_bucket(Bucket=name)
    return Bucket(endpoint, name, client)


@contextmanager
def running_moto() -> Iterator[str]:
    """Run moto's server in a process of its own while the context lasts; give its address."""
    with tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        process = subprocess.Popen(
            command, env=child_environment(), stdout=said, stderr=subprocess.STDOUT
        )
        try:
            yield _address_of(process, said)
        finally:
            process.kill()
            process.wait()


def _address_of(process: "subprocess.Popen[bytes]", said: Any) -> str:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        said.seek(0)
        if found := _ADDRESS.search(said.read()):
            return found.group(1)
        time.sleep(0.05)
    said.seek(0)
    raise RuntimeError(f"moto's server does not start: {said.read()}")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an S3 server that lasts as long as the session."""
    with running_moto() as address:
        yield address


@pytest.fixture
def new_bucket(s3_server: str) -> Bucket:
    """A new, empty bucket."""
    return make_bucket(s3_server)


@dataclass
class Request:
    """One request as a scripted server got it. `query` has one value for each name."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]


@dataclass
class ScriptedAnswer:
    """What it answers.

    A `length` other than that of the body is a lie, after which the connection closes.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


def s3_error(status: int, code: str, message: str = "") -> ScriptedAnswer:
    """Return an error as S3 writes it."""
    body = (
        '<?xml version="1.0" '
        f'encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
    )
    return ScriptedAnswer(status, body.encode(), {"Content-Type": "application/xml"})


@dataclass
class ScriptedS3:
    """A server that answers what `answer` returns; `requests` are those that it got, in order."""

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
        """Say nothing."""


@contextmanager
def serving(script: ScriptedS3, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve a script on a free port while the context lasts; give the port."""
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
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that distrust the server or give up are what is tested."""


@pytest.fixture(scope="session")
def scripted_server() -> Iterator[ScriptedS3]:
    """A server for the session, for `scripted_s3`."""
    script = ScriptedS3()
    with serving(script) as port:
        script.endpoint = f"http://127.0.0.1:{port}"
        yield script


@pytest.fixture
def scripted_s3(scripted_server: ScriptedS3) -> ScriptedS3:
    """A server of the test's own; set its `answer`."""
    scripted_server.requests.clear()
    scripted_server.answer = lambda request: ScriptedAnswer()
    return scripted_server
