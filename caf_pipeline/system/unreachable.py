"""Classifies why S3 or a chain node cannot be reached.

Clients wrap the system's errors; the reason is in an inner error.
"""

import errno
import http.client
import socket
import ssl
from collections.abc import Iterator
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

PROBE_SECONDS: Final = 3.0

_NO_ROUTE: Final = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)

# OpenSSL's errors for an answer that is not TLS. They depend on its version and on the answer.
_NO_TLS: Final = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "UNKNOWN_PROTOCOL",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
)


class Reason(StrEnum):
    """Why a server cannot be reached, as words that follow its name."""

    NAME = "cannot be reached: its host name does not resolve"
    REFUSED = "cannot be reached: connection refused"
    NO_ROUTE = "cannot be reached: there is no route to it"
    TIMEOUT = "cannot be reached: it does not answer in time"
    CLOSED = "cannot be reached: it closes the connection without an answer"
    NOT_TLS = "does not speak HTTPS"
    ONLY_TLS = "speaks HTTPS and not HTTP"
    CERTIFICATE = "cannot be trusted: its certificate is not valid here"
    NOT_HTTP = "does not speak HTTP"
    CUT = "broke off its answer"
    NO_TLS = (
        "cannot be reached: there is no TLS connection, perhaps for lack of a valid certificate "
        "or of HTTPS"
    )
    OTHER = "cannot be reached, or breaks off its answer"

    @property
    def lasts(self) -> bool:
        """Whether it lasts until a setting or the server changes."""
        return self in (Reason.NOT_TLS, Reason.ONLY_TLS, Reason.CERTIFICATE)


_HINTS: Final = {
    Reason.NAME: "check the host name in {setting}, and this machine's name server",
    Reason.REFUSED: "nothing listens on that port: check host and port in {setting}, and that the "
    "server runs",
    Reason.NO_ROUTE: "check the network, and the host in {setting}",
    Reason.TIMEOUT: "check host and port in {setting}, the network, and firewalls on the way",
    Reason.CLOSED: "check host and port in {setting}, and the server",
    Reason.NOT_TLS: "write http:// in {setting}, or the port where it speaks HTTPS",
    Reason.ONLY_TLS: "write https:// in {setting}",
    Reason.CUT: "run it again; if it happens each time, check the server behind {setting}",
    Reason.NO_TLS: "check the scheme and the port in {setting}, and the server's certificate",
    Reason.NOT_HTTP: "another program listens on that port: check host and port in {setting}",
    Reason.OTHER: "check {setting} and the network",
}

_OF_CRT: Final = {
    "AWS_IO_DNS_INVALID_NAME": Reason.NAME,
    "AWS_IO_DNS_NO_ADDRESS_FOR_HOST": Reason.NAME,
    "AWS_IO_DNS_QUERY_AGAIN": Reason.NAME,
    "AWS_IO_DNS_QUERY_FAILED": Reason.NAME,
    "AWS_IO_SOCKET_CONNECTION_REFUSED": Reason.REFUSED,
    "AWS_IO_SOCKET_NO_ROUTE_TO_HOST": Reason.NO_ROUTE,
    "AWS_IO_SOCKET_NETWORK_DOWN": Reason.NO_ROUTE,
    "AWS_IO_SOCKET_TIMEOUT": Reason.TIMEOUT,
    "AWS_ERROR_HTTP_CHANNEL_THROUGHPUT_FAILURE": Reason.TIMEOUT,  # nothing came for 30 s
    "AWS_ERROR_HTTP_RESPONSE_FIRST_BYTE_TIMEOUT": Reason.TIMEOUT,
    "AWS_IO_SOCKET_CLOSED": Reason.CUT,  # before an answer or within it
    "AWS_ERROR_HTTP_CONNECTION_CLOSED": Reason.CUT,
    "AWS_ERROR_HTTP_SERVER_CLOSED": Reason.CUT,
    "AWS_ERROR_HTTP_PROTOCOL_ERROR": Reason.NOT_HTTP,
    "AWS_IO_TLS_ERROR_NEGOTIATION_FAILURE": Reason.NO_TLS,
    "AWS_IO_TLS_NEGOTIATION_TIMEOUT": Reason.NO_TLS,
}
"""Names of awscrt's errors. This module loads no client."""


def reason_of(error: BaseException, url: str = "") -> Reason:
    """Return why a server could not be reached.

    If it closed the connection and `url` is passed, TLS is tried.
    """
    for inner in _inside(error):
        if reason := _reason(inner):
            may_be_tls = reason in (Reason.CLOSED, Reason.CUT, Reason.NOT_HTTP)
            return Reason.ONLY_TLS if may_be_tls and speaks_only_tls(url) else reason
    return Reason.OTHER


def hint_for(reason: Reason, setting: str) -> str:
    """Return a hint, except for a certificate: each client has its own setting."""
    return _HINTS.get(reason, "").format(setting=setting)


def speaks_only_tls(url: str) -> bool:
    """Return whether the server at an http:// URL speaks TLS."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        return False
    context = ssl.create_default_context()
    # No data is sent over this connection.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((parts.hostname, parts.port or 80), PROBE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=parts.hostname),
        ):
            return True
    except OSError:
        return False


def _inside(error: BaseException) -> Iterator[BaseException]:
    """Yield the wrapped errors, innermost first."""
    errors: list[BaseException] = []
    queue: list[object] = [error]
    while queue:
        inner = queue.pop()
        if not isinstance(inner, BaseException) or inner in errors:
            continue
        errors.append(inner)
        # botocore has the cause in `kwargs`, urllib3 in `args` or `reason`.
        keywords = getattr(inner, "kwargs", None)
        queue += [inner.__cause__, inner.__context__, getattr(inner, "reason", None), *inner.args]
        queue += [keywords.get("error")] if isinstance(keywords, dict) else []
    return reversed(errors)


def _reason(error: BaseException) -> Reason | None:  # noqa: PLR0911 - one for each kind
    if isinstance(error, ssl.SSLCertVerificationError):
        return Reason.CERTIFICATE
    if isinstance(error, ssl.SSLError):
        return Reason.NOT_TLS if any(word in str(error) for word in _NO_TLS) else Reason.CLOSED
    if isinstance(error, socket.gaierror):
        return Reason.NAME
    if isinstance(error, ConnectionRefusedError):
        return Reason.REFUSED
    if isinstance(error, ConnectionResetError | BrokenPipeError | http.client.RemoteDisconnected):
        return Reason.CLOSED
    if isinstance(error, http.client.BadStatusLine):
        return Reason.NOT_HTTP
    if type(error).__name__ == "RemoteProtocolError":  # httpx's; this module loads no client
        message = str(error)  # h11's
        if "disconnected" in message:
            return Reason.CLOSED
        return Reason.CUT if "without sending complete message" in message else Reason.NOT_HTTP
    if type(error).__name__ == "AwsCrtError":
        return _OF_CRT.get(error.name)  # type: ignore[attr-defined]
    if isinstance(error, OSError) and error.errno in _NO_ROUTE:
        return Reason.NO_ROUTE
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return Reason.TIMEOUT
    return None
