"""A proxy that delays: `python -m benchmarks.network PORT MILLISECONDS [BYTES_A_SECOND]`.

It listens on a free port of 127.0.0.1, prints that port, and forwards to PORT. MILLISECONDS is the
round trip. Each direction adds half of it, and a new connection waits for a whole one, as TCP's
handshake does. BYTES_A_SECOND limits all connections together, in each direction.
"""

import asyncio
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

MAX_QUEUED: Final = 16 << 20
"""Bytes on the way in one direction of a connection, before the sender must wait.

On a line of 50 ms, this is 320 MB/s for each connection.
"""


@dataclass
class Line:
    """One direction of the network, which all connections share."""

    delay: float
    bytes_a_second: float
    _free_at: float = 0.0

    def due(self, now: float, size_bytes: int) -> float:
        """Return when the last of these bytes arrives, if they are sent now."""
        if self.bytes_a_second:
            self._free_at = max(now, self._free_at) + size_bytes / self.bytes_a_second
            now = self._free_at
        return now + self.delay


@dataclass
class End(asyncio.Protocol):
    """One end of a connection. Received bytes leave by `other` when they are due."""

    line: Line
    other: "End | None" = None
    transport: asyncio.Transport | None = None
    queue: deque[tuple[float, bytes | None]] = field(default_factory=deque)
    queued: int = 0
    is_paused: bool = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._put(data)
        assert self.transport
        if self.queued > MAX_QUEUED:
            self.transport.pause_reading()
            self.is_paused = True

    def eof_received(self) -> bool:
        self._put(None)
        return True  # the other direction goes on

    def connection_lost(self, error: Exception | None) -> None:
        self._put(None)

    def _put(self, data: bytes | None) -> None:
        loop = asyncio.get_running_loop()
        size_bytes = len(data) if data else 0
        due = self.line.due(loop.time(), size_bytes)
        self.queued += size_bytes
        self.queue.append((due, data))
        if len(self.queue) == 1:
            loop.call_at(due, self._send)

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        assert self.other
        receiver = self.other.transport
        while self.queue:
            due, data = self.queue[0]
            if due > loop.time():
                loop.call_at(due, self._send)
                break
            self.queue.popleft()
            self.queued -= len(data or b"")
            if receiver and not receiver.is_closing():
                receiver.write(data) if data is not None else receiver.close()
        if self.is_paused and self.queued < MAX_QUEUED // 2 and self.transport:
            self.is_paused = False
            self.transport.resume_reading()


async def serve(port: int, round_trip: float, bytes_a_second: float) -> None:
    """Forward connections until the process ends."""
    loop = asyncio.get_running_loop()
    there, back = (Line(round_trip / 2, bytes_a_second) for _ in range(2))

    class Accepted(End):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.connecting = loop.create_task(self.connect())

        async def connect(self) -> None:
            assert self.transport
            self.transport.pause_reading()
            self.other = End(back, other=self)
            await asyncio.sleep(round_trip)
            await loop.create_connection(lambda: self.other or self, "127.0.0.1", port)
            self.transport.resume_reading()

    server = await loop.create_server(lambda: Accepted(there), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def delayed(port: int, milliseconds: int, bytes_a_second: int = 0) -> Iterator[int]:
    """Run the proxy in a process of its own while the context lasts. Yields its port."""
    command = [sys.executable, "-m", "benchmarks.network"]
    command += [str(number) for number in (port, milliseconds, bytes_a_second)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


@contextmanager
def distant(url: str, round_trip_ms: int) -> Iterator[str]:
    """Yield the address of a server of this machine behind the proxy, or `url` at 0 ms."""
    if not round_trip_ms:
        yield url
        return
    with delayed(urlsplit(url).port or 80, round_trip_ms) as port:
        yield f"http://127.0.0.1:{port}"


if __name__ == "__main__":
    target, milliseconds, *rate = map(int, sys.argv[1:])
    asyncio.run(serve(target, milliseconds / 1000, rate[0] if rate else 0))
