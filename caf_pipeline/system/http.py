"""HTTP with untrusted servers: addresses are checked, and a whole exchange has a timeout.

HTTP clients limit each read, so slow servers keep them waiting. The sockets, which httpcore lets
its user supply, enforce the timeout. Each connection resolves its host once, and uses the checked
address.

The caller limits the answer. Source: httpcore's `NetworkBackend`; RFC 9110.
"""

import math
import os
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import httpcore
import httpx

STEP_SECONDS: Final = 0.5
"""Longest time between two calls of a limit's check."""

CONNECT_SECONDS: Final = 10.0
READ_BYTES: Final = 256 << 10
"""With httpcore's 64 KiB, a download took two thirds more CPU time."""

MAX_ADDRESSES: Final = 4
"""Addresses of a host that are tried. A name may resolve to any number of dead ones."""

ERRORS: Final = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    httpcore.UnsupportedProtocol,
)

Permit = Callable[[str, Sequence[str]], Sequence[str]]
"""Returns the allowed addresses of a host, or raises if there are none."""


def no_check() -> None:
    """Do not end the exchange."""


def _permit_all(_: str, addresses: Sequence[str]) -> Sequence[str]:
    return addresses


@dataclass
class Limit:
    """Timeout of an exchange, with a check that may end it. httpcore hands it to `_Sockets` unread.

    Attributes:
        seconds: of the whole exchange, from now.
        silence: seconds of each wait for bytes.
        check: called at least every STEP_SECONDS; may raise.
    """

    seconds: float
    silence: float = field(default=math.inf, kw_only=True)
    check: Callable[[], None] = field(default=no_check, kw_only=True)

    def __post_init__(self) -> None:
        self.renew(self.seconds)

    def renew(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._ends

    @property
    def extensions(self) -> dict[str, Any]:
        return {"timeout": {"connect": self, "read": self, "write": self}}

    def step(self, begun: float, most: float = STEP_SECONDS) -> float:
        """Return the seconds that a wait since `begun` may take until the next check.

        Raises:
            httpcore.ReadTimeout: The time is up.
            Exception: From `check`.
        """
        self.check()
        left = min(self._ends, begun + self.silence) - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("it took too long")
        return min(left, most)


class _Sockets(httpcore.NetworkBackend):
    """Every request must have a Limit."""

    def __init__(self, permit: Permit) -> None:
        self._permit = permit
        self._opening = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        assert isinstance(timeout, Limit)
        try:
            results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in results))
        failure: Exception = httpcore.ConnectError(f"no address of {host} answers")
        for address in self._permit(host, addresses)[:MAX_ADDRESSES]:
            seconds = timeout.step(time.monotonic(), CONNECT_SECONDS)
            try:
                return _Stream(
                    self._opening.connect_tcp(address, port, seconds, local_address, socket_options)
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


class _Stream(httpcore.NetworkStream):
    """`tls` counts TLS layers: 2 behind a TLS proxy."""

    def __init__(self, stream: httpcore.NetworkStream, tls: int = 0) -> None:
        self._stream = stream
        self._tls = tls

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return at most READ_BYTES. TLS has at most 16 KiB at a time."""
        assert isinstance(timeout, Limit)
        begun = time.monotonic()
        if not self._tls:
            max_bytes = max(max_bytes, READ_BYTES)
        while True:
            seconds = timeout.step(begun)
            with suppress(httpcore.ReadTimeout):
                return self._stream.read(max_bytes, seconds)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Raises WriteError if an answer has arrived already. httpcore reads it then."""
        assert isinstance(timeout, Limit)
        begun = time.monotonic()
        if self._tls > 1:
            self._stream.write(buffer, timeout.step(begun, math.inf))
            return
        sock: socket.socket = self.get_extra_info("socket")
        view = memoryview(buffer)
        while view:
            # With TLS, readable bytes may be part of the protocol.
            if not self._tls and self.get_extra_info("is_readable"):
                raise httpcore.WriteError("an answer came before the end of the request")
            sock.settimeout(timeout.step(begun))
            try:
                view = view[sock.send(view) :]
            except TimeoutError:
                continue
            except OSError as error:
                raise httpcore.WriteError(str(error)) from error
            begun = time.monotonic()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        assert isinstance(timeout, Limit)
        seconds = timeout.step(time.monotonic(), CONNECT_SECONDS)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, seconds), self._tls + 1)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 - httpcore's signature
        return self._stream.get_extra_info(info)


def guarded_pool(
    permit: Permit = _permit_all, *, most_idle: int | None = None, proxy: str = ""
) -> httpcore.ConnectionPool:
    """Return connections to allowed addresses, or through a proxy."""
    url = httpx.Proxy(proxy) if proxy else None
    return httpcore.ConnectionPool(
        ssl_context=_certificates(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
        proxy=httpcore.Proxy(str(url.url), url.raw_auth) if url else None,
        max_connections=None,
        max_keepalive_connections=most_idle,
        network_backend=_Sockets(permit),
    )


@cache
def _certificates(_file: str | None, _folder: str | None) -> ssl.SSLContext:
    return httpx.create_ssl_context()  # reads the two variables


class _Body(httpx.SyncByteStream):
    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        with _as_httpx():
            yield from self._response.iter_stream()

    def close(self) -> None:
        self._response.close()


class GuardedTransport(httpx.BaseTransport):
    """Transport of `httpx.Client` with guarded connections, or through the environment's proxy.

    The proxy's own address is not checked, and it chooses the address it connects to.
    """

    def __init__(self, permit: Permit = _permit_all) -> None:
        self._proxies = urllib.request.getproxies()
        self._pools = {"": guarded_pool(permit)}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        proxy = self._proxy_of(url)
        pool = self._pools.get(proxy) or self._pools.setdefault(proxy, guarded_pool(proxy=proxy))
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        with _as_httpx():
            response = pool.handle_request(
                httpcore.Request(
                    request.method,
                    target,
                    headers=request.headers.raw,
                    content=request.stream,
                    extensions=request.extensions,
                )
            )
        return httpx.Response(
            response.status,
            headers=response.headers,
            stream=_Body(response),
            extensions=dict(response.extensions),
        )

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _proxy_of(self, url: httpx.URL) -> str:
        proxy = self._proxies.get(url.scheme) or self._proxies.get("all", "")
        if not proxy or any(
            urllib.request.proxy_bypass(host) for host in (url.host, url.netloc.decode())
        ):
            return ""
        return proxy if "://" in proxy else f"http://{proxy}"


@contextmanager
def _as_httpx() -> Iterator[None]:
    try:
        yield
    except ERRORS as error:
        raise getattr(httpx, type(error).__name__)(str(error)) from error
