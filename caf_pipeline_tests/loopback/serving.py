"""Serves a file like Go's `http.ServeContent`: all ranges, HEAD, no ETag, no Last-Modified.

A reply that takes longer than the server's limit silently ends short of its Content-Length. Source:
RFC 9110, section 14; the behaviour of net/http/fs.go.
"""

import secrets
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from caf_pipeline_tests.loopback.http_server import Cut, Request

PIECE: Final = 4 << 20  # sent between two checks of the clock
SNIFFED_BYTES: Final = 512
TEXT: Final = "text/plain; charset=utf-8"
_NOT_TEXT: Final = frozenset(set(range(0x20)) - {0x09, 0x0A, 0x0C, 0x0D, 0x1B})


@dataclass(frozen=True, slots=True)
class Delivery:
    """How bytes are sent.

    Attributes:
        deadline: by `time.monotonic`; then the connection is cut.
        rate: bytes a second at most; 0 for no limit.
        flip_byte: the byte of the file to invert; -1 for all, None for none.
        cut_after: cut the connection after so many bytes of body.
        unreadable_bytes: at the beginning of the file; the connection is cut there.
        lost: a range of the file, end exclusive. A GET that touches it hangs until the client
            leaves.
        closes: cut such a GET instead.
    """

    deadline: float
    rate: float = 0
    flip_byte: int | None = None
    cut_after: int | None = None
    unreadable_bytes: int = 0
    lost: tuple[int, int] | None = None
    closes: bool = False

    @property
    def plain(self) -> bool:
        """True if bytes can be sent unchanged from the file."""
        return not self.rate and self.flip_byte is None and self.cut_after is None


def serve_file(request: Request, path: Path, delivery: Delivery) -> None:
    """Answer a GET or HEAD with the file or the requested ranges. Raises Cut."""
    with open(path, "rb", buffering=0) as file:
        size_bytes = path.stat().st_size
        content_type = _sniff(file.read(SNIFFED_BYTES))
        # There is neither ETag nor Last-Modified, so no If-Range can match.
        range_header = "" if "If-Range" in request.headers else request.headers.get("Range", "")
        try:
            ranges = parse_ranges(range_header, size_bytes)
        except ValueError as error:
            headers = (
                {"Content_Range": f"bytes */{size_bytes}"} if isinstance(error, NoOverlap) else {}
            )
            request.answer(
                416, f"{error}\n".encode(), TEXT, X_Content_Type_Options="nosniff", **headers
            )
            return
        if request.command != "HEAD" and _touches(ranges or [(0, size_bytes)], delivery.lost):
            if not delivery.closes:
                _hang(request, delivery.deadline)
            raise Cut
        sender = _Sender(request, file, delivery)
        if len(ranges) > 1:
            _send_many(sender, ranges, size_bytes=size_bytes, content_type=content_type)
            return
        start, end = ranges[0] if ranges else (0, size_bytes)
        headers = {"Content-Range": f"bytes {start}-{end - 1}/{size_bytes}"} if ranges else {}
        _send_head(request, 206 if ranges else 200, content_type, end - start, headers)
        if request.command != "HEAD":
            sender.send(start, end)


def _touches(ranges: Sequence[tuple[int, int]], lost: tuple[int, int] | None) -> bool:
    return lost is not None and any(start < lost[1] and lost[0] < end for start, end in ranges)


def _hang(request: Request, deadline: float) -> None:
    """Send nothing until the client closes the connection or the deadline passes."""
    while (remaining := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([request.connection], [], [], min(remaining, 0.2))
        if readable:  # the client closed the connection: it sends nothing else before the answer
            return


class NoOverlap(ValueError):
    """No range lies in the file."""


def parse_ranges(range_header: str, size_bytes: int) -> list[tuple[int, int]]:
    """Return ranges with exclusive ends. An empty list means the whole file.

    Raises:
        ValueError: it is not a list of byte ranges.
        NoOverlap: all ranges begin after the end.
    """
    if not range_header:
        return []
    if not range_header.startswith("bytes="):
        raise ValueError("invalid range")
    ranges, outside = [], False
    for item in (text.strip() for text in range_header.removeprefix("bytes=").split(",")):
        if not item:
            continue
        first, dash, last = (part.strip() for part in item.partition("-"))
        if not dash or not _is_number(first or last) or not _is_number(last or first):
            raise ValueError("invalid range")
        if not first:
            start, end = max(0, size_bytes - int(last)), size_bytes
        else:
            start, end = int(first), min(int(last) + 1, size_bytes) if last else size_bytes
            if last and int(last) < start:
                raise ValueError("invalid range")
        if start >= size_bytes:
            outside = True
            continue
        ranges.append((start, end))
    if outside and not ranges:
        if size_bytes == 0:
            return []
        raise NoOverlap("invalid range: failed to overlap")
    return ranges if sum(end - start for start, end in ranges) <= size_bytes else []


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _sniff(head: bytes) -> str:
    return "application/octet-stream" if _NOT_TEXT.intersection(head) else TEXT


def _send_head(
    request: Request, status: int, content_type: str, length: int, headers: dict[str, str]
) -> None:
    request.send_response(status)
    request.send_header("Accept-Ranges", "bytes")
    request.send_header("Content-Length", str(length))
    request.send_header("Content-Type", content_type)
    for name, value in headers.items():
        request.send_header(name, value)
    request.end_headers()


def _send_many(
    sender: "_Sender", ranges: Sequence[tuple[int, int]], *, size_bytes: int, content_type: str
) -> None:
    request = sender.request
    boundary = secrets.token_hex(30)
    heads = [
        f"{'' if number == 0 else chr(13) + chr(10)}--{boundary}\r\n"
        f"Content-Range: bytes {start}-{end - 1}/{size_bytes}\r\nContent-Type: "
        f"{content_type}\r\n\r\n".encode()
        for number, (start, end) in enumerate(ranges)
    ]
    tail = f"\r\n--{boundary}--\r\n".encode()
    length = sum(map(len, heads)) + sum(end - start for start, end in ranges) + len(tail)
    _send_head(request, 206, f"multipart/byteranges; boundary={boundary}", length, {})
    if request.command == "HEAD":
        return
    for head, (start, end) in zip(heads, ranges, strict=True):
        request.wfile.write(head)
        sender.send(start, end)
    request.wfile.write(tail)


class _Sender:
    """Sends pieces of a file according to the delivery."""

    def __init__(self, request: Request, file: BinaryIO, delivery: Delivery) -> None:
        self.request = request
        self._file = file
        self._delivery = delivery
        self._sent = 0
        self._began = time.monotonic()

    def send(self, start: int, end: int) -> None:
        if start < self._delivery.unreadable_bytes:
            raise Cut
        for first, last in _pieces(start, end, self._piece_bytes()):
            remaining = self._delivery.deadline - time.monotonic()
            if remaining <= 0:
                raise Cut
            self.request.connection.settimeout(remaining)
            if self._delivery.plain:
                self.request.connection.sendfile(self._file, first, last - first)
            else:
                self._send_spoiled(first, last)

    def _piece_bytes(self) -> int:
        return PIECE if self._delivery.plain else 64 << 10

    def _send_spoiled(self, start: int, end: int) -> None:
        delivery = self._delivery
        self._file.seek(start)
        data = bytearray(self._file.read(end - start))
        if delivery.flip_byte == -1:
            data = bytearray(byte ^ 0xFF for byte in data)
        elif delivery.flip_byte is not None and start <= delivery.flip_byte < end:
            data[delivery.flip_byte - start] ^= 0xFF
        if delivery.cut_after is not None and self._sent + len(data) > delivery.cut_after:
            self.request.wfile.write(data[: delivery.cut_after - self._sent])
            raise Cut
        self.request.wfile.write(data)
        self._sent += len(data)
        if delivery.rate:
            time.sleep(max(0, self._sent / delivery.rate - (time.monotonic() - self._began)))


def _pieces(start: int, end: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    for first in range(start, end, size_bytes):
        yield first, min(first + size_bytes, end)
