"""HTTP with servers that nobody vouches for: a host's addresses are guarded, a whole exchange has
an end, and a check can end it.

An HTTP client's own limits are for each read, so that a byte now and then keeps it waiting; and
what a server may send before its answer (interim answers without end, headers that drip) is read
inside the client. So both limits are held at the sockets, which httpcore lets its user supply. A
host is looked up once for each connection, and connected to at the addresses that were judged.

What an answer means, and how long it may be, is its reader's to say. Source: httpcore's
`NetworkBackend`; RFC 9110.
"""

import math
import os
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final

import httpcore
import httpx

STEP_SECONDS: Final = 0.5
"""The longest wait between two looks at a limit's check."""

CONNECT_SECONDS: Final = 10.0
READ_BYTES: Final = 256 << 10
"""Taken from a socket at once; httpcore asks for 64 KiB, and took two thirds more of CPU time for a
download by them.
"""

MAX_ADDRESSES: Final = 4
"""Of one host that are tried: a name may stand for any number of addresses at which no server
answers.
"""

ERRORS: Final = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    httpcore.UnsupportedProtocol,
)
"""What httpcore raises where there is no answer."""

Permit = Callable[[str, Sequence[str]], Sequence[str]]
"""Returns, of a host's addresses, those that may be connected to, or raises an error that says why
there is none.
"""


def no_check() -> None:
    """Find nothing wrong."""


def _permit_all(_: str, addresses: Sequence[str]) -> Sequence[str]:
    return addresses


class Limit(float):
    """How long an exchange may take, and what may end it before.

    A float, as which httpcore hands a time limit to the sockets.
    """

    def __new__(
        cls, seconds: float, *, silence: float = math.inf, check: Callable[[], None] = no_check
    ) -> "Limit":
        """Limit the whole to `seconds` from now, and each wait for bytes to `silence`; `check`
        raises what ends it.
        """
        limit = super().__new__(cls, seconds)
        limit.silence = silence
        limit.check = check
        limit.renew(seconds)
        return limit

    silence: float
    check: Callable[[], None]

    def renew(self, seconds: float) -> None:
        """Begin the time limit again: it ends in so many seconds."""
        self._ends = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether the whole has taken as long as it may."""
        return time.monotonic() >= self._ends

    @property
    def extensions(self) -> dict[str, Any]:
        """A request's extensions by which it is held."""
        return {"timeout": {"connect": self, "read": self, "write": self}}

    def step(self, begun: float, most: float = STEP_SECONDS) -> float:
        """Return how long a wait that began then may go on before the next look.

        Raises:
            httpcore.ReadTimeout: it is over. Whatever `check` raises.
        """
        self.check()
        left = min(self._ends, begun + self.silence) - time.monotonic()
        if left <= 0:
            raise httpcore.ReadTimeout("it took too long")
        return min(left, most)


class _Sockets(httpcore.NetworkBackend):
    """Opens sockets to permitted addresses. Every request has a `Limit`."""

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
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        addresses = list(dict.fromkeys(str(place[0]) for *_, place in found))
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
    """A socket that is waited for in small steps; `tls` counts what lies over it, two where a proxy
    is reached by TLS, too.
    """

    def __init__(self, stream: httpcore.NetworkStream, tls: int = 0) -> None:
        self._stream = stream
        self._tls = tls

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return what is there, up to `READ_BYTES`; TLS has no more than 16 KiB at once anyway."""
        assert isinstance(timeout, Limit)
        begun = time.monotonic()
        if not self._tls:
            max_bytes = max(max_bytes, READ_BYTES)
        while True:
            seconds = timeout.step(begun)
            with suppress(httpcore.ReadTimeout):
                return self._stream.read(max_bytes, seconds)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send everything.

        After a WriteError httpcore reads the answer, so it is raised where one is there already.
        """
        assert isinstance(timeout, Limit)
        begun = time.monotonic()
        if self._tls > 1:
            self._stream.write(buffer, timeout.step(begun, math.inf))
            return
        sock: socket.socket = self.get_extra_info("socket")
        view = memoryview(buffer)
        while view:
            if not self._tls and self.get_extra_info(
                "is_readable"
            ):  # with TLS, what can be read need not be an answer
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

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 - as httpcore has it
        return self._stream.get_extra_info(info)


def guarded_pool(
    permit: Permit = _permit_all, *, most_idle: int | None = None, proxy: str = ""
) -> httpcore.ConnectionPool:
    """Return connections to permitted addresses, whose requests all have a `Limit`, directly or by
    a proxy.
    """
    named = httpx.Proxy(proxy) if proxy else None
    return httpcore.ConnectionPool(
        ssl_context=_certificates(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
        proxy=httpcore.Proxy(str(named.url), named.raw_auth) if named else None,
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
    """What an `httpx.Client` sends by: guarded connections, or those of the proxy that the
    environment names for a URL.

    A proxy connects, and decides where to; it may be at any address itself.
    """

    def __init__(self, permit: Permit = _permit_all) -> None:
        self._proxies = urllib.request.getproxies()
        self._pools = {"": guarded_pool(permit)}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; httpx's exceptions are raised."""
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
        """Close all connections."""
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
    """Translate httpcore's exceptions to httpx's, which have the same names."""
    try:
        yield
    except ERRORS as error:
        raise getattr(httpx, type(error).__name__)(str(error)) from error
