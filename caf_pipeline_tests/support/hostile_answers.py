"""HTTP answers of dishonest nodes and providers: endless, nonsensical or slow.

Each is a function of a request and its socket. Endless ones send until the client leaves.
"""

import contextlib
import gzip
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from caf_pipeline_tests.support.scripted_provider import Request, answer

Hostile = Callable[[Request, socket.socket], None]

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
BLOCK = b" " * 65_536
DRIP_SECONDS = 0.02


def say(*parts: bytes) -> Hostile:
    """Send these bytes and close the connection."""
    return lambda request, sock: sock.sendall(b"".join(parts))


def repeat(first: bytes, again: bytes, pause: float = 0.0) -> Hostile:
    """Send a first piece, then another one for ever."""

    def answer(request: Request, sock: socket.socket) -> None:
        sock.settimeout(30)
        resting = threading.Event()
        with contextlib.suppress(OSError):
            sock.sendall(first)
            while not (pause and resting.wait(pause)):
                sock.sendall(again)

    return answer


def silence(request: Request, sock: socket.socket) -> None:
    """Receive until the client leaves."""
    with contextlib.suppress(OSError):
        while sock.recv(65_536):
            pass


def _bomb(layers: int) -> bytes:
    data = bytes(32 << 20)
    for _ in range(layers):
        data = gzip.compress(data, 9)
    return data


def with_body(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    lines = [
        b"HTTP/1.1 " + status,
        b"Connection: close",
        b"Content-Length: %d" % len(body),
        *headers,
    ]
    return b"\r\n".join([*lines, b"", b""]) + body


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

ENDLESS: dict[str, Hostile] = {
    "a body": repeat(HEAD + b"\r\n", BLOCK),
    "a body of a length": repeat(HEAD + b"Content-Length: 999999999999\r\n\r\n", BLOCK),
    "chunks": repeat(CHUNKED, b"10000\r\n" + BLOCK + b"\r\n"),
    "chunks of a byte": repeat(CHUNKED, b"1\r\n \r\n" * 10_000),
    "a chunk": repeat(CHUNKED + b"ffffffffffff\r\n", BLOCK),
    "a chunk of length -1": repeat(CHUNKED + b"-1\r\n", BLOCK),
    "a chunk's name": repeat(CHUNKED + b"1;", BLOCK),
    "a line of trailers": repeat(CHUNKED + b"0\r\nX-A: ", BLOCK),
    "a header": repeat(HEAD + b"X-A: ", BLOCK),
    "headers": repeat(HEAD, b"X-A: b\r\n" * 1000),
    "a status line": repeat(b"HTTP/1.1 200 ", BLOCK),
    "an error's body": repeat(b"HTTP/1.1 500 No\r\nConnection: close\r\n\r\n", BLOCK),
    "a redirect's body": repeat(
        b"HTTP/1.1 302 No\r\nConnection: close\r\nLocation: /x\r\n\r\n", BLOCK
    ),
    "no HTTP": repeat(b"", BLOCK),
}

SLOW: dict[str, Hostile] = {
    "silence": silence,
    "a status line": repeat(b"HTTP/1.1 200 ", b"O", DRIP_SECONDS),
    "headers": repeat(HEAD, b"X-A: b\r\n", DRIP_SECONDS),
    "interim answers": repeat(b"", b"HTTP/1.1 100 Continue\r\n\r\n", DRIP_SECONDS),
    "interim answers of another kind": repeat(
        b"", b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n", DRIP_SECONDS
    ),
    "interim answers, fast": repeat(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "a body": repeat(HEAD + b"Content-Length: 100000\r\n\r\n", b" ", DRIP_SECONDS),
    "chunks": repeat(CHUNKED, b"1\r\n \r\n", DRIP_SECONDS),
    "trailers": repeat(CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-A: b\r\n", DRIP_SECONDS),
    "trailers, fast": repeat(CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-A: b\r\n" * 1000),
}

WRONG: dict[str, Hostile] = {
    "nothing": say(),
    "half a status line": say(b"HTTP/1."),
    "half of the headers": say(HEAD),
    "half a body": say(HEAD + b"Content-Length: 100\r\n\r\n{"),
    "half a chunk": say(CHUNKED + b"10\r\n{"),
    "no last chunk": say(CHUNKED + b"2\r\n{}\r\n"),
    "a chunk of length -1": say(CHUNKED + b"-1\r\n{}\r\n0\r\n\r\n"),
    "a chunk of length -5": say(CHUNKED + b"-5\r\n{}\r\n0\r\n\r\n"),
    "a chunk of no length": say(CHUNKED + b"x\r\n{}\r\n0\r\n\r\n"),
    "a length of -1": say(HEAD + b"Content-Length: -1\r\n\r\n{}"),
    "a length of words": say(HEAD + b"Content-Length: two\r\n\r\n{}"),
    "a length of 5,000 digits": say(HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}"),
    "two lengths": say(HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    "status 0": say(b"HTTP/1.1 000 No\r\n\r\n"),
    "status -1": say(b"HTTP/1.1 -1 No\r\n\r\n"),
    "status 99999": say(b"HTTP/1.1 99999 No\r\n\r\n"),
    "HTTP/9.9": say(b"HTTP/9.9 200 OK\r\n\r\n{}"),
    "HTTP/0.9": say(b"{}"),
    "another protocol": say(b"220 mail.example ESMTP\r\n"),
    "TLS": say(b"\x15\x03\x01\x00\x02\x02\x46"),
    "zeros": say(bytes(100_000)),
    "an upgrade": say(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
    "a header of no name": say(HEAD + b": x\r\n\r\n{}"),
    "a header of zeros": say(HEAD + b"X: \0\r\n\r\n{}"),
    "a height of 5,000 digits": say(
        with_body(b"{}", b"Grpc-Metadata-X-Cosmos-Block-Height: " + b"9" * 5000)
    ),
    "a bomb in gzip": say(with_body(_bomb(1), b"Content-Encoding: gzip")),
    "a bomb in gzip in gzip": say(with_body(_bomb(2), b"Content-Encoding: gzip, gzip")),
    "a bomb in deflate": say(
        with_body(zlib.compress(bytes(32 << 20), 9), b"Content-Encoding: deflate")
    ),
    "an unknown encoding": say(with_body(b"{}", b"Content-Encoding: br")),
    **{
        f"status {status}": say(answer(status, "{}"))
        for status in (201, 204, 301, 302, 303, 304, 307, 308, 400, 401, 403)
    },
    **{
        f"status {status}": say(answer(status, "{}"))
        for status in (405, 418, 429, 500, 501, 502, 503, 599)
    },
    "an error with status 200": say(answer(200, '{"code":13,"message":"panic","details":[]}')),
    "a web page": say(answer(200, "<html><body>welcome</body></html>")),
}


def _json(text: str | bytes) -> Hostile:
    return say(answer(200, text))


NO_OBJECT: dict[str, Hostile] = {
    "no text": _json(b"\xff\xfe\xfd"),
    "UTF-16": _json("{}".encode("utf-16")),
    "nothing": _json(""),
    **{
        text: _json(text)
        for text in (
            "null",
            "true",
            "0",
            "-0",
            '""',
            '"\\ud800"',
            "[]",
            "[[]]",
            "NaN",
            "Infinity",
            "1e999",
        )
    },
    "a number of 5,000 digits": _json("9" * 5000),
    "open brackets": _json("[" * 100_000),
    "open braces": _json('{"a":' * 100_000),
    "900 brackets": _json("[" * 900 + "]" * 900),
    "three million bytes of lists": _json("[" + "[]," * 1_000_000 + "[]]"),
    "a million numbers": _json("[" + "1," * 1_000_000 + "1]"),
    "a text of a mebibyte": _json('"' + "\\u0100" * 170_000 + '"'),
    "two objects": _json("{}{}"),
    "a comma too many": _json('{"a":1,}'),
    "a byte order mark": _json(b"\xef\xbb\xbf{}"),
}

ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**40,
    "",
    "9" * 30,
    "\ud800",
    "\0\x1b[2J",
    [],
    {"a": {"b": []}},
    json.loads("[" * 400 + "]" * 400),
)
"""Replacements for any value of a correct answer."""


def bent(value: Any) -> Iterator[Any]:
    """Yield variants of a correct answer.

    Each value and each part is replaced by each odd one, or left out.
    """
    yield from ODD_VALUES
    if isinstance(value, dict):
        for name in value:
            yield {other: inner for other, inner in value.items() if other != name}
            for inner in bent(value[name]):
                yield value | {name: inner}
    elif isinstance(value, list):
        for inner in bent(value[0]):
            yield [inner, *value[1:]]
