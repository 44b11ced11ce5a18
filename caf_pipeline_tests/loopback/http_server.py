"""HTTP/1.1 with access to the sockets: answers can be cut, throttled, delayed or nonsense."""

import contextlib
import http.client
import json
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

READ_BYTES: Final = (
    128 << 10
)  # per read and write; with a MiB, Linux takes two to three times as long
DRAINED_BYTES: Final = 256 << 10  # Go's server closes the connection if more of a body is unread
HUGE_BYTES: Final = 64 << 20
IDLE_SECONDS: Final = 120


class Cut(Exception):
    """The connection ends here without another byte."""


class Request(BaseHTTPRequestHandler):
    """A connection. Its requests go to `server.application` in order."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True
    server: "Server"
    clock_days: float = 0
    """How many days the server's clock is ahead of this machine's."""

    def parse_request(self) -> bool:
        """Record the start of a request: a server's limits count from there."""
        self.began = time.monotonic()
        self.connection.settimeout(IDLE_SECONDS)
        return super().parse_request()

    def _serve(self) -> None:
        self.server.count("requests")
        self.body = Body(self)
        split = urlsplit(self.path)
        self.route = unquote(split.path)
        self.query = {
            name: values[-1]
            for name, values in parse_qs(split.query, keep_blank_values=True).items()
        }
        try:
            self.server.application(self)
            self.body.drain()
        except (Cut, ConnectionError, TimeoutError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _serve

    def send_response(self, code: int, message: str | None = None) -> None:
        """Begin an answer. As on the real servers, there is no Server header."""
        self.send_response_only(code, message)
        self.send_header("Date", self.date_time_string(time.time() + self.clock_days * 86_400))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def answer(self, status: int, content: bytes, content_type: str, **headers: str) -> None:
        """Send a complete answer. Header names have `_` for `-`."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        if not self.body.finished and self.body.known_bytes > DRAINED_BYTES:
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def read_json(self) -> Any:
        """Return the body as JSON. Raises ValueError."""
        return json.loads(b"".join(self.body))

    def nonsense(self, kind: str) -> None:
        """Send an answer that is useless to every client."""
        match kind:
            case "html":
                self.answer(200, b"<html><body>502 Bad Gateway</body></html>", "text/html")
            case "short":
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"file":')
                raise Cut
            case "huge":
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(HUGE_BYTES + 8))
                self.end_headers()
                self.wfile.write(b'{"a":"')
                for _ in range(HUGE_BYTES // READ_BYTES):
                    self.wfile.write(b"x" * READ_BYTES)
                self.wfile.write(b'"}')
            case _:
                raise ValueError(f"there is no nonsense '{kind}'")


class Body:
    """A request's body in pieces, of known length or chunked.

    Attributes:
        read_bytes: bytes received so far.
        rate: bytes a second at most; 0 for no limit.
        limit: cut the connection after so many bytes.
        deadline: by `time.monotonic`; then the connection is cut.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.read_bytes = 0
        self.rate: float = 0
        self.limit: int | None = None
        self.deadline: float | None = None
        self.chunked = "chunked" in request.headers.get("Transfer-Encoding", "").lower()
        self.known_bytes = int(request.headers.get("Content-Length") or 0)
        self.finished = not self.chunked and self.known_bytes == 0

    def __iter__(self) -> Iterator[bytes]:
        """Yield the body in pieces. Ends early if the client closes the connection."""
        began = time.monotonic()
        for size in self._sizes():
            remaining = size
            while remaining:
                self._wait_at_most()
                piece = self._request.rfile.read1(min(remaining, READ_BYTES))
                if not piece:
                    self._request.close_connection = True
                    self.finished = True
                    return
                remaining -= len(piece)
                self.read_bytes += len(piece)
                if self.limit is not None and self.read_bytes > self.limit:
                    raise Cut
                if self.rate:
                    time.sleep(max(0, self.read_bytes / self.rate - (time.monotonic() - began)))
                yield piece
        self.finished = True

    def _sizes(self) -> Iterator[int]:
        if not self.chunked:
            yield self.known_bytes - self.read_bytes
            return
        read_line = self._request.rfile.readline
        while size := self._chunk_size(read_line(256)):
            yield size
            read_line(256)
        while read_line(1024).strip():
            pass

    @staticmethod
    def _chunk_size(line: bytes) -> int:
        try:
            return int(line.split(b";")[0], 16)
        except ValueError:
            raise Cut from None

    def _wait_at_most(self) -> None:
        if self.deadline is None:
            return
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise Cut
        self._request.connection.settimeout(remaining)

    def drain(self) -> None:
        """Read the unread rest of the body, or cut the connection if it is long."""
        if self.finished:
            return
        if self.chunked or self.known_bytes - self.read_bytes > DRAINED_BYTES:
            self._linger()
            raise Cut
        for _ in self:
            pass

    def _linger(self) -> None:
        """Let the client read the answer before its sending breaks the connection."""
        self._request.wfile.flush()
        connection = self._request.connection
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(0.5)
        for _ in range(64):
            if not connection.recv(READ_BYTES):
                return


class Server(ThreadingHTTPServer):
    """Listens on one port."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, port: int, application: Callable[[Request], None], traffic: Counter[str]
    ) -> None:
        super().__init__(("127.0.0.1", port), Request)
        self.application = application
        self._traffic = traffic
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Record the connection for `reset`."""
        with self._lock:
            self._connections.add(request)
        self.count("connections")
        super().process_request(request, client_address)

    def count(self, name: str) -> None:
        with self._lock:
            self._traffic[name] += 1

    def shutdown_request(self, request: Any) -> None:
        """Forget the connection."""
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def reset(self) -> None:
        """Abort every open connection, like a dying process."""
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # the client closed it first
                    connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report faults of this program, but not clients that disconnect."""
        if not isinstance(
            sys.exc_info()[1], (ConnectionError, TimeoutError, http.client.HTTPException)
        ):
            super().handle_error(request, client_address)


class Listener:
    """A server that can close its port and open it again.

    `traffic` counts the connections and requests since the process began.
    """

    def __init__(self, port: int, application: Callable[[Request], None]) -> None:
        self._application = application
        self._lock = threading.Lock()
        self._server: Server | None = None
        self.port = port
        self.traffic = Counter[str]()
        self.open()

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Accept connections."""
        with self._lock:
            if self._server is None:
                self._server = Server(self.port, self._application, self.traffic)
                self.port = self._server.server_address[1]
                threading.Thread(
                    target=self._server.serve_forever, args=(0.1,), daemon=True
                ).start()

    def close(self, *, reset: bool = False) -> None:
        """Accept no connections. `reset` aborts the open ones."""
        with self._lock:
            if self._server is not None:
                self._server.shutdown()
                if reset:
                    self._server.reset()
                self._server.server_close()
                self._server = None
