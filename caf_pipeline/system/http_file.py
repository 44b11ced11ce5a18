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
"""A public file service needs a few: a moved name, https, a signed address."""


class HttpFile(RemoteFile):
    """A file behind an http(s) URL, which may name any host, including private ones.

    Redirects may lead to public addresses and to those that the URL's host had first. Otherwise a
    web server could redirect to a service that only this machine reaches, or resolve to another
    address later.
    """

    def __init__(self, url: str) -> None:
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UsageError(f"Invalid URL: {error}.") from error
        if not self._url.host:
            raise UsageError("The URL has no host.")
        super().__init__(str(self._url.copy_with(userinfo=b"", query=None, fragment=None)))
        self._named_addresses: frozenset[str] | None = None
        self._client = httpx.Client(
            transport=GuardedTransport(self._permitted), follow_redirects=False
        )
        self._limit = Limit(math.inf, silence=READ_SECONDS).extensions
        # A redirect may raise InvalidURL, or have a host or port that the resolver cannot handle.
        self._broken = (httpx.RequestError, httpx.InvalidURL, UnicodeError, OverflowError)
        self._etag = ""

    def close(self) -> None:
        self._client.close()

    @contextlib.contextmanager
    def _request(self, byte_range: str) -> Iterator[RangeAnswer]:
        # With another encoding the range would apply to other bytes.
        headers = {"Range": byte_range, "Accept-Encoding": "identity"}
        if self._etag:
            headers["If-Match"] = self._etag
        with contextlib.ExitStack() as stack:
            try:
                response = self._follow_redirects(headers, stack)
            except self._broken as error:
                raise self._unreachable(error) from error
            answer = self._answer(response)
            etag = response.headers.get("etag", "")
            if not self._etag and not etag.startswith("W/"):  # If-Match allows no weak ETag
                self._etag = etag
            yield answer

    def _follow_redirects(
        self, headers: Mapping[str, str], stack: contextlib.ExitStack
    ) -> httpx.Response:
        """httpx's own code would read the body of a redirect, which may be endless."""
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
        first_addresses = self._named_addresses or ()
        permitted = [
            address for address in addresses if is_public(address) or address in first_addresses
        ]
        if not permitted:
            raise SourceError(
                f"the server at {self._url.raw_host.decode()} redirects to {host}, which is not "
                f"public ({', '.join(addresses[:4])}), so the redirect is not followed.",
                hint="Pass that address itself to read it.",
            )
        return permitted

    def _answer(self, response: httpx.Response) -> RangeAnswer:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise SourceError(
                f"{self.name}: the server compresses the file, so it cannot be read in ranges."
            )

        def pieces(piece_bytes: int) -> Iterator[bytes]:
            try:
                # Raw: a broken connection would lose bytes that httpx has buffered.
                for chunk in response.iter_raw():
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
                    f"{self.name}: the server does not report the file's size.",
                    hint="Download the file, and pass the local path.",
                )
            return RangeAnswer(0, int(length), True, pieces)
        raise refused(self.name, response.status_code, response.reason_phrase)

    def _unreachable(self, error: Exception) -> SourceUnreachable:
        return unreachable(self.name, error, str(self._url), hint="Check the address.")
