"""Runs many GETs concurrently and returns their bodies in order.

A window of bytes limits pending GETs, and so the memory.
"""

import hashlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple, Self

from typing_extensions import Buffer

from caf_pipeline.errors import ObjectReadFailed
from caf_pipeline.inventory.checksums import new_crc64nvme, new_digest
from caf_pipeline.inventory.objects import S3Object
from caf_pipeline.inventory.plan import PlannedObject
from caf_pipeline.source.protocol import Checksum, ObjectPart, ObjectSource, PendingRead

MIN_UNIT_BYTES: Final = 4096
"""Bytes that an empty object counts in the window, for headers, futures and buffers."""

CHECKSUM_ATTEMPTS: Final = 3
"""GETs of a body with a wrong checksum before it counts as unreadable."""


SMALL_OBJECT_BYTES: Final = 64 << 10
"""The writer itself starts GETs of objects up to this size.

Hashing so many bytes takes 0.1 ms. Larger bodies are hashed in threads.
"""

SMALL_GETS_PER_THREAD: Final = 4
"""Small GETs started per thread, which continue while the writer is busy."""


class BodySums(NamedTuple):
    """A member's checksums; the CRC is big-endian."""

    sha256: bytes
    crc64nvme: bytes


Fetched = tuple[ObjectPart, BodySums | None]
"""A part, with the object's checksums if it is the whole object."""


@dataclass(slots=True)
class _Unit:
    """A pending GET. `weight` counts in the window."""

    planned: PlannedObject
    weight: int
    future: "Future[Fetched] | None"
    begun: PendingRead | None = None

    def cancel(self) -> None:
        for request in (self.future, self.begun):
            if request:
                request.cancel()


class OrderedFetch:
    """Fetches objects in order. Call `next_object`, then iterate over its `parts`."""

    def __init__(
        self,
        source: ObjectSource,
        objects: Iterable[PlannedObject],
        *,
        window_bytes: int,
        part_bytes: int,
        threads: int,
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
        self._begun = 0
        self._max_begun = SMALL_GETS_PER_THREAD * threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fetch")
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
        while unit := self._peek():
            planned, start_byte, end_byte = unit
            weight = max(end_byte - start_byte, MIN_UNIT_BYTES)
            if self._pending and self._weight + weight > self._window_bytes:
                return
            is_small = end_byte - start_byte == planned.object.size_bytes <= SMALL_OBJECT_BYTES
            if is_small and self._begun >= self._max_begun:
                return
            begun = self._source.begin(planned.object) if is_small else None
            future = (
                self._pool.submit(self._read, planned.object, start_byte, end_byte)
                if begun is None
                else None
            )
            self._pending.append(_Unit(planned, weight, future, begun))
            self._begun += begun is not None
            self._weight += weight
            self._next = None

    def _next_unit(self) -> _Unit:
        unit = self._pending.popleft()
        self._weight -= unit.weight
        self._begun -= unit.begun is not None
        return unit

    def _result(self, unit: _Unit) -> Fetched:
        part = unit.begun.part() if unit.begun else None
        if part and not (self._compare_checksums and _differing(part)):
            return part, _sums_of(part.body)
        if unit.begun:  # it failed: retry in threads, with others that have failed
            failed = [other for other in self._pending if other.begun and other.begun.has_failed()]
            self._begun -= len(failed)
            for other in (unit, *failed):
                obj = other.planned.object
                other.future = self._pool.submit(self._read, obj, 0, obj.size_bytes)
                other.begun = None
        assert unit.future
        return unit.future.result()

    def s3_checksum(self, planned: PlannedObject) -> Checksum | None:
        return self._source.full_object_checksum(planned.object)

    def is_comparable(self, planned: PlannedObject) -> bool:
        """S3's checksum never covers a part."""
        return self._compare_checksums and not planned.part

    def _read(self, obj: S3Object, start_byte: int, end_byte: int) -> Fetched:
        if end_byte - start_byte < obj.size_bytes:
            return self._source.read(obj, start_byte, end_byte), None
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
