"""A misbehaving S3 in front of a real one: it forwards requests, and changes answers on order.

The fixture `unruly_s3` is a proxy in front of the session's server. It runs in threads of the
test's process, so an order is a method call, and a fault may do anything at an exact byte.
"""

import contextlib
import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, Final, Literal
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import pytest

from caf_pipeline_tests.support.s3_server import Bucket

Kind = Literal["object", "head", "listing", "other"]

_HOP_BY_HOP: Final = frozenset(
    {"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"}
)
_ENTRY: Final = re.compile(rb"<(Contents|Version)>.*?</\1>", re.DOTALL)
_KEY_COUNT: Final = re.compile(rb"<KeyCount>\d+<")
_TIME: Final = re.compile(rb"<LastModified>([^<]+)</LastModified>")
_NO_LINGER: Final = struct.pack("ii", 1, 0)  # close sends RST, not FIN


@dataclass(frozen=True)
class ProxiedRequest:
    """A request as the proxy received it.

    `number` counts the requests that an order applies to by kind and key, from 1.
    """

    kind: Kind
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    number: int = 0


@dataclass(frozen=True)
class Answer:
    """The answer to the client.

    Attributes:
        length: a false Content-Length. If it is larger than the body, the connection ends early. A
            negative one is not sent.
        cut_after: bytes of the body before a reset of the connection, or None.
        at: bytes of the body before `action` is called; then the rest is sent.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    length: int | None = None
    cut_after: int | None = None
    at: int = 0
    action: Callable[[], object] | None = None


Spoil = Callable[[ProxiedRequest, Answer], Answer]


@dataclass
class _Order:
    """A change of answers: `applies` selects requests, `remaining` counts further changes."""

    kind: Kind | None
    key: str | None
    spoil: Spoil
    applies: Callable[[ProxiedRequest], bool]
    remaining: int | None
    numbers: Any = field(default_factory=lambda: count(1))


class UnrulyS3:
    """The proxy. The first order that applies to a request counts; `well_behaved` cancels all.

    Attributes:
        struck: answers changed since the last `well_behaved`.
        page_keys: keys in a page of a listing, whatever the request says; None: as requested.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.endpoint = ""
        self._port = 0
        self.page_keys: int | None = None
        self.struck = 0
        self._orders: list[_Order] = []
        self._lock = threading.Lock()

    def in_front_of(self, bucket: Bucket) -> Bucket:
        """Return the bucket behind the proxy; its client still uses the server itself."""
        return replace(bucket, endpoint=self.endpoint)

    def start(self) -> None:
        """Listen, on the same port as before."""
        handler = type("Handler", (_Handler,), {"unruly": self})
        self._server = _Server(("127.0.0.1", self._port), handler)
        self._port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self._port}"
        named = {"poll_interval": 0.01}
        threading.Thread(target=self._server.serve_forever, kwargs=named, daemon=True).start()

    def kill(self) -> None:
        """Abort all connections and close the port, as the end of a server does."""
        self._server.shutdown()
        self._server.reset()
        self._server.server_close()

    def well_behaved(self) -> None:
        """Cancel all orders."""
        with self._lock:
            self._orders, self.page_keys, self.struck = [], None, 0

    def order(
        self,
        spoil: Spoil,
        *,
        kind: Kind | None = "object",
        key: str | None = None,
        times: int | None = None,
        when: Callable[[ProxiedRequest], bool] = lambda request: True,
    ) -> None:
        """Change the answers to requests of this kind and key; None: all.

        At most `times` of the requests that `when` selects are changed.
        """
        with self._lock:
            self._orders.append(_Order(kind, key, spoil, when, times))

    def slow_down(self, struck: int, of: int, **which: Any) -> None:
        """Answer 503 SlowDown to the first `struck` of every `of` requests."""
        self.order(
            lambda request, answer: error(503, "SlowDown"),
            when=lambda request: (request.number - 1) % of < struck,
            **which,
        )

    def fail(self, status: int = 500, code: str = "InternalError", **which: Any) -> None:
        """Answer with an error of S3."""
        self.order(lambda request, answer: error(status, code), **which)

    def reset_after(self, size_bytes: int, **which: Any) -> None:
        """Reset the connection after this many bytes of the body."""
        self.order(lambda request, answer: replace(answer, cut_after=size_bytes), **which)

    def cut_body(self, size_bytes: int, *, honest: bool, **which: Any) -> None:
        """Omit the last bytes of a body.

        The Content-Length is that of the sent bytes (`honest`) or of the original body.
        """

        def cut(request: ProxiedRequest, answer: Answer) -> Answer:
            body = answer.body[: max(0, len(answer.body) - size_bytes)]
            return replace(answer, body=body, length=None if honest else len(answer.body))

        self.order(cut, **which)

    def wrong_etag(self, etag: str = '"00000000000000000000000000000000"', **which: Any) -> None:
        """Answer with the right bytes and another ETag."""
        self.order(lambda request, answer: with_header(answer, "ETag", etag), **which)

    def other_bytes(self, **which: Any) -> None:
        """Answer with other bytes of the same length and ETag; only a checksum reveals it."""
        self.order(
            lambda request, answer: replace(
                answer, body=bytes(byte ^ 0x55 for byte in answer.body)
            ),
            **which,
        )

    def other_object(self, bucket: Bucket, other_key: str, **which: Any) -> None:
        """Answer with another object and its headers."""

        def other(request: ProxiedRequest, answer: Answer) -> Answer:
            response = bucket.client.get_object(Bucket=bucket.name, Key=other_key)
            with contextlib.closing(response["Body"]) as body:
                return with_header(
                    replace(answer, status=200, body=body.read()), "ETag", response["ETag"]
                )

        self.order(other, **which)

    def say(self, body: bytes, content_type: str = "application/xml", **which: Any) -> None:
        """Answer 200 with these bytes."""
        self.order(
            lambda request, answer: Answer(200, {"Content-Type": content_type}, body), **which
        )

    def list_otherwise(self, change: Callable[[list[bytes]], list[bytes]], **which: Any) -> None:
        """Change the entries of a page."""

        def changed(request: ProxiedRequest, answer: Answer) -> Answer:
            entries = change([match.group() for match in _ENTRY.finditer(answer.body)])
            rest = _KEY_COUNT.sub(b"<KeyCount>%d<" % len(entries), _ENTRY.sub(b"", answer.body))
            end = rest.rindex(b"</")
            return replace(answer, body=rest[:end] + b"".join(entries) + rest[end:])

        self.order(changed, kind="listing", **which)

    def hang(self, seconds: float, **which: Any) -> None:
        """Wait before answering."""

        def wait(request: ProxiedRequest, answer: Answer) -> Answer:
            time.sleep(seconds)
            return answer

        self.order(wait, **which)

    def skew(self, by: timedelta) -> None:
        """Shift the clock, in every Date and LastModified."""
        self.order(lambda request, answer: _skewed(answer, by), kind=None)

    def one_time(self, moment: str = "2026-01-01T00:00:00.000Z") -> None:
        """Give every listed object this LastModified."""
        element = f"<LastModified>{moment}</LastModified>".encode()
        self.order(
            lambda request, answer: replace(answer, body=_TIME.sub(element, answer.body)),
            kind="listing",
        )

    def meanwhile(
        self, action: Callable[[], object], *, at: int = 0, cut: bool = False, **which: Any
    ) -> None:
        """Call `action` after `at` bytes of a body, then continue or `cut` the connection."""

        def doing(request: ProxiedRequest, answer: Answer) -> Answer:
            return replace(answer, at=at, action=action, cut_after=at if cut else None)

        self.order(doing, **which)

    def after_page(self, action: Callable[[], object], *, page: int = 1) -> None:
        """Call `action` after a page of a listing, counted from 1, and before the next request."""
        self.meanwhile(
            action, at=1 << 30, kind="listing", times=1, when=lambda request: request.number == page
        )

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Forward a request, and change the answer if an order applies."""
        split = urlsplit(path)
        query = {
            name: values[0]
            for name, values in parse_qs(split.query, keep_blank_values=True).items()
        }
        request = ProxiedRequest(
            _kind(method, split.path, query),
            unquote(split.path.lstrip("/").partition("/")[2]),
            query,
            headers,
        )
        if request.kind == "listing" and self.page_keys is not None:
            path = f"{split.path}?{urlencode(query | {'max-keys': str(self.page_keys)})}"
        original = self._pass_on(method, path, headers, body)
        spoil, request = self._applicable(request)
        return (
            spoil(request, original)
            if spoil and (original.status < 300 or request.kind != "object")
            else original
        )

    def _applicable(self, request: ProxiedRequest) -> tuple[Spoil | None, ProxiedRequest]:
        with self._lock:
            for order in self._orders:
                if (
                    order.kind not in (None, request.kind)
                    or order.key not in (None, request.key)
                    or order.remaining == 0
                ):
                    continue
                numbered = replace(request, number=next(order.numbers))
                if order.applies(numbered):
                    order.remaining = None if order.remaining is None else order.remaining - 1
                    self.struck += 1
                    return order.spoil, numbered
        return None, request

    def _pass_on(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        with contextlib.closing(
            http.client.HTTPConnection(urlsplit(self.backend).netloc, timeout=60)
        ) as connection:
            sent = {
                name: value
                for name, value in headers.items()
                if name.lower() not in ("connection", "content-length")
            }
            connection.request(method, path, body=body or None, headers=sent)
            response = connection.getresponse()
            content = response.read()
            kept = {
                name: value
                for name, value in response.getheaders()
                if name.lower() not in _HOP_BY_HOP
            }
            length = int(response.headers.get("Content-Length", 0)) if method == "HEAD" else None
            return Answer(response.status, kept, content, length=length)


def error(status: int, code: str) -> Answer:
    body = (
        '<?xml version="1.0" '
        f'encoding="UTF-8"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'
    )
    return Answer(status, {"Content-Type": "application/xml"}, body.encode())


def with_header(answer: Answer, name: str, value: str) -> Answer:
    others = {
        other: value for other, value in answer.headers.items() if other.lower() != name.lower()
    }
    return replace(answer, headers=others | {name: value})


def _kind(method: str, path: str, query: Mapping[str, str]) -> Kind:
    key = path.lstrip("/").partition("/")[2]
    if key:
        return "head" if method == "HEAD" else "object"
    return (
        "listing" if method == "GET" and ("list-type" in query or "versions" in query) else "other"
    )


def _skewed(answer: Answer, by: timedelta) -> Answer:
    def later(match: re.Match[bytes]) -> bytes:
        moment = datetime.fromisoformat(match.group(1).decode().replace("Z", "+00:00")) + by
        return f"<LastModified>{moment:%Y-%m-%dT%H:%M:%S}.000Z</LastModified>".encode()

    for name, value in answer.headers.items():
        if name.lower() == "last-modified":
            answer = with_header(
                answer, name, format_datetime(parsedate_to_datetime(value) + by, usegmt=True)
            )
            break
    answer = with_header(answer, "Date", format_datetime(datetime.now(UTC) + by, usegmt=True))
    return replace(
        answer, body=_TIME.sub(later, answer.body) if _TIME.search(answer.body) else answer.body
    )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    unruly: UnrulyS3

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = self.unruly.answer(self.command, self.path, dict(self.headers.items()), body)
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        length = len(answer.body) if answer.length is None else answer.length
        if length >= 0:
            self.send_header("Content-Length", str(length))
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(answer)

    def _send_body(self, answer: Answer) -> None:
        if answer.action:
            self.wfile.write(answer.body[: answer.at])
            self.wfile.flush()
            answer.action()
            if answer.cut_after is None:
                self.wfile.write(answer.body[answer.at :])
        elif answer.cut_after is not None:
            self.wfile.write(answer.body[: answer.cut_after])
        else:
            self.wfile.write(answer.body)
        if answer.cut_after is not None:
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def log_message(self, format: str, *args: Any) -> None: ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # with 5, the kernel drops connections that come together

    def __init__(self, *arguments: Any) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def reset(self) -> None:
        """Abort every open connection, like a dying process."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # it has just ended
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: tests use clients that give up."""

    def shutdown_request(self, request: Any) -> None:
        """Close without a regular end of the stream, so that a reset is sent."""
        self._connections.discard(request)
        self.close_request(request)


@pytest.fixture(scope="session")
def unruly_server(s3_server: str) -> Iterator[UnrulyS3]:
    """The session's proxy, for `unruly_s3`."""
    unruly = UnrulyS3(s3_server)
    unruly.start()
    yield unruly
    unruly.kill()


@pytest.fixture
def unruly_s3(unruly_server: UnrulyS3) -> Iterator[UnrulyS3]:
    """A proxy in front of the session's server, well behaved at the start of each test."""
    unruly_server.well_behaved()
    yield unruly_server
    unruly_server.well_behaved()
