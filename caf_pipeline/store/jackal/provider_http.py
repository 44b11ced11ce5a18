"""HTTP with an untrusted provider: bounded waits and answers, no redirects, no proxies.

A provider chooses its own host name, so addresses of this machine and its network are refused
unless the settings allow them. Source: RFC 9110, RFC 9112.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

import httpcore

from caf_pipeline.errors import PrivateAddress, StoreError, StoreUnreachable
from caf_pipeline.system.addresses import is_public
from caf_pipeline.system.http import MAX_ADDRESSES, Limit, guarded_pool, no_check

ANSWER_SECONDS: Final = 30.0
"""Timeout of an answer. Providers were seen to take 12 s to report an unknown root."""

MAX_ANSWER_BYTES: Final = 1 << 20
"""The limit of every answer but a download. A status has some 400 bytes."""

MAX_IDLE: Final = 8
"""Kept connections: as many as `retrieval.side_by_side` reads in parallel."""


class NoBytes(StoreUnreachable):
    """A provider did not answer, broke off, or answered with 500. 503 raises another error."""


@dataclass(frozen=True, slots=True)
class ProviderAddress:
    """The address of a provider. `path` is the prefix of every route, "" or "/prefix"."""

    scheme: str
    host: str
    port: int
    path: str
    may_be_private: bool = False

    @property
    def authority(self) -> str:
        """Host and port for a URL and the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        standard = self.port == (443 if self.scheme == "https" else 80)
        return host if standard else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    def pool(self) -> httpcore.ConnectionPool:

        def permitted(_: str, addresses: Sequence[str]) -> Sequence[str]:
            allowed = [
                address for address in addresses if self.may_be_private or is_public(address)
            ]
            if not allowed:
                raise PrivateAddress(
                    f"provider {self} has no public address, only "
                    f"{', '.join(addresses[:MAX_ADDRESSES])}, and "
                    "jackal.allow_private_addresses is false",
                    hint=PrivateAddress.remedy,
                )
            return allowed

        return guarded_pool(permitted, most_idle=MAX_IDLE)


def parse_address(url: str, *, may_be_private: bool = False) -> ProviderAddress:
    """Parse a provider's URL without resolving the host.

    Raises:
        StoreError: it is no plain http(s) URL, or has credentials or control characters.
    """
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    plain = url.strip().isascii() and url.strip().isprintable() and " " not in url.strip()
    if (
        not plain
        or parts.scheme not in ("http", "https")
        or not parts.hostname
        or "@" in parts.netloc
    ):
        raise StoreError(f"a provider registered an address that is not a URL: {url[:100]!r}")
    port = port or (443 if parts.scheme == "https" else 80)
    return ProviderAddress(
        parts.scheme, parts.hostname, port, parts.path.rstrip("/"), may_be_private
    )


@contextmanager
def exchange(
    pool: httpcore.ConnectionPool,
    address: ProviderAddress,
    path: str,
    limit: Limit,
    *,
    method: str = "GET",
    headers: Mapping[str, str] = MappingProxyType({}),
    body: Iterator[bytes] | None = None,
) -> Iterator[httpcore.Response]:
    """Send a request and yield the response with any status.

    Network errors inside the context become StoreUnreachable. An unread response closes the
    connection. If the provider answers early, the rest of the body is not sent.
    """
    target = httpcore.URL(
        scheme=address.scheme, host=address.host, port=address.port, target=f"{address.path}{path}"
    )
    fields: list[tuple[bytes | str, bytes | str]] = [("Host", address.authority), *headers.items()]
    with (
        _unreachable(address),
        pool.stream(
            method, target, headers=fields, content=body, extensions=limit.extensions
        ) as response,
    ):
        yield response


def header(response: httpcore.Response, name: str) -> str:
    """Return a header's value, or ""."""
    return next(
        (
            value.decode("latin-1")
            for header_name, value in response.headers
            if header_name.lower() == name.encode()
        ),
        "",
    )


@dataclass(frozen=True, slots=True)
class ProviderAnswer:
    """A complete answer."""

    status: int
    body: bytes


def read_answer(response: httpcore.Response, address: ProviderAddress) -> ProviderAnswer:
    """Read an answer. Raises StoreUnreachable if it exceeds `MAX_ANSWER_BYTES`."""
    body = bytearray()
    for piece in response.iter_stream():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise StoreUnreachable(
                f"provider {address} answers with more than {MAX_ANSWER_BYTES} bytes"
            )
    return ProviderAnswer(response.status, bytes(body))


def ask(
    address: ProviderAddress,
    path: str,
    *,
    seconds: float | None = None,
    check: Callable[[], None] = no_check,
) -> ProviderAnswer:
    """Send a GET and return a complete answer of any status. Otherwise raises StoreUnreachable."""
    limit = Limit(ANSWER_SECONDS if seconds is None else seconds, check=check)
    with (
        address.pool() as pool,
        exchange(pool, address, path, limit, headers={"Connection": "close"}) as response,
    ):
        return read_answer(response, address)


@contextmanager
def _unreachable(address: ProviderAddress) -> Iterator[None]:
    try:
        yield
    except httpcore.TimeoutException as error:
        raise NoBytes(f"provider {address} does not answer in time") from error
    except httpcore.NetworkError as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise NoBytes(f"provider {address} cannot be reached: {reason}") from error
    except ValueError as error:  # an invalid host name
        raise StoreUnreachable(
            f"provider {address} breaks the protocol: {str(error)[:100]}"
        ) from error
    except httpcore.ProtocolError as error:
        raise NoBytes(
            f"provider {address} broke off: {type(error).__name__} {str(error)[:100]!a}"
        ) from error
