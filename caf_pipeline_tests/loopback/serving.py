"""Serves a file or one range of it, as a provider does: without ETag or Last-Modified.

A reply that takes longer than the server's limit silently ends short of its Content-Length.
"""

import re
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from caf_pipeline_tests.loopback.http_server import Cut, Request

PIECE: Final = 4 << 20  # sent between two checks of the clock
TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Delivery:
    """How bytes are sent.

    Attributes:
        deadline: by `time.monotonic`; then the connection is cut.
        rate: bytes a second at most; 0 for no limit.
        flip_byte: the byte of the file to invert; -1 for all, None for none.
        cut_after: cut the connection after so many bytes of body.
        lost: a range of the file, end exclusive. A GET that touches it hangs until the client
            leaves.
        closes: cut such a GET instead.
    """

    deadline: float
    rate: float = 0
    flip_byte: int | None = None
    cut_after: int | None = None
    lost: tuple[int, int] | None = None
    closes: bool = False

    @property
    def plain(self) -> bool:
        """True if bytes can be sent unchanged from the file."""
        return not self.rate and self.flip_byte is None and self.cut_after is None


def serve_file(request: Request, path: Path, delivery: Delivery) -> None:
    """Answer with the file or the requested range. Raises Cut."""
    with open(path, "rb", buffering=0) as file:
        size_bytes = path.stat().st_size
        range_header = request.headers.get("Range", "")
        start, end = parse_range(range_header, size_bytes) if range_header else (0, size_bytes)
        if start >= end and size_bytes:
            request.answer(
                416,
                b"invalid range: failed to overlap\n",
                TEXT,
                X_Content_Type_Options="nosniff",
                Content_Range=f"bytes */{size_bytes}",
            )
            return
        if delivery.lost and start < delivery.lost[1] and delivery.lost[0] < end:
            if not delivery.closes:
                _hang(request, delivery.deadline)
            raise Cut
        request.send_response(206 if range_header else 200)
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Length", str(end - start))
        request.send_header("Content-Type", "application/octet-stream")
        if range_header:
            request.send_header("Content-Range", f"bytes {start}-{end - 1}/{size_bytes}")
        request.end_headers()
        _Sender(request, file, delivery).send(start, end)


def parse_range(range_header: str, size_bytes: int) -> tuple[int, int]:
    """Return a range with exclusive end, which is not after the start if nothing overlaps."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", range_header)
    assert match, f"our reader sends no range like {range_header!r}"
    first, last = match.groups()
    if not first:
        return max(0, size_bytes - int(last)), size_bytes
    return int(first), min(int(last) + 1, size_bytes) if last else size_bytes


def _hang(request: Request, deadline: float) -> None:
    """Send nothing until the client closes the connection or the deadline passes."""
    while (remaining := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([request.connection], [], [], min(remaining, 0.2))
        if readable:  # the client closed the connection: it sends nothing else before the answer
            return


class _Sender:
    """Sends pieces of a file according to the delivery."""

    def __init__(self, request: Request, file: BinaryIO, delivery: Delivery) -> None:
        self.request = request
        self._file = file
        self._delivery = delivery
        self._sent = 0
        self._began = time.monotonic()

    def send(self, start: int, end: int) -> None:
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
