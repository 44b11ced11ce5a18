"""A provider with scripted answers over real sockets, for faults missing from the loopback one."""

import contextlib
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Request:
    """A received request.

    It has the request line, the headers in lower case, and the part of the body that was read.
    """

    method: str
    path: str
    headers: dict[str, str]
    file: object

    def body(self) -> bytes:
        return self.file.read(int(self.headers.get("content-length", 0)))


@dataclass
class Script:
    """Answers in order. The last one also answers all further requests.

    An answer is bytes to send, or a function of the request and its socket. `kept` keeps the
    connection open.
    """

    answers: list[bytes | Callable]
    kept: bool = False
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> bytes | Callable:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class _Handler(socketserver.StreamRequestHandler):
    script: Script

    def handle(self):
        with self.script.lock:
            self.script.connections += 1
        with contextlib.suppress(ConnectionError):
            while self._one() and self.script.kept:
                pass

    def _one(self) -> bool:
        line = self.rfile.readline().decode().split()
        if not line:
            return False
        headers = {}
        while head := self.rfile.readline().decode().strip():
            name, _, value = head.partition(":")
            headers[name.lower()] = value.strip()
        request = Request(line[0], line[1], headers, self.rfile)
        with self.script.lock:
            self.script.requests.append(request)
            answer = self.script.next()
        if isinstance(answer, bytes):
            request.body()
            self.request.sendall(answer)
        else:
            answer(request, self.request)
        return True


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = False
    allow_reuse_address = True
    tls: ssl.SSLContext | None = None

    def get_request(self):
        sock, peer = super().get_request()
        return (self.tls.wrap_socket(sock, server_side=True) if self.tls else sock), peer


@contextlib.contextmanager
def scripted(
    *answers: bytes | Callable, kept: bool = False, tls: ssl.SSLContext | None = None
) -> Iterator[Script]:
    """Serve on a free port while the context lasts."""
    script = Script(list(answers), kept)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"script": script}))
    server.tls = tls
    script.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(
    status: int, body: bytes | str = b"", length: int | None = None, **headers: str
) -> bytes:
    """Return an answer's bytes. `length` overrides the announced length."""
    data = body.encode() if isinstance(body, str) else body
    lines = [
        f"HTTP/1.1 {status} Because",
        f"Content-Length: {len(data) if length is None else length}",
    ]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data
