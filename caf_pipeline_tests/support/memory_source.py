"""An ObjectSource in memory whose objects can be made to fail.

It passes the contract of the real source.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from caf_pipeline.errors import ObjectReadFailed, ObjectUnavailable, SettingsError
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.objects import S3Object, SkipReason
from caf_pipeline.source.protocol import Checksum, InventoryReport, LastPage, ObjectHead, ObjectPart
from caf_pipeline_tests.support.plans import MOMENT

PAGE = 1000


@dataclass
class MemorySource:
    """Holds bodies by key.

    Reads of keys in `unavailable` and `failing` raise, from the given offset on.
    """

    bodies: dict[str, bytes]
    headers: dict[str, ObjectHeaders] = field(default_factory=dict)
    checksums: dict[str, Checksum] = field(default_factory=dict)
    unavailable: dict[str, tuple[SkipReason, int]] = field(default_factory=dict)
    failing: dict[str, int] = field(default_factory=dict)
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    down: Exception | None = None

    def objects(self) -> list[S3Object]:
        return [self.object(key) for key in sorted(self.bodies, key=str.encode)]

    def object(self, key: str) -> S3Object:
        body = self.bodies[key]
        return S3Object(
            key.encode(), None, f"etag-{hash(body) & 0xFFFFFFFF:08x}", len(body), MOMENT
        )

    def list_pages(
        self,
        *,
        after: bytes = b"",
        max_pages: int | None = None,
        in_order: bool = False,
        versions: bool = False,
        by_version: bool | None = None,
    ) -> Iterator[Sequence[S3Object]]:
        if self.down:
            raise self.down
        objects = [obj for obj in self.objects() if obj.key > after]
        pages = [objects[first : first + PAGE] for first in range(0, len(objects), PAGE)]
        yield from (LastPage(page) if page is pages[-1] else page for page in pages[:max_pages])

    def keeps_versions(self) -> bool:
        return False

    def open_report(self, name: str = "") -> InventoryReport:
        raise SettingsError("a memory source has no inventory reports")

    def find_reports(self, since: datetime | None) -> Sequence[str]:
        return []

    def read(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart:
        key = obj.key.decode()
        self.reads.append((key, start_byte, end_byte))
        reason, offset = self.unavailable.get(key, (None, 0))
        if reason is not None and end_byte > offset:
            raise ObjectUnavailable(f"{key} is {reason}", reason=reason)
        if key in self.failing and end_byte > self.failing[key]:
            raise ObjectReadFailed(f"{key} broke off")
        checksum = self.checksums.get(key) if end_byte - start_byte == obj.size_bytes else None
        return ObjectPart(
            self.bodies[key][start_byte:end_byte], self.headers.get(key, ObjectHeaders()), checksum
        )

    def begin(self, obj, start_byte, end_byte, ended):
        return None

    def full_object_checksum(self, obj: S3Object) -> Checksum | None:
        return self.checksums.get(obj.key.decode())

    def read_headers(self, obj: S3Object) -> ObjectHead:
        self.read(obj, 0, 0)
        key = obj.key.decode()
        checksum = self.checksums.get(key)
        return ObjectHead(
            self.headers.get(key, ObjectHeaders()),
            {checksum.algorithm: checksum.digest} if checksum else {},
        )

    def clock(self) -> datetime:
        if self.down:
            raise self.down
        return datetime.now(UTC)
