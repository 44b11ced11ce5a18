"""Where a redirect may lead: not to this machine or its network, unless that is what the user named.

A web server that a user names may answer with the address of something that only this machine reaches. So each connection looks
its host up once and goes to one of the addresses that it may go to: all addresses of the host that was named, and of any other
host those of the public network and those at which the named host itself stands. That holds for a public host, too, whose name
stands for another address a moment later. Where the environment names a proxy, the proxy connects, and decides.
"""

import socket
from collections.abc import Iterable

import httpcore
import httpx

from caf_pipeline.errors import SourceError
from caf_pipeline.system.addresses import is_public

MOST_ADDRESSES = 4  # of one host that are tried


class NamedHost(httpcore.NetworkBackend):
    """Opens the sockets of one httpx client, for one URL that a user named and where that leads."""

    def __init__(self, client: httpx.Client, host: str) -> None:
        """Put it between the client and its sockets; `host` is the named one, as a URL has it."""
        self._host = host
        self._stands_at: frozenset[str] | None = None
        self._opening = httpcore.SyncBackend()
        # httpx takes no network backend, httpcore does; a test holds that this is where it is looked for.
        if isinstance(client._transport, httpx.HTTPTransport):
            client._transport._pool._network_backend = self

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Open a socket to one of the host's permitted addresses.

        Raises:
            SourceError: there is none.
        """
        failure: Exception = httpcore.ConnectError(f"no address of {host} answers")
        for address in self._permitted(host, port)[:MOST_ADDRESSES]:
            try:
                return self._opening.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    def _permitted(self, host: str, port: int) -> list[str]:
        try:
            places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        found = list(dict.fromkeys(str(place[0]) for *_, place in places))
        if host == self._host and self._stands_at is None:
            self._stands_at = frozenset(found)
        permitted = [one for one in found if is_public(one) or one in (self._stands_at or ())]
        if not permitted:
            raise SourceError(
                f"the server at {self._host} leads on to {host}, which stands at {', '.join(found[:MOST_ADDRESSES])}: no public"
                " address, so it is not followed.",
                hint="Give that address itself if it is what you want to read.",
            )
        return permitted
