"""A file behind an http(s) URL, read in ranges."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import httpx

from caf_pipeline.errors import ArchiveError, SourceError, SourceUnreachable, UsageError
from caf_pipeline.system.addresses import is_public
from caf_pipeline.system.http import GuardedTransport, Limit
from caf_pipeline.system.ranges import (
    READ_SECONDS,
    RangeAnswer,
    RemoteFile,
    parse_range,
    refused,
    unreachable,
)

_EMPTY_RANGE: Final = re.compile(r"bytes \*/(\d{1,18})")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
MAX_REDIRECTS: Final = 5
"""As many as a public file service takes at most: a name that moved, https, a signed address at its
store.
"""


class HttpFile(RemoteFile):
    """A file behind an http(s) URL.

    The URL may name any host, on this machine or its network, too. Redirects are followed, five at
    most, and only to addresses of the public network and to those that the named host had at first:
    a web server may answer with the address of something that only this machine reaches, and a
    public name may stand for another address a moment later.
    """

    def __init__(self, url: str) -> None:
        """Prepare a client; raises UsageError where the URL is none."""
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UsageError(f"This is not a URL: {error}.") from error
        if not self._url.host:
            raise UsageError("The URL names no host.")
        super().__init__(str(self._url.copy_with(userinfo=b"", query=None, fragment=None)))
        self._named_addresses: frozenset[str] | None = None
        self._client = httpx.Client(
            transport=GuardedTransport(self._permitted), follow_redirects=False
        )
        self._limit = Limit(math.inf, silence=READ_SECONDS).extensions
        # InvalidURL by way of a redirect, the last two from names and ports that the resolver
        # cannot take.
        self._broken = (httpx.RequestError, httpx.InvalidURL, UnicodeError, OverflowError)
        self._etag = ""

    def close(self) -> None:
        """See `FileRanges`."""
        self._client.close()

    @contextlib.contextmanager
    def _request(self, wanted: str) -> Iterator[RangeAnswer]:
        # An encoded answer would be a range of other bytes.
        headers = {"Range": wanted, "Accept-Encoding": "identity"}
        if self._etag:
            headers["If-Match"] = self._etag
        with contextlib.ExitStack() as stack:
            try:
                response = self._led_to(headers, stack)
            except self._broken as error:
                raise self._unreachable(error) from error
            answer = self._answer(response)
            etag = response.headers.get("etag", "")
            if not self._etag and not etag.startswith("W/"):  # a weak one may not stand in If-Match
                self._etag = etag
            yield answer

    def _led_to(self, headers: Mapping[str, str], stack: contextlib.ExitStack) -> httpx.Response:
        """Follow redirects to the answer.

        Not httpx's own following: it reads what a redirect says, which may have no end.
        """
        request = self._client.build_request(
            "GET", self._url, headers=headers, extensions=self._limit
        )
        for _ in range(MAX_REDIRECTS + 1):
            response = self._client.send(request, stream=True)
            if response.next_request is None:
                stack.callback(response.close)
                return response
            response.close()
            request = response.next_request
        raise SourceError(f"{self.name}: the server redirects more than {MAX_REDIRECTS} times.")

    def _permitted(self, host: str, addresses: Sequence[str]) -> Sequence[str]:
        if self._named_addresses is None and host == self._url.raw_host.decode():
            self._named_addresses = frozenset(addresses)
        permitted = [
            one for one in addresses if is_public(one) or one in (self._named_addresses or ())
        ]
        if not permitted:
            raise SourceError(
                f"the server at {self._url.raw_host.decode()} redirects to {host}, at "
                f"{', '.join(addresses[:4])}: not a"
                " public address, so the redirect is not followed.",
                hint="Give that address itself if it is what you want to read.",
            )
        return permitted

    def _answer(self, response: httpx.Response) -> RangeAnswer:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise SourceError(
                f"{self.name}: the server compresses the file on its way, so ranges of it have no "
                "meaning."
            )

        def pieces(piece_bytes: int) -> Iterator[bytes]:
            try:
                for chunk in (
                    response.iter_raw()
                ):  # as it comes: what httpx gathered would be lost with the connection
                    yield from (
                        chunk[at : at + piece_bytes] for at in range(0, len(chunk), piece_bytes)
                    )
            except self._broken as error:
                raise self._unreachable(error) from error

        content_range = response.headers.get("content-range", "")
        if response.status_code == 206:
            first_byte, size_bytes = parse_range(self.name, content_range)
            return RangeAnswer(first_byte, size_bytes, False, pieces)
        if response.status_code == 416 and (match := _EMPTY_RANGE.fullmatch(content_range)):
            return RangeAnswer(0, int(match[1]), False, lambda _: iter(()))
        if response.status_code == 200:
            length = response.headers.get("content-length", "")
            if not _LENGTH.fullmatch(length):
                raise ArchiveError(
                    f"{self.name}: the server does not say how large it is.",
                    hint="Download it, and give the local file.",
                )
            return RangeAnswer(0, int(length), True, pieces)
        raise refused(self.name, response.status_code, response.reason_phrase)

    def _unreachable(self, error: Exception) -> SourceUnreachable:
        return unreachable(self.name, error, str(self._url), hint="Check the address.")
