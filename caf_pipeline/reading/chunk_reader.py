"""Reads the index and manifest of a staged or stored chunk by range reads."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import Buffer

from caf_pipeline.caf.archive import CafReader, Member, RangeSource
from caf_pipeline.caf.index import FOOTER_SIZE_BYTES, parse_footer
from caf_pipeline.errors import MalformedArchive, StagingError
from caf_pipeline.inventory.manifest import (
    HEAD_MEMBER,
    HEAD_SIZE_BYTES,
    IDENTITY_COLUMNS,
    MANIFEST_MEMBER,
    OpenedManifest,
    open_manifest,
    row_identity,
)
from caf_pipeline.inventory.objects import MAX_KEY_BYTES, SkipReason
from caf_pipeline.ledger.records import Skip
from caf_pipeline.records import PostRecord
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.quantities import counted

MANIFEST_BUFFER_BYTES: Final = 1 << 20
"""Bytes of one range read, for many small reads of the Parquet reader."""


SKIP_COLUMNS: Final = ("key", *IDENTITY_COLUMNS, "skip_reason", "skip_detail", "last_modified")
"""The manifest's columns for `skips_of`."""


class StagedSource:
    """A staged file as a `RangeSource`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, start_byte: int, end_byte: int) -> bytes:
        """Return fewer bytes if the file ends earlier."""
        with self._path.open("rb") as file:
            file.seek(start_byte)
            return file.read(end_byte - start_byte)

    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        total = self._path.stat().st_size
        return self.read(max(total - size_bytes, 0), total), total


class RemoteSource:
    """A stored chunk as a `RangeSource`, from any provider or from `provider` only."""

    def __init__(
        self, store: ChunkReader, posting: PostRecord, provider: str | None = None
    ) -> None:
        self._store = store
        self._posting = posting
        self._provider = provider

    def read(self, start_byte: int, end_byte: int) -> bytes:
        return b"".join(
            self._store.read(self._posting, start_byte, end_byte, provider=self._provider)
        )

    def read_suffix(self, size_bytes: int) -> tuple[bytes, int]:
        total = self._posting.stored_size_bytes
        return self.read(max(total - size_bytes, 0), total), total


class _MemberFile(io.RawIOBase):
    def __init__(self, source: RangeSource, member: Member) -> None:
        self._source = source
        self._member = member
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._member.size_bytes}[
            whence
        ]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        start_byte = self._member.start_byte + self._position
        data = self._source.read(start_byte, min(start_byte + len(view), self._member.end_byte))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def skips_of(batch: pa.RecordBatch) -> Iterator[Skip]:
    """Yield the skips in rows with `SKIP_COLUMNS`."""
    for row in batch.filter(pc.is_valid(batch["skip_reason"])).to_pylist():
        yield Skip(
            key=row["key"],
            object_version=row_identity(row),
            reason=SkipReason(row["skip_reason"]),
            detail=row["skip_detail"],
            etag=row["etag"],
            size_bytes=row["size_bytes"],
            last_modified=row["last_modified"],
        )


class ChunkFile:
    """A chunk's members and manifest. The index is read on first use, which may take seconds.

    Raises MalformedArchive if it is not our chunk, and StagingError if it cannot be read.
    """

    def __init__(self, source: RangeSource, name: str) -> None:
        self.name = name
        self._source = source

    @cached_property
    def reader(self) -> CafReader:
        with self._reading():
            return CafReader.open(self._source, name=self.name)

    def manifest(self, start_byte: int | None = None) -> OpenedManifest:
        """Open the manifest, whose rows are in plan order.

        If `start_byte` is known from the seal, the index is not read.
        """
        if start_byte is None:
            member = self.manifest_member()
        else:
            with self._reading():
                footer, size_bytes = self._source.read_suffix(FOOTER_SIZE_BYTES)
            member = Member(
                MANIFEST_MEMBER, start_byte, size_bytes - FOOTER_SIZE_BYTES - parse_footer(footer)
            )
        return open_manifest(
            io.BufferedReader(_MemberFile(self._source, member), MANIFEST_BUFFER_BYTES)
        )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StagingError(
                f"the staged chunk {self.name} cannot be read: {error.strerror}"
            ) from error

    def range_fault(self, member: str, start_byte: int, end_byte: int, size_bytes: int) -> str:
        """Compare a manifest row's range with the index; "" if they agree."""
        if member not in self.reader:
            return f"the manifest names member {member[:60]!r}, which is missing from the index"
        indexed = self.reader[member]
        same_range = (indexed.start_byte, indexed.end_byte) == (start_byte, end_byte)
        if not same_range or end_byte - start_byte != size_bytes:
            return f"index and manifest have different ranges for member {member[:60]!r}"
        return ""

    def member_count_fault(self, members: int) -> str:
        objects = len(self.reader) - 2  # without the head and the manifest
        if objects == members:
            return ""
        return f"the index has {counted(objects, 'object')}, the manifest describes {members}"

    def head_member(self) -> Member:
        for member in self._members_named(HEAD_MEMBER):
            if (member.start_byte, member.end_byte) == (0, HEAD_SIZE_BYTES):
                return member
        raise self._foreign(f"begin with a member {HEAD_MEMBER}")

    def manifest_member(self) -> Member:
        """Return the last body of the file. It is never empty."""
        for member in self._members_named(MANIFEST_MEMBER):
            if member.end_byte == self.reader.data_size_bytes and member.size_bytes:
                return member
        raise self._foreign(f"end with a member {MANIFEST_MEMBER}")

    def _members_named(self, name: str) -> Iterator[Member]:
        """Our name ends with `~`s if an object has it."""
        for count in range(MAX_KEY_BYTES):
            if name + "~" * count in self.reader:
                yield self.reader[name + "~" * count]

    def _foreign(self, missing: str) -> MalformedArchive:
        return MalformedArchive(
            f"{self.name} does not {missing}",
            hint="it is a CAF file, but not a chunk of this pipeline",
        )
