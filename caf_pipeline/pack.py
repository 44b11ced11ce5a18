"""Packs the objects of one chunk into one staged CAF file.

One pass over ordered bodies: each goes into the sink of stored bytes, its SHA-256 and range into the index and the
manifest. Objects that cannot be archived are skipped with their reason; where the next member no longer fits, the chunk
closes and the rest goes back to be planned.
Not here: the GETs (`fetch`), the file and the root (`stored_bytes`), states and claims (`archive`).
Source: "A chunk" and the table of skips in docs/design.md.
"""

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from caf_pipeline.caf_index import FOOTER_SIZE_BYTES, IndexBuilder
from caf_pipeline.checksums import Digest, new_digest
from caf_pipeline.errors import ObjectReadFailed, ObjectUnavailable
from caf_pipeline.fetch import OrderedFetch, checksum_differs
from caf_pipeline.interfaces import Checksum, ObjectHeaders, ObjectPart, ObjectSource
from caf_pipeline.inventory import SkipReason
from caf_pipeline.manifest import ChunkIdentity, ManifestWriter, head_bytes
from caf_pipeline.plan import ChunkPlan, PlannedObject
from caf_pipeline.settings import PackingSettings
from caf_pipeline.stored_bytes import StoredBytes, staging_error

_COPY_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Packed:
    """What packing made. Sizes in bytes; `fetched_bytes` counts what came over the network."""

    caf_size_bytes: int
    merkle_root: bytes
    member_count: int
    member_bytes: int
    skipped_count: int
    released_count: int
    fetched_bytes: int
    seconds: float


class Packer:
    """Packs one chunk.

    Args:
        limit_bytes: the finished file is not larger.
        give_up_on: asked when an object could not be read in this run; True skips it as unreadable, else the run fails.
        progress: told objects and bytes as they are done, and zeros between the parts of one; may raise to end the packing.
    """

    def __init__(
        self,
        chunk: ChunkPlan,
        identity: ChunkIdentity,
        source: ObjectSource,
        settings: PackingSettings,
        *,
        proof_type: int,
        limit_bytes: int,
        give_up_on: Callable[[PlannedObject, ObjectReadFailed], bool],
        progress: Callable[[int, int], None],
    ) -> None:
        self._chunk = chunk
        self._identity = identity
        self._source = source
        self._settings = settings
        self._proof_type = proof_type
        self._limit_bytes = limit_bytes
        self._give_up_on = give_up_on
        self._progress = progress
        self._index = IndexBuilder()
        self._member_count = 0
        self._member_bytes = 0
        self._skipped_count = 0

    def pack(self, objects: Iterable[PlannedObject], staged: Path, spool: Path) -> Packed:
        """Write the chunk to `staged` and its manifest to `spool`, neither of which exists; both stay on success.

        Raises:
            StagingError: the disk is full. ObjectReadFailed, SourceError: the run cannot go on. Files are left for the
                caller to remove.
        """
        started = time.monotonic()
        expected = min(self._chunk.expected_size_bytes, self._limit_bytes)
        with (
            StoredBytes(staged, proof_type=self._proof_type, reserve_bytes=expected) as sink,
            ManifestWriter(spool, self._identity) as manifest,
            OrderedFetch(
                self._source,
                objects,
                window_bytes=self._settings.window_size,
                part_bytes=self._settings.part_size,
                threads=self._settings.fetch_threads,
                compare_checksums=self._settings.compare_checksums,
            ) as fetch,
        ):
            head = head_bytes(self._identity)
            self._index.add(self._chunk.head_member, 0, len(head))
            sink.write(head)
            released_count = 0
            while (planned := fetch.next_object()) is not None:
                if not self._add(planned, fetch, sink, manifest):
                    released_count = 1 + sum(1 for _ in fetch.rest())
                    break
            self._add_manifest(manifest, sink, spool)
            self._add_index(sink)
            root = sink.finish()
        return Packed(
            caf_size_bytes=sink.size_bytes,
            merkle_root=root,
            member_count=self._member_count,
            member_bytes=self._member_bytes,
            skipped_count=self._skipped_count,
            released_count=released_count,
            fetched_bytes=fetch.fetched_bytes,
            seconds=time.monotonic() - started,
        )

    def _add(self, planned: PlannedObject, fetch: OrderedFetch, sink: StoredBytes, manifest: ManifestWriter) -> bool:
        """Add one object, or its skip; return False, with nothing added, where it no longer fits."""
        mark = sink.mark() if planned.object.size_bytes > self._settings.part_size else None
        try:
            added = self._add_member(planned, fetch, sink, manifest)
        except ObjectUnavailable as error:
            reason, detail = error.reason, str(error)
        except ObjectReadFailed as error:
            if not self._give_up_on(planned, error):
                raise
            reason, detail = SkipReason.UNREADABLE, str(error)
        else:
            if added or self._member_count or self._skipped_count:
                return added
            reason, detail = SkipReason.TOO_LARGE, "with its metadata it is larger than a chunk"
        if mark:
            sink.roll_back(mark)
        manifest.add(_described(planned) | {"skip_reason": str(reason), "skip_detail": detail})
        self._skipped_count += 1
        self._progress(1, 0)
        return True

    def _add_member(self, planned: PlannedObject, fetch: OrderedFetch, sink: StoredBytes, manifest: ManifestWriter) -> bool:
        start_byte = sink.size_bytes
        end_byte = start_byte + planned.object.size_bytes
        row: dict[str, Any] = {}
        checks: _MemberChecks | None = None
        for part, sha256 in fetch.parts(planned):
            if not row:
                row = _member_row(planned, part, start_byte, end_byte)
                if not self._fits(planned.member, start_byte, end_byte, manifest.bound_bytes + manifest.row_bound(row)):
                    return False
                row["sha256"] = sha256
                if sha256 is None:
                    checks = _MemberChecks(fetch.checksum_of(planned.object))
            if checks:
                checks.update(part)
            sink.write(part.body)
            self._progress(0, 0)  # a large object must not go on while everything is paused
        if checks:
            row["sha256"] = checks.sha256(planned)
        if sink.size_bytes != end_byte:
            raise ObjectReadFailed(
                f"{planned.object.key!r} gave {sink.size_bytes - start_byte} bytes instead of {end_byte - start_byte}"
            )
        self._index.add(planned.member, start_byte, end_byte)
        manifest.add(row)
        self._member_count += 1
        self._member_bytes += planned.object.size_bytes
        self._progress(1, planned.object.size_bytes)
        return True

    def _fits(self, member: str, start_byte: int, end_byte: int, manifest_bytes: int) -> bool:
        index = self._index.size_with(member, start_byte, end_byte)
        ours = IndexBuilder()  # the manifest's entry, counted at the place where it would end
        last = ours.size_with(self._chunk.manifest_member, end_byte, end_byte + manifest_bytes)
        entry_bytes = last - ours.index_size_bytes + 1
        return end_byte + manifest_bytes + index + entry_bytes + FOOTER_SIZE_BYTES <= self._limit_bytes

    def _add_manifest(self, manifest: ManifestWriter, sink: StoredBytes, spool: Path) -> None:
        try:
            manifest.close()
            start_byte = sink.size_bytes
            with spool.open("rb") as file:
                while piece := file.read(_COPY_BYTES):
                    sink.write(piece)
        except OSError as error:
            raise staging_error(spool, error) from error
        self._index.add(self._chunk.manifest_member, start_byte, sink.size_bytes)

    def _add_index(self, sink: StoredBytes) -> None:
        for piece in self._index.iter_index():
            sink.write(piece)
        sink.write(self._index.footer())


class _MemberChecks:
    """SHA-256 and S3's own checksum of an object that comes in parts."""

    def __init__(self, expected: Checksum | None) -> None:
        self._sha256 = hashlib.sha256()
        self._expected = expected
        self._digest: Digest | None = new_digest(expected.algorithm) if expected else None

    def update(self, part: ObjectPart) -> None:
        """Take the next part."""
        self._sha256.update(part.body)
        if self._digest:
            self._digest.update(part.body)

    def sha256(self, planned: PlannedObject) -> bytes:
        """Return the SHA-256, or raise ObjectReadFailed where S3's own checksum differs."""
        if self._expected and self._digest and self._digest.digest() != self._expected.digest:
            raise checksum_differs(planned.object, self._expected.algorithm)
        return self._sha256.digest()


def _described(planned: PlannedObject) -> dict[str, Any]:
    obj = planned.object
    return {
        "key": obj.key.decode(),
        "version_id": obj.version_id,
        "etag": obj.etag,
        "size_bytes": obj.size_bytes,
        "last_modified": obj.last_modified,
        "storage_class": obj.storage_class,
    }


def _member_row(planned: PlannedObject, part: ObjectPart, start_byte: int, end_byte: int) -> dict[str, Any]:
    headers: ObjectHeaders = part.headers
    return _described(planned) | {
        "member": planned.member,
        "start_byte": start_byte,
        "end_byte": end_byte,
        "content_type": headers.content_type or None,
        "content_encoding": headers.content_encoding or None,
        "content_language": headers.content_language or None,
        "content_disposition": headers.content_disposition or None,
        "cache_control": headers.cache_control or None,
        "expires": headers.expires or None,
        "user_metadata": dict(headers.user_metadata),
    }


def remove_staged(*paths: Path) -> None:
    """Remove files of a packing that failed; those that are not there are no error."""
    for path in paths:
        path.unlink(missing_ok=True)
