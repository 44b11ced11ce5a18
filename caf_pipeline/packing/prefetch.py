"""Many GETs side by side, their bodies in order.

Small objects are one GET each, large ones ranges of `part_size` bytes. As many are under way or
waiting for the writer as fit into a window of bytes, so that memory does not depend on the sizes or
the number of objects. The smallest are begun by the writer itself: handing one to a thread and back
costs more than all that is done with its bytes.
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
"""What an empty object counts in the window: its headers, futures and buffers, so that a million of
them are not under way.
"""

CHECKSUM_ATTEMPTS: Final = 3
"""GETs of one body whose checksum differs, before it is said to be unreadable in this run."""


BEGUN_BYTES: Final = 64 << 10
"""Objects up to this size are begun by the writer.

SHA-256 and S3's checksum of so much take 0.1 ms; what is larger is hashed in threads, beside the
writer.
"""

BEGUN_AHEAD: Final = 4
"""Objects begun for each of the GETs side by side, so that these go on while the writer is busy."""


class BodySums(NamedTuple):
    """The checksums of a member's bytes; the CRC is big-endian."""

    sha256: bytes
    crc64nvme: bytes


Fetched = tuple[ObjectPart, BodySums | None]
"""A part, and the checksums of the object if the part is all of it."""


@dataclass(slots=True)
class _Unit:
    """One GET under way: in a thread, or begun by the writer. `weight` counts in the window."""

    planned: PlannedObject
    weight: int
    future: "Future[Fetched] | None"
    begun: PendingRead | None = None

    def cancel(self) -> None:
        """Cancel the GET; what was read of it is dropped."""
        for one in (self.future, self.begun):
            if one:
                one.cancel()


class OrderedFetch:
    """Fetches objects in the given order. Iterate with `next_object`, then `parts` of that
    object.
    """

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
        self._begun = 0
        self._begun_at_most = BEGUN_AHEAD * threads
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
        for unit in self._under_way:
            unit.cancel()
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def next_object(self) -> PlannedObject | None:
        """Return the object whose parts come next, or None at the end.

        Parts of an object before it are dropped.
        """
        self._fill()
        return self._under_way[0].planned if self._under_way else None

    def parts(self, planned: PlannedObject) -> Generator[Fetched]:
        """Yield the object's parts in order, each with the checksums of the whole object if the
        part is all of it.

        Raises what `ObjectSource.read` raises; after that, and after leaving early, the rest of the
        object is dropped.
        """
        try:
            while self._under_way and self._under_way[0].planned is planned:
                unit = self._next_unit()
                result = self._result(unit)
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
            self._next_unit().cancel()
        while (wanted := self._peek()) and wanted[0] is planned:
            self._next = None

    def _fill(self) -> None:
        while wanted := self._peek():
            planned, start_byte, end_byte = wanted
            weight = max(end_byte - start_byte, MIN_UNIT_BYTES)
            if self._under_way and self._weight + weight > self._window_bytes:
                return
            is_small = end_byte - start_byte == planned.object.size_bytes <= BEGUN_BYTES
            if is_small and self._begun >= self._begun_at_most:
                return
            begun = self._source.begin(planned.object) if is_small else None
            future = (
                self._pool.submit(self._read, planned.object, start_byte, end_byte)
                if begun is None
                else None
            )
            self._under_way.append(_Unit(planned, weight, future, begun))
            self._begun += begun is not None
            self._weight += weight
            self._next = None

    def _next_unit(self) -> _Unit:
        unit = self._under_way.popleft()
        self._weight -= unit.weight
        self._begun -= unit.begun is not None
        return unit

    def _result(self, unit: _Unit) -> Fetched:
        part = unit.begun.part() if unit.begun else None
        if part and not (self._compare_checksums and _differing(part)):
            return part, _sums_of(part.body)
        return (unit.future or self._read_again(unit)).result()

    def _read_again(self, unit: _Unit) -> "Future[Fetched]":
        """Read in threads what was begun and failed: this one, and side by side with it those
        behind it that failed as well.
        """
        future = self._in_thread(unit.planned.object)
        for other in self._under_way:
            if other.begun and other.begun.has_failed():
                other.future, other.begun = self._in_thread(other.planned.object), None
                self._begun -= 1
        return future

    def _in_thread(self, obj: S3Object) -> "Future[Fetched]":
        return self._pool.submit(self._read, obj, 0, obj.size_bytes)

    def s3_checksum(self, planned: PlannedObject) -> Checksum | None:
        """Return S3's own checksum of the full object, if it has one."""
        return self._source.full_object_checksum(planned.object)

    def is_comparable(self, planned: PlannedObject) -> bool:
        """Return whether S3's checksum covers the packed bytes, and the settings want it compared.

        S3 has none of a part.
        """
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


def _units(
    objects: Iterable[PlannedObject], part_bytes: int, begin_at: int
) -> Iterator[tuple[PlannedObject, int, int]]:
    for planned in objects:
        end_byte = planned.start_byte + planned.size_bytes
        for start_byte in range(planned.start_byte + begin_at, max(end_byte, 1), part_bytes):
            yield planned, start_byte, min(start_byte + part_bytes, end_byte)
        begin_at = 0
