"""Runs many GETs concurrently and returns their bodies in order.

A window of bytes limits pending GETs, and so the memory.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Final, NamedTuple, Self

from typing_extensions import Buffer

from caf_pipeline.errors import ObjectReadFailed
from caf_pipeline.inventory.checksums import new_crc64nvme, new_digest
from caf_pipeline.inventory.objects import S3Object
from caf_pipeline.inventory.plan import PlannedObject
from caf_pipeline.packing.concurrency import ConcurrencyLimit
from caf_pipeline.source.protocol import Checksum, ObjectPart, ObjectSource, PendingRead

MIN_UNIT_BYTES: Final = 4096
"""Bytes that an empty object counts in the window, for headers, futures and buffers."""

CHECKSUM_ATTEMPTS: Final = 3
"""GETs of a body with a wrong checksum before it counts as unreadable."""

SMALL_OBJECT_BYTES: Final = 64 << 10
"""Size up to which the writer itself hashes bodies.

Hashing so many bytes takes 0.1 ms. Larger bodies are hashed in threads.
"""

THREADS: Final = 16
"""Threads that hash bodies and retry failed GETs."""


class BodySums(NamedTuple):
    """A member's checksums; the CRC is big-endian."""

    sha256: bytes
    crc64nvme: bytes


Fetched = tuple[ObjectPart, BodySums | None]
"""A part, with the object's checksums if it is the whole object."""


@dataclass(slots=True, eq=False)
class _Unit:
    """A range of an object. `weight` counts in the window.

    A unit has a GET that is under way or ended, a future of a thread, or both one after the other.
    It `is_under_way` until its GET ends, or the retry of a failed GET.
    """

    planned: PlannedObject
    start_byte: int
    end_byte: int
    weight: int
    begun: PendingRead | None = None
    is_under_way: bool = False
    future: "Future[Fetched] | None" = None

    @property
    def size_bytes(self) -> int:
        return self.end_byte - self.start_byte

    def cancel(self) -> None:
        for request in (self.future, self.begun):
            if request:
                request.cancel()
        # Their callbacks refer to the unit, and a body must not wait for the garbage collector.
        self.begun = self.future = None


class OrderedFetch:
    """Fetches objects in order. Call `next_object`, then iterate over its `parts`.

    awscrt runs the GETs. Only the caller's thread changes the state, after it has taken the ended
    units out of a queue.
    """

    def __init__(
        self,
        source: ObjectSource,
        objects: Iterable[PlannedObject],
        *,
        window_bytes: int,
        part_bytes: int,
        max_requests: int,
        compare_checksums: bool = True,
        begin_at: int = 0,
    ) -> None:
        """Start at byte `begin_at` of the first object."""
        self._source = source
        self._units = _split_units(objects, part_bytes, begin_at)
        self._window_bytes = window_bytes
        self._compare_checksums = compare_checksums
        self._pending: deque[_Unit] = deque()
        self._weight = 0
        self._next: tuple[PlannedObject, int, int] | None = None
        self._limit = ConcurrencyLimit(max_requests)
        self._under_way = 0
        self._ended: SimpleQueue[_Unit] = SimpleQueue()
        self._pool = ThreadPoolExecutor(min(THREADS, max_requests), thread_name_prefix="fetch")
        self.fetched_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for unit in self._pending:
            unit.cancel()
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def next_object(self) -> PlannedObject | None:
        """Return the object whose parts come next. Drops parts of earlier ones."""
        self._fill()
        return self._pending[0].planned if self._pending else None

    def parts(self, planned: PlannedObject) -> Generator[Fetched]:
        """Yield the object's parts. After an error or an early stop, the others are dropped.

        Raises like `ObjectSource.read`.
        """
        try:
            while self._pending and self._pending[0].planned is planned:
                unit = self._next_unit()
                result = self._result(unit)
                self.fetched_bytes += memoryview(result[0].body).nbytes
                del unit
                yield result
                del result
                self._fill()
        finally:
            while self._pending and self._pending[0].planned is planned:
                self._next_unit().cancel()
            while (following := self._peek()) and following[0] is planned:
                self._next = None

    def _peek(self) -> tuple[PlannedObject, int, int] | None:
        if self._next is None:
            self._next = next(self._units, None)
        return self._next

    def _fill(self) -> None:
        while not self._ended.empty():
            self._end(self._ended.get())
        while following := self._peek():
            planned, start_byte, end_byte = following
            weight = max(end_byte - start_byte, MIN_UNIT_BYTES)
            if self._pending and (
                self._weight + weight > self._window_bytes
                or self._under_way >= self._limit.requests
            ):
                return
            unit = _Unit(planned, start_byte, end_byte, weight)
            ended = partial(self._ended.put, unit)
            unit.begun = self._source.begin(planned.object, start_byte, end_byte, ended)
            if unit.begun:
                unit.is_under_way = True
                self._under_way += 1
            else:
                self._submit(unit, self._read)
            self._pending.append(unit)
            self._weight += weight
            self._next = None

    def _next_unit(self) -> _Unit:
        unit = self._pending.popleft()
        self._weight -= unit.weight
        return unit

    def _submit(self, unit: _Unit, work: "Callable[[_Unit], Fetched]") -> None:
        unit.future = self._pool.submit(work, unit)
        unit.future.add_done_callback(lambda _: self._ended.put(unit))

    def _end(self, unit: _Unit) -> None:
        if not unit.is_under_way:  # a thread that hashes ended
            return
        if unit.begun:  # or it was cancelled, or its retry ended
            failed, refused = unit.begun.has_failed(), unit.begun.was_refused()
            now = time.monotonic()
            self._limit.ended(now, None if failed else unit.size_bytes, refused=refused)
            if failed:
                # It stays under way, or a failing server would receive GETs for the whole window.
                unit.begun = None
                self._submit(unit, self._read)
                return
        unit.is_under_way = False
        self._under_way -= 1
        is_whole = unit.size_bytes == unit.planned.object.size_bytes
        if unit.begun and is_whole and unit.size_bytes > SMALL_OBJECT_BYTES:
            self._submit(unit, self._take_part)

    def _result(self, unit: _Unit) -> Fetched:
        with unit.begun.waiting() if unit.is_under_way and unit.begun else nullcontext():
            while unit.is_under_way and unit.begun:
                self._end_next()
        if not unit.future:
            if fetched := self._part_of(unit):
                return fetched
            self._submit(unit, self._read)
        future, unit.future = unit.future, None
        assert future
        while not future.done():
            self._end_next()
        return future.result()

    def _end_next(self) -> None:
        """Wait until a unit ends, and begin others in its place."""
        self._end(self._ended.get())
        self._fill()

    def _part_of(self, unit: _Unit) -> Fetched | None:
        """Return None if the GET failed, or has a wrong checksum."""
        begun, unit.begun = unit.begun, None
        part = begun.part() if begun else None
        if not part or unit.size_bytes < unit.planned.object.size_bytes:
            return (part, None) if part else None
        if self._compare_checksums and _differing(part):
            return None
        return part, _sums_of(part.body)

    def _take_part(self, unit: _Unit) -> Fetched:
        return self._part_of(unit) or self._read(unit)

    def s3_checksum(self, planned: PlannedObject) -> Checksum | None:
        return self._source.full_object_checksum(planned.object)

    def is_comparable(self, planned: PlannedObject) -> bool:
        """S3's checksum never covers a part."""
        return self._compare_checksums and not planned.part

    def _read(self, unit: _Unit) -> Fetched:
        obj = unit.planned.object
        if unit.size_bytes < obj.size_bytes:
            return self._source.read(obj, unit.start_byte, unit.end_byte), None
        algorithm = ""
        for _ in range(CHECKSUM_ATTEMPTS):
            part = self._source.read(obj, 0, obj.size_bytes)
            algorithm = _differing(part) if self._compare_checksums else ""
            if not algorithm:
                return part, _sums_of(part.body)
        raise checksum_differs(obj, algorithm)


def _sums_of(body: Buffer) -> BodySums:
    crc = new_crc64nvme()
    crc.update(body)
    return BodySums(hashlib.sha256(body).digest(), crc.digest())


def _differing(part: ObjectPart) -> str:
    digest = new_digest(part.checksum.algorithm) if part.checksum else None
    if part.checksum is None or digest is None:
        return ""
    digest.update(part.body)
    return "" if digest.digest() == part.checksum.digest else part.checksum.algorithm


def checksum_differs(obj: S3Object, algorithm: str) -> ObjectReadFailed:
    """Return the error for a wrong checksum."""
    return ObjectReadFailed(
        f"the bytes of {obj.key!r} do not match the {algorithm} checksum in S3",
        hint="a proxy changes bytes, or the object is damaged in S3",
    )


def _split_units(
    objects: Iterable[PlannedObject], part_bytes: int, begin_at: int
) -> Iterator[tuple[PlannedObject, int, int]]:
    for planned in objects:
        end_byte = planned.start_byte + planned.size_bytes
        for start_byte in range(planned.start_byte + begin_at, max(end_byte, 1), part_bytes):
            yield planned, start_byte, min(start_byte + part_bytes, end_byte)
        begin_at = 0
