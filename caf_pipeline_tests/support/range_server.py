"""A real HTTP server for ranges, with good and bad habits."""

import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """The file at `/file`, and the server's habits.

    Attributes:
        etag: the file's ETag; "" for none.
        knows_ranges: False for a server that always sends the whole file.
        knows_suffixes: False for a server that refuses suffix ranges.
        break_after: bytes after which each answer's connection is cut, or None.
        failures: how many requests are answered with 503 first.
    """

    content: bytes
    etag: str = '"1"'
    knows_ranges: bool = True
    knows_suffixes: bool = True
    break_after: int | None = None
    failures: int = 0
    url: str = ""
    requests: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def do_GET(self):
        site, wanted = self.site, self.headers.get("Range", "")
        site.requests.append(wanted)
        if site.failures:
            site.failures -= 1
            return self._send(503, b"")
        if not self.path.startswith("/file"):
            return self._send(403 if self.path == "/secret" else 404, b"")
        if self.headers.get("If-Match", site.etag) != site.etag:
            return self._send(412, b"")
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted)
        if not match or not site.knows_ranges or not (match[1] or site.knows_suffixes):
            return self._send(200, site.content)
        size = len(site.content)
        first = int(match[1]) if match[1] else max(0, size - int(match[2]))
        last = min(int(match[2]), size - 1) if match[1] else size - 1
        if first >= size:
            return self._send(416, b"", f"bytes */{size}")
        return self._send(206, site.content[first : last + 1], f"bytes {first}-{last}/{size}")

    def _send(self, status: int, body: bytes, content_range: str = ""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.site.etag:
            self.send_header("ETag", self.site.etag)
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if self.site.break_after is not None and len(body) > self.site.break_after:
            body, self.close_connection = body[: self.site.break_after], True
        self.wfile.write(body)

    def handle(self):
        with contextlib.suppress(ConnectionError):  # a client may leave in the middle
            super().handle()

    def log_message(self, *_):
        """Keep the tests' output clean."""


@contextlib.contextmanager
def serving(site: Site) -> Iterator[Site]:
    """Serve on a free port while the context lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": site}))
    site.url = f"http://127.0.0.1:{server.server_port}/file"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
