"""Many GETs side by side, their bodies in order.

Small objects are one GET each, large ones ranges of `part_size` bytes. As many are under way or waiting for the writer as fit
into a window of bytes, so that memory does not depend on the sizes or the number of objects.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from caf_pipeline.errors import ObjectReadFailed
from caf_pipeline.inventory.checksums import new_digest
from caf_pipeline.inventory.objects import S3Object
from caf_pipeline.inventory.plan import PlannedObject
from caf_pipeline.source.protocol import Checksum, ObjectPart, ObjectSource

MIN_UNIT_BYTES: Final = 4096
"""What an empty object counts in the window: its headers, futures and buffers, so that a million of them are not under way."""

CHECKSUM_ATTEMPTS: Final = 3
"""GETs of one body whose checksum differs, before it is said to be unreadable in this run."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """One GET under way: a part of an object, and the SHA-256 where that is all of it. `weight` counts in the window."""

    planned: PlannedObject
    weight: int
    future: "Future[tuple[ObjectPart, bytes | None]]"


class OrderedFetch:
    """Fetches objects in the given order. Iterate with `next_object`, then `parts` of that object."""

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
        """Fetch `objects` in their order, the first from its byte `begin_at` on."""
        self._source = source
        self._wanted = _units(objects, part_bytes, begin_at)
        self._window_bytes = window_bytes
        self._compare_checksums = compare_checksums
        self._under_way: deque[_Unit] = deque()
        self._weight = 0
        self._next: tuple[PlannedObject, int, int] | None = None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fetch")
        self.fetched_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def next_object(self) -> PlannedObject | None:
        """Return the object whose parts come next, or None at the end. Parts of an object before it are dropped."""
        self._fill()
        return self._under_way[0].planned if self._under_way else None

    def parts(self, planned: PlannedObject) -> Iterator[tuple[ObjectPart, bytes | None]]:
        """Yield the object's parts in order, each with the SHA-256 of the whole object where the part is all of it.

        Raises what `ObjectSource.read` raises; after that, and after leaving early, the rest of the object is dropped.
        """
        try:
            while self._under_way and self._under_way[0].planned is planned:
                unit = self._under_way.popleft()
                self._weight -= unit.weight
                result = unit.future.result()
                self.fetched_bytes += memoryview(result[0].body).nbytes
                del unit
                yield result
                del result
                self._fill()
        finally:
            self._drop(planned)

    def _peek(self) -> tuple[PlannedObject, int, int] | None:
        if self._next is None:
            self._next = next(self._wanted, None)
        return self._next

    def _drop(self, planned: PlannedObject) -> None:
        while self._under_way and self._under_way[0].planned is planned:
            unit = self._under_way.popleft()
            self._weight -= unit.weight
            unit.future.cancel()
        while (wanted := self._peek()) and wanted[0] is planned:
            self._next = None

    def _fill(self) -> None:
        while wanted := self._peek():
            planned, start_byte, end_byte = wanted
            weight = max(end_byte - start_byte, MIN_UNIT_BYTES)
            if self._under_way and self._weight + weight > self._window_bytes:
                return
            future = self._pool.submit(self._read, planned.object, start_byte, end_byte)
            self._under_way.append(_Unit(planned, weight, future))
            self._weight += weight
            self._next = None

    def checksum_of(self, obj: S3Object) -> Checksum | None:
        """Return S3's own checksum over the full object, where there is one and it is to be compared."""
        return self._source.full_object_checksum(obj) if self._compare_checksums else None

    def _read(self, obj: S3Object, start_byte: int, end_byte: int) -> tuple[ObjectPart, bytes | None]:
        if end_byte - start_byte < obj.size_bytes:
            return self._source.read(obj, start_byte, end_byte), None
        algorithm = ""
        for _ in range(CHECKSUM_ATTEMPTS):
            part = self._source.read(obj, 0, obj.size_bytes)
            algorithm = _differing(part) if self._compare_checksums else ""
            if not algorithm:
                return part, hashlib.sha256(part.body).digest()
        raise checksum_differs(obj, algorithm)


def _differing(part: ObjectPart) -> str:
    """Return the algorithm of S3's checksum where the body has another, else ""."""
    digest = new_digest(part.checksum.algorithm) if part.checksum else None
    if part.checksum is None or digest is None:
        return ""
    digest.update(part.body)
    return "" if digest.digest() == part.checksum.digest else part.checksum.algorithm


def checksum_differs(obj: S3Object, algorithm: str) -> ObjectReadFailed:
    """Return the error for a body that is not what S3's own checksum says."""
    return ObjectReadFailed(
        f"the bytes of {obj.key!r} do not have the {algorithm} that S3 keeps of them",
        hint="something between S3 and here changes bytes, or the object is damaged in S3",
    )


def _units(objects: Iterable[PlannedObject], part_bytes: int, begin_at: int) -> Iterator[tuple[PlannedObject, int, int]]:
    for planned in objects:
        size_bytes = planned.object.size_bytes
        for start_byte in range(begin_at, max(size_bytes, 1), part_bytes):
            yield planned, start_byte, min(start_byte + part_bytes, size_bytes)
        begin_at = 0
