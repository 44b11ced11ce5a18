"""What a source of objects is: it lists them, and reads each by its exact identity.

Keys are bytes, ends are exclusive, times are aware and in UTC. Every implementation passes the contract suite
`caf_pipeline_tests/contracts/object_source.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NoReturn, Protocol

from typing_extensions import Buffer

from caf_pipeline.errors import SourceUnreachable
from caf_pipeline.inventory.objects import S3Object


@dataclass(frozen=True, slots=True)
class ObjectHeaders:
    """What S3 keeps beside an object's bytes and the manifest keeps too. Empty strings where S3 has none."""

    content_type: str = ""
    content_encoding: str = ""
    content_language: str = ""
    content_disposition: str = ""
    cache_control: str = ""
    expires: str = ""
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checksum:
    """S3's own checksum over a full object: "sha256", "sha1", "crc32", "crc32c" or "crc64nvme", and its raw digest."""

    algorithm: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """Some bytes of one object, `len(body)` of them, and the headers that came along.

    `checksum` is S3's own, where the part is all of the object and there is one.
    """

    body: Buffer
    headers: ObjectHeaders
    checksum: Checksum | None = None


class ObjectSource(Protocol):
    """A bucket and prefix to archive. Safe to call from several threads."""

    def list_pages(self, *, after: bytes = b"", max_pages: int | None = None) -> Iterator[Sequence[S3Object]]:
        """Yield pages of current objects whose key is greater than `after` (bytes), in the order of the listing.

        Delete markers and older versions are left out; keys keep the source's prefix. No page is empty, and `max_pages`
        counts those that are yielded.

        Raises:
            SourceDenied, BucketMissing, SourceUnreachable, ListingRefused: nothing was yielded of the page at fault.
        """
        ...

    def read(self, obj: S3Object, start_byte: int, end_byte: int) -> ObjectPart:
        """Read `[start_byte, end_byte)` of exactly this identity, by version id or If-Match.

        `(0, obj.size_bytes)` is a plain GET. The part has `end_byte - start_byte` bytes, or this raises. The whole range is
        held in memory: ask for large objects in ranges.

        Raises:
            ObjectUnavailable: with the skip reason, where a retry in this run cannot help.
            ObjectReadFailed: after all retries. SourceDenied, BucketMissing: nothing of the source can be read.
        """
        ...

    def full_object_checksum(self, obj: S3Object) -> Checksum | None:
        """Return S3's own checksum of the object where it covers the full object, else None: for objects that are read in parts.

        Asks the network only where the listing named a checksum.
        """
        ...

    def read_headers(self, obj: S3Object) -> ObjectHeaders:
        """Return the headers of exactly this identity as it was written at `obj.last_modified`, by one HEAD; none of its bytes.

        Raises:
            As `read`; ObjectUnavailable with `changed` where it was written again since.
        """
        ...

    def clock(self) -> datetime:
        """Return the time by the source's own clock, which its LastModified are of. Costs a request."""
        ...


class UnaskedObjects:
    """The objects of a source that is not asked: S3 need not be there, and every method raises SourceUnreachable with `why`."""

    def __init__(self, why: str) -> None:
        self._why = why

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise SourceUnreachable(self._why)

    list_pages = read = full_object_checksum = read_headers = clock = _refuse
