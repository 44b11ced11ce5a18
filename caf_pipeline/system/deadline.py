"""A time limit for a whole exchange over httpx, whose own limits are for each read, so that a byte now and then keeps it waiting.

What a server may send before its answer (interim answers without end, headers that drip) is read within httpx's own code; so
the limit is held where bytes are read from the socket.
"""

import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx


class Deadline(httpcore.NetworkBackend):
    """Opens sockets from which nothing is read once the calling thread's time is over. Made for one httpx client."""

    def __init__(self, client: httpx.Client) -> None:
        """Put it between the client and its sockets, those to proxies included."""
        self._of_thread = threading.local()
        self._opening: httpcore.NetworkBackend | None = None
        # httpx takes no network backend, httpcore does; a test holds that this is where it is looked for.
        for transport in (client._transport, *client._mounts.values()):
            if isinstance(transport, httpx.HTTPTransport):
                pool = transport._pool
                self._opening = self._opening or pool._network_backend
                pool._network_backend = self

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Let what this thread exchanges inside end by an httpx.TimeoutException after so long."""
        self._of_thread.ends = time.monotonic() + seconds
        try:
            yield
        finally:
            self._of_thread.ends = None

    def left(self, timeout: float | None) -> float | None:
        """Return how long this thread may wait now: `timeout`, or less."""
        ends: float | None = getattr(self._of_thread, "ends", None)
        if ends is None:
            return timeout
        left = ends - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("the whole of it took too long")
        return left if timeout is None else min(left, timeout)

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Open a socket."""
        assert self._opening is not None
        return _Stream(self._opening.connect_tcp(host, port, self.left(timeout), local_address, socket_options), self)


class _Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.left(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.left(timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, self._deadline.left(timeout)), self._deadline)

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 - as httpcore has it
        return self._stream.get_extra_info(info)
