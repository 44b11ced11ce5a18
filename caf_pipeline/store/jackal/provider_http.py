"""HTTP exchanges with an untrusted provider: every wait and every answer is bounded, and no
redirect is followed.

Connections go straight to the provider; proxy variables of the environment are not looked at. A
provider names its own host; this machine's addresses and its network's are not connected to unless
the settings permit it.

Source: RFC 9110, RFC 9112.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

import httpcore

from caf_pipeline.errors import StoreError, StoreUnreachable
from caf_pipeline.system.addresses import is_public
from caf_pipeline.system.http import MAX_ADDRESSES, Limit, guarded_pool, no_check

ANSWER_SECONDS: Final = 30.0
"""For an answer to a question; providers were seen to take 12 s to say that they do not know a
root.
"""

MAX_ANSWER_BYTES: Final = 1 << 20
"""Of any answer but a download; a status has some 400 bytes."""

MAX_IDLE: Final = 8
"""Connections kept for the next range read: one object is one read, and a handshake costs more than
it. So many objects are read side by side (`retrieval.side_by_side`).
"""


class PrivateAddress(StoreUnreachable):
    """A provider is at an address that is not public, and the settings keep us from connecting to
    it.
    """


class NoBytes(StoreUnreachable):
    """A provider did not answer, broke off, or answered with 500.

    Other statuses, such as 503, raise another error.
    """


# --- addresses ---


@dataclass(frozen=True, slots=True)
class ProviderAddress:
    """Where a provider listens.

    Attributes:
        path: what comes before every route: "" or "/prefix".
        may_be_private: whether its host may have an address that is not public.
    """

    scheme: str
    host: str
    port: int
    path: str
    may_be_private: bool = False

    @property
    def authority(self) -> str:
        """Host and port as a URL and the Host header have them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        standard = self.port == (443 if self.scheme == "https" else 80)
        return host if standard else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    def pool(self) -> httpcore.ConnectionPool:
        """Return a pool of connections to it and to nothing else."""
        return guarded_pool(self._permitted, most_idle=MAX_IDLE)

    def _permitted(self, _: str, addresses: Sequence[str]) -> Sequence[str]:
        permitted = [one for one in addresses if self.may_be_private or is_public(one)]
        if not permitted:
            raise PrivateAddress(
                f"provider {self} is not connected to: {', '.join(addresses[:MAX_ADDRESSES])} is "
                "not a public address,"
                " and jackal.allow_private_addresses is false",
                hint="set it to true only for a network of your own, whose providers are on this "
                "machine or beside it",
            )
        return permitted


def parse_address(url: str, *, may_be_private: bool = False) -> ProviderAddress:
    """Return the address that a provider gave the chain.

    The host's address is looked up when it is connected to.

    Raises: StoreError: it is no plain http(s) address; credentials, control characters and the like
        are refused.
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
        raise StoreError(f"a provider lists an address that is not a URL: {url[:100]!r}")
    port = port or (443 if parts.scheme == "https" else 80)
    return ProviderAddress(
        parts.scheme, parts.hostname, port, parts.path.rstrip("/"), may_be_private
    )


# --- exchanges ---


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
    """Send a request and give its answer, whatever its status.

    What is raised inside for want of bytes is StoreUnreachable.

    A connection whose answer is not read to its end is closed; where the provider answers before
    the end of the body, the rest is not sent.
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
    """Return a header's value; "" where there is none."""
    return next(
        (
            value.decode("latin-1")
            for found, value in response.headers
            if found.lower() == name.encode()
        ),
        "",
    )


@dataclass(frozen=True, slots=True)
class ProviderAnswer:
    """An answer in full."""

    status: int
    body: bytes


def read_answer(response: httpcore.Response, address: ProviderAddress) -> ProviderAnswer:
    """Return an answer that is no download.

    Raises:
        StoreUnreachable: it is longer than any such answer.
    """
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
    """Return the answer to a GET, whatever its status, within so many seconds or `ANSWER_SECONDS`.

    Raises:
        StoreUnreachable: there is none, none in time, or none with an end.
    """
    limit = Limit(ANSWER_SECONDS if seconds is None else seconds, check=check)
    with (
        address.pool() as pool,
        exchange(pool, address, path, limit, headers={"Connection": "close"}) as response,
    ):
        return read_answer(response, address)


@contextmanager
def _unreachable(address: ProviderAddress) -> Iterator[None]:
    """Translate what sockets and httpcore raise."""
    try:
        yield
    except httpcore.TimeoutException as error:
        raise NoBytes(f"provider {address} does not answer in time") from error
    except httpcore.NetworkError as error:
        said = getattr(error.__cause__, "strerror", None) or error
        raise NoBytes(f"provider {address} is not reached: {said}") from error
    except ValueError as error:  # a host name that cannot be looked up
        raise StoreUnreachable(
            f"provider {address} breaks the protocol: {str(error)[:100]}"
        ) from error
    except httpcore.ProtocolError as error:
        raise NoBytes(
            f"provider {address} broke off: {type(error).__name__} {str(error)[:100]!a}"
        ) from error
