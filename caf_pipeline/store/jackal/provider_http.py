"""HTTP exchanges with a provider, which nobody vouches for: a wait has an end, an answer a size, and no redirect is followed.

http.client and not httpx, for three things: a body goes from the file to the socket by sendfile, without passing through
Python; a time limit is one for the whole answer, while httpx has one for each read, which a byte now and then keeps alive; and
whoever waits looks at `check` about every second, so that a lost lease or a broken sibling ends a transfer at once.
Connections go straight to the provider; proxy variables of the environment are not looked at. A provider names its own host,
which is looked up once, when the socket is opened; this machine's addresses and its network's are not connected to unless the
settings permit it.

Source: RFC 9110, RFC 9112.
"""

import errno
import http.client
import io
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import BinaryIO, Final, cast
from urllib.parse import urlsplit

import httpx
from typing_extensions import Buffer

from caf_pipeline.errors import StoreError, StoreUnreachable
from caf_pipeline.system.addresses import is_public

STEP_SECONDS: Final = 0.5
"""The longest wait between two looks at `check`."""

CONNECT_SECONDS: Final = 10.0
MAX_ADDRESSES: Final = 4
"""Of one host that are tried: a name may stand for any number of addresses at which nobody answers."""

ANSWER_SECONDS: Final = 30.0
"""For an answer to a question; providers were seen to take 12 s to say that they do not know a root."""

MAX_ANSWER_BYTES: Final = 1 << 20
"""Of any answer but a download; a status has some 400 bytes."""

READ_BUFFER_BYTES: Final = 256 << 10

_NO_SENDFILE: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""What sendfile says of a file system that it cannot read from."""


def no_check() -> None:
    """Find nothing wrong."""


class PrivateAddress(StoreUnreachable):
    """A provider is at an address that is not public, and the settings keep us from connecting to it."""


# --- addresses -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """Where a provider listens.

    Attributes:
        path: what stands before every route: "" or "/prefix".
        may_be_private: whether its host may stand at an address that is not public.
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


def parse_address(url: str, *, may_be_private: bool = False) -> Address:
    """Return the address that a provider gave the chain. Where its host stands is seen when it is connected to.

    Raises:
        StoreError: it is no plain http(s) address; credentials, control characters and the like are refused.
    """
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    plain = url.strip().isascii() and url.strip().isprintable() and " " not in url.strip()
    if not plain or parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise StoreError(f"a provider's address is not one: {url[:100]!r}")
    port = port or (443 if parts.scheme == "https" else 80)
    return Address(parts.scheme, parts.hostname, port, parts.path.rstrip("/"), may_be_private)


# --- waiting ---------------------------------------------------------------------------------------------------------------


class Patience:
    """How long an exchange may still take, and what may end it before."""

    def __init__(self, seconds: float, check: Callable[[], None] = no_check) -> None:
        self.check = check
        self.renew(seconds)

    def renew(self, seconds: float) -> None:
        """Give it so long from now on."""
        self._deadline = time.monotonic() + seconds

    def step(self) -> float:
        """Return how long to wait before the next look, or raise what `check` raises, or TimeoutError at the end."""
        self.check()
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        return min(left, STEP_SECONDS)


class AnsweredEarly(Exception):
    """The other side said something, or left, before it had the whole body."""


class Wire:
    """A socket as http.client needs it, waited for in small steps."""

    def __init__(self, sock: socket.socket, patience: Patience) -> None:
        self.patience = patience
        self._sock = sock
        # TLS is encrypted in this process; and what can be read there need not be an answer.
        self._by_kernel = not isinstance(sock, ssl.SSLSocket)

    def sendall(self, data: Buffer) -> None:
        """Send everything."""
        view = memoryview(data).cast("B")
        while view:
            self._sock.settimeout(self.patience.step())
            try:
                view = view[self._sock.send(view) :]
            except TimeoutError:
                continue

    def send_file(self, file: BinaryIO, start_byte: int, end_byte: int) -> None:
        """Send `[start_byte, end_byte)` of a file.

        Raises:
            AnsweredEarly: there is an answer already. StoreError: the file ends before.
        """
        if not self._by_kernel:
            self._send_copied(file, start_byte, end_byte)
            return
        descriptor, position = self._sock.fileno(), start_byte
        self._sock.setblocking(False)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN | select.POLLOUT)
        while position < end_byte:
            ready = poll.poll(self.patience.step() * 1000)
            if ready and ready[0][1] & ~select.POLLOUT:
                raise AnsweredEarly
            if ready:
                try:
                    sent = os.sendfile(descriptor, file.fileno(), position, end_byte - position)
                except BlockingIOError:
                    continue
                except OSError as error:
                    if error.errno not in _NO_SENDFILE:
                        raise
                    self._by_kernel = False
                    self._send_copied(file, position, end_byte)
                    return
                if not sent:
                    raise _too_short(file)
                position += sent

    def _send_copied(self, file: BinaryIO, start_byte: int, end_byte: int) -> None:
        file.seek(start_byte)
        data = file.read(end_byte - start_byte)
        if len(data) < end_byte - start_byte:
            raise _too_short(file)
        self.sendall(data)

    def receive(self, buffer: memoryview) -> int:
        """Read what there is, at least a byte; 0 at the end."""
        while True:
            self._sock.settimeout(self.patience.step())
            try:
                return self._sock.recv_into(buffer)
            except TimeoutError:
                continue

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return the answer's bytes; the socket stays open until this is closed, too."""
        return io.BufferedReader(_Received(self, self._sock.makefile("rb", buffering=0)), READ_BUFFER_BYTES)

    def close(self) -> None:
        """Close the socket once nobody reads from it."""
        self._sock.close()


class _Received(io.RawIOBase):
    def __init__(self, wire: Wire, held: io.RawIOBase) -> None:
        self._wire = wire
        self._held = held

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        return self._wire.receive(memoryview(buffer).cast("B"))

    def readall(self) -> bytes:
        # http.client reads to the end where a chunk's length is -1; whatever is read here has a limit.
        raise http.client.HTTPException("a part of the answer has no length")

    def close(self) -> None:
        self._held.close()
        super().close()


def _too_short(file: BinaryIO) -> StoreError:
    return StoreError(f"the staged file {file.name} ends before its size", hint="run the partition again: it is packed again")


# --- exchanges -------------------------------------------------------------------------------------------------------------


class Connection(http.client.HTTPConnection):
    """One connection to a provider."""

    def __init__(self, address: Address, patience: Patience) -> None:
        super().__init__(address.host, address.port)
        self.address = address
        self.patience = patience

    def connect(self) -> None:
        """Open the socket, with TLS where the address says so."""
        sock = self._reached()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.address.scheme == "https":
                sock = _tls().wrap_socket(sock, server_hostname=self.address.host)
        except BaseException:
            sock.close()
            raise
        self.sock = cast(socket.socket, Wire(sock, self.patience))

    def _reached(self) -> socket.socket:
        """Return a socket to one of the host's addresses, as they are looked up now and not again.

        Raises:
            PrivateAddress: none of them may be connected to. OSError: none of them answers.
        """
        host, port = self.address.host, self.address.port
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        permitted = [one for one in found if self.address.may_be_private or is_public(str(one[4][0]))]
        if not permitted:
            stands_at = ", ".join(dict.fromkeys(str(place[0]) for *_, place in found[:MAX_ADDRESSES]))
            raise PrivateAddress(
                f"provider {self.address} is not asked: it stands at {stands_at}, which is no public address, and"
                " jackal.allow_private_addresses is false",
                hint="set it to true only for a network of your own, whose providers are on this machine or beside it",
            )
        failure = OSError(f"no address of {host} answers")
        for family, kind, protocol, _, place in permitted[:MAX_ADDRESSES]:
            self.patience.step()
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(CONNECT_SECONDS)
                sock.connect(place)
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise failure

    @property
    def wire(self) -> Wire:
        """The open socket."""
        return cast(Wire, self.sock)

    def be_patient(self, patience: Patience) -> None:
        """Begin another exchange on the same connection."""
        self.patience = patience
        if self.sock is not None:
            self.wire.patience = patience

    def send_head(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Send the request's line and headers."""
        self.putrequest(method, f"{self.address.path}{path}", skip_host=True)
        self.putheader("Host", self.address.authority)
        for name, value in headers.items():
            self.putheader(name, value)
        self.endheaders()


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # the certificates that all other HTTP of this program trusts


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in full."""

    status: int
    body: bytes


def read_answer(response: http.client.HTTPResponse, address: Address) -> Answer:
    """Return an answer that is no download.

    Raises:
        StoreUnreachable: it is longer than any such answer.
    """
    body = response.read(MAX_ANSWER_BYTES + 1)
    if len(body) > MAX_ANSWER_BYTES:
        raise StoreUnreachable(f"provider {address} answers with more than {MAX_ANSWER_BYTES} bytes")
    return Answer(response.status, body)


def ask(address: Address, path: str, *, seconds: float | None = None, check: Callable[[], None] = no_check) -> Answer:
    """Return the answer to a GET, whatever its status, within so many seconds or `ANSWER_SECONDS`.

    Raises:
        StoreUnreachable: there is none, none in time, or none with an end.
    """
    connection = Connection(address, Patience(ANSWER_SECONDS if seconds is None else seconds, check))
    with unreachable(address):
        try:
            connection.send_head("GET", path, {"Connection": "close"})
            with connection.getresponse() as response:
                return read_answer(response, address)
        finally:
            connection.close()


@contextmanager
def unreachable(address: Address) -> Iterator[None]:
    """Translate what sockets and http.client raise."""
    try:
        yield
    except TimeoutError as error:
        raise StoreUnreachable(f"provider {address} does not answer in time") from error
    except OSError as error:
        raise StoreUnreachable(f"provider {address} is not reached: {error.strerror or error}") from error
    except ValueError as error:  # a host name that cannot be looked up, a length below zero
        raise StoreUnreachable(f"provider {address} breaks the protocol: {str(error)[:100]}") from error
    except http.client.HTTPException as error:
        raise StoreUnreachable(f"provider {address} broke off: {type(error).__name__} {str(error)[:100]!a}") from error
