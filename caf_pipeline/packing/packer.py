"""Packs the objects of one chunk into one staged CAF file.

When the next member does not fit, the chunk closes and releases the remaining objects. Resuming
gives the same bytes.

Source: docs/explanation/design.md, which lists the reasons of skips.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from typing_extensions import Buffer

from caf_pipeline.caf.index import FOOTER_SIZE_BYTES, IndexBuilder
from caf_pipeline.encryption.opened_chunk import OpenedChunk
from caf_pipeline.encryption.sealing import SealedSpool
from caf_pipeline.errors import LeaseLost, ObjectReadFailed, ObjectUnavailable, StagingError
from caf_pipeline.formats import age
from caf_pipeline.inventory.checksums import Digest, new_crc64nvme, new_digest
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.manifest import (
    LOG_BYTES,
    PART_COLUMNS,
    ChunkIdentity,
    ManifestWriter,
    head_bytes,
)
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.inventory.plan import ChunkPlan, PlannedObject
from caf_pipeline.ledger.records import ChunkHeader, SealRecord
from caf_pipeline.packing.journal.earlier import EarlierPacking
from caf_pipeline.packing.journal.format import (
    Journal,
    JournalPosition,
    Opening,
    PackedMember,
    SkippedObject,
    opening_of,
)
from caf_pipeline.packing.journal.replay import ObjectQueue, Outcomes, ReplayState, replay
from caf_pipeline.packing.journal.writer import (
    CheckpointPace,
    Checkpoints,
    OpenObject,
    pace_of,
    part_of,
    window_of,
)
from caf_pipeline.packing.log_times import HEAD_BYTES, add_log_times, is_log
from caf_pipeline.packing.prefetch import BodySums, OrderedFetch, checksum_differs
from caf_pipeline.packing.sink import Mark, PartFile, StagingSink, staging_errors
from caf_pipeline.settings import PackingSettings
from caf_pipeline.source.protocol import Checksum, ObjectSource
from caf_pipeline.system.atomic_files import overwrite
from caf_pipeline.system.hashes import RunningHash

_COPY_BYTES: Final = 1 << 20
_NO_HEADERS: Final = ObjectHeaders()

_TWO_ENTRIES_BYTES: Final = 2 * (6 * 1024 + 128) + FOOTER_SIZE_BYTES
r"""Upper bound of two index entries and the footer.

A key has up to 1,024 bytes, and `\u0000` stands for a single byte.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedChunk(SealRecord):
    """A packed file, not yet sampled.

    `resumed_bytes` are an earlier run's. `not_resumed` is why its file was not resumed completely,
    or "".
    """

    fetched_bytes: int
    seconds: float
    resumed_bytes: int
    not_resumed: str


class Packer:
    """Packs one chunk.

    Args:
        give_up_on: whether to skip an unreadable object instead of failing the run.
        progress: called with the objects and bytes done since the last call, and how many of these
            bytes were read now. Bytes are negative if a counted object is skipped. May raise to
            end the packing.
        pace: by default, from the settings.
        recipients: who can open the chunk; none for a plain chunk.

    Attributes:
        kept_bytes: after a failure, the bytes that can be resumed.
        opened: the finished chunk with its file key; None if it is plain.
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
        give_up_on: Callable[[PlannedObject], bool],
        progress: Callable[[int, int, int], None],
        pace: CheckpointPace | None = None,
        recipients: Sequence[age.Recipient] = (),
    ) -> None:
        self._chunk = chunk
        self._identity = identity
        self._source = source
        self._settings = settings
        self._proof_type = proof_type
        self._limit_bytes = limit_bytes
        self._give_up_on = give_up_on
        self._progress = progress
        self._recipients = recipients
        self._reported_bytes = 0  # of the current object
        self._pace = pace or pace_of(settings)
        self._index = IndexBuilder()
        self._member_count = 0
        self._member_bytes = 0
        self._skipped_count = 0
        self._sink: StagingSink
        self._manifest: ManifestWriter
        self._checkpoints: Checkpoints
        self._open: OpenObject | None = None
        self.kept_bytes = 0
        self.opened: OpenedChunk | None = None

    @property
    def opening(self) -> Opening:
        return opening_of(
            self._chunk,
            self._identity,
            proof_type=self._proof_type,
            limit_bytes=self._limit_bytes,
            compare_checksums=self._settings.compare_checksums,
        )

    def pack(
        self,
        objects: Iterable[PlannedObject],
        part: PartFile,
        spool: Path,
        journal: Journal | None,
        earlier: EarlierPacking | None = None,
    ) -> PackedChunk:
        """Write the chunk to `part`, which is closed, and its manifest to `spool`.

        `objects` are in plan order. `part` is new, or is resumed with its `journal`. After an
        error, it keeps what the journal holds. If there are recipients, `part` and `journal` are
        new, and `earlier` is sealed again into them. The journal then needs a worker key.
        """
        started = time.monotonic()
        queue = ObjectQueue(iter(objects))
        # A failure before the cut keeps the whole file.
        self.kept_bytes = earlier.part.size_bytes if earlier else part.size_bytes
        with (
            StagingSink(
                part,
                proof_type=self._proof_type,
                recipients=self._recipients,
                read_earlier=earlier.read if earlier else None,
            ) as sink,
            SealedSpool(spool) as file,
            ManifestWriter(file, self._identity) as manifest,
        ):
            self._sink, self._manifest = sink, manifest
            reached, fault = self._begin(queue, journal, earlier)
            opened = reached.open
            begin_at = reached.end.offset - opened.mark.offset if opened else 0
            with (
                self._journaled(journal, reached),
                self._fetch(queue, begin_at) as fetch,
            ):
                if earlier:
                    self._replace(earlier, opened)
                sink.reserve(min(self._chunk.expected_size_bytes, self._limit_bytes))
                while (planned := fetch.next_object()) is not None and self._add(planned, fetch):
                    self._checkpoints.reached()
                self._checkpoints.save()  # a kill from here on costs no GET
                tail_start = sink.size_bytes
                tail_sha256 = self._add_tail(file, spool)
                root = sink.finish()
        self.kept_bytes = sink.stored_size_bytes
        header = None
        if sink.segments:
            header = ChunkHeader(sink.header, sink.segments.nonce, sink.size_bytes)
            self.opened = OpenedChunk(header, sink.segments.payload)
        return PackedChunk(
            caf_size_bytes=sink.size_bytes,
            stored_size_bytes=sink.stored_size_bytes,
            merkle_root=root,
            proof_type=self._proof_type,
            samples=(),
            member_count=self._member_count,
            member_bytes=self._member_bytes,
            skipped_count=self._skipped_count,
            released_count=self._chunk.object_count - self._member_count - self._skipped_count,
            fetched_bytes=fetch.fetched_bytes,
            seconds=time.monotonic() - started,
            resumed_bytes=reached.end.offset,
            not_resumed=fault,
            tail_start=tail_start,
            tail_sha256=tail_sha256,
            header=header,
            recipients=[str(recipient) for recipient in self._recipients],
        )

    # --- what is there already --------------------------------------------------------------------

    def _begin(
        self, queue: ObjectQueue, journal: Journal | None, earlier: EarlierPacking | None
    ) -> tuple[ReplayState, str]:
        head = head_bytes(self._identity)
        self._index.add(self._chunk.head_member, 0, len(head))
        replayed = journal
        if self._recipients:
            replayed = earlier.journal if earlier else None
            if journal:
                journal.append(self.opening)
        if replayed is None:
            start = self._sink.mark()
            self._sink.write(head)
            return ReplayState(JournalPosition(), start, start, hashlib.sha256()), ""
        reached, fault = replay(
            replayed,
            self._sink,
            objects=queue,
            head=head,
            take=self._take_outcomes,
            renewed=journal if earlier else None,
        )
        if not earlier:  # its files stay until `_replace`
            self.kept_bytes = reached.end.offset
        if not reached.end.offset:
            if not earlier:
                replayed.append(self.opening)
            self._sink.write(head)
        self._open = reached.open
        return reached, fault

    def _replace(self, earlier: EarlierPacking, opened: OpenObject | None) -> None:
        if opened:
            self._checkpoints.begin_member(opened)
        self._checkpoints.save()
        self._sink.publish()
        earlier.replaced()

    def _take_outcomes(self, outcomes: Outcomes) -> None:
        size_bytes = 0
        for planned, outcome in outcomes:
            if isinstance(outcome, SkippedObject):
                self._count_skip(planned, outcome.reason, outcome.detail)
            else:
                log = self._is_staged_log(planned, outcome.start_byte, outcome.end_byte)
                self._count_member(planned, outcome, _member_row(planned, outcome), log=log)
                size_bytes += planned.size_bytes
        self._progress(len(outcomes), size_bytes, 0)

    @contextlib.contextmanager
    def _journaled(self, journal: Journal | None, reached: ReplayState) -> Iterator[None]:
        checkpoints = self._checkpoints = Checkpoints(
            journal,
            self._sink,
            self._pace,
            objects_digest=reached.objects_digest,
            resumed_bytes=reached.end.offset,
        )
        try:
            yield
        except BaseException as error:
            # A full disk takes no checkpoint, and without the lease another run may be waiting.
            checkpoints.end(save=not isinstance(error, StagingError | LeaseLost | OSError))
            with contextlib.suppress(OSError):  # report the error that ended the packing instead
                os.ftruncate(
                    self._sink.part.descriptor, self._sink.stored_bytes(checkpoints.resumable_bytes)
                )
            raise
        finally:  # even if a second Ctrl-C interrupts the save
            self.kept_bytes = self._sink.stored_bytes(checkpoints.resumable_bytes)
            checkpoints.close()

    def _fetch(self, objects: Iterable[PlannedObject], begin_at: int = 0) -> OrderedFetch:
        settings = self._settings
        return OrderedFetch(
            self._source,
            objects,
            window_bytes=window_of(settings),
            part_bytes=part_of(settings),
            max_requests=settings.max_requests,
            compare_checksums=settings.compare_checksums,
            begin_at=begin_at,
        )

    def find_unreadable(self, objects: Iterable[PlannedObject]) -> Iterator[PlannedObject]:
        """Yield objects that cannot be read. Memory: another window."""
        with self._fetch(objects) as fetch:
            while (planned := fetch.next_object()) is not None:
                checks: _MemberChecks | None = None
                try:
                    with contextlib.closing(fetch.parts(planned)) as parts:
                        for part, sums in parts:
                            if sums is None:
                                checks = checks or _checks_of(planned, fetch)
                                checks.update(part.body)
                            self._progress(0, 0, 0)
                    if checks:
                        checks.compared(planned)
                except ObjectUnavailable:
                    continue
                except ObjectReadFailed:
                    yield planned

    # --- objects ----------------------------------------------------------------------------------

    def _add(self, planned: PlannedObject, fetch: OrderedFetch) -> bool:
        """Return False, with nothing added, if the object does not fit."""
        opened, self._open = self._open, None
        self._reported_bytes = 0
        # A small object arrives with its checksums. Those of a larger one are computed by part.
        in_pieces = planned.part is not None or planned.size_bytes > part_of(self._settings)
        mark = opened.mark if opened else self._sink.mark() if in_pieces else None
        try:
            added = (
                self._add_in_pieces(planned, fetch, mark, opened)
                if mark
                else self._add_whole(planned, fetch)
            )
        except ObjectUnavailable as error:
            reason, detail = SkipReason(error.reason), str(error)
        except ObjectReadFailed as error:
            if not self._give_up_on(planned):
                raise
            reason, detail = SkipReason.UNREADABLE, str(error)
        else:
            if added or self._member_count or self._skipped_count:
                return added
            reason, detail = SkipReason.TOO_LARGE, "object and metadata are larger than a chunk"
        if mark:
            self._checkpoints.roll_back(mark)
        self._count_skip(planned, reason, detail)
        self._checkpoints.done(planned, SkippedObject(reason, detail))
        self._checkpoints.rolled_back()
        self._progress(1, -self._reported_bytes, 0)
        return True

    def _add_whole(self, planned: PlannedObject, fetch: OrderedFetch) -> bool:
        for part, sums in fetch.parts(planned):
            assert sums  # of a whole object
            member = _packed(planned, self._sink.size_bytes, part.headers, part.checksum, sums)
            row, log = _member_row(planned, member), is_log(planned, part.body)
            if not self._fits(planned, member, row, log=log):
                return False
            _require_whole(planned, memoryview(part.body).nbytes)
            self._sink.write(part.body)
            self._finish(planned, member, row, log=log)
        return True

    def _add_in_pieces(
        self, planned: PlannedObject, fetch: OrderedFetch, mark: Mark, opened: OpenObject | None
    ) -> bool:
        """`opened` is resumed."""
        checks, log = None, False
        if opened:
            checks = self._resume_member(planned, fetch, opened)
            log = self._is_staged_log(planned, mark.offset, self._sink.size_bytes)
        for part, _ in fetch.parts(planned):
            if not checks:
                checks = _checks_of(planned, fetch)
                member = _packed(planned, mark.offset, part.headers, checks.s3)
                row, log = _member_row(planned, member), is_log(planned, part.body)
                if not self._fits(planned, member, row, log=log):
                    return False
                opened = OpenObject(mark, checks.sha256, member.headers)
                self._checkpoints.begin_member(opened)
            checks.update(part.body)
            self._sink.write(part.body)
            if self._sink.size_bytes < mark.offset + planned.size_bytes:
                self._checkpoints.reached()
                size_bytes = memoryview(part.body).nbytes
                self._reported_bytes += size_bytes
                # This also pauses in the middle of a large object.
                self._progress(0, size_bytes, size_bytes)
        assert opened
        assert checks
        sums = self._compared(planned, checks, mark)
        _require_whole(planned, self._sink.size_bytes - mark.offset)
        member = _packed(planned, mark.offset, opened.headers, checks.s3, sums)
        self._finish(planned, member, _member_row(planned, member), log=log)
        return True

    def _finish(
        self, planned: PlannedObject, member: PackedMember, row: dict[str, Any], *, log: bool
    ) -> None:
        self._count_member(planned, member, row, log=log)
        self._checkpoints.done(planned, member)
        new_bytes = planned.size_bytes - self._reported_bytes
        self._progress(1, new_bytes, new_bytes)

    def _resume_member(
        self, planned: PlannedObject, fetch: OrderedFetch, opened: OpenObject
    ) -> "_MemberChecks":
        checks = _checks_of(planned, fetch, opened.sha256)
        for start_byte in range(opened.mark.offset, self._sink.size_bytes, _COPY_BYTES):
            end_byte = min(start_byte + _COPY_BYTES, self._sink.size_bytes)
            checks.update_crcs(self._sink.read_staged(start_byte, end_byte))
        self._checkpoints.begin_member(opened)
        self._reported_bytes = self._sink.size_bytes - opened.mark.offset
        self._progress(0, self._reported_bytes, 0)
        return checks

    def _compared(self, planned: PlannedObject, checks: "_MemberChecks", mark: Mark) -> BodySums:
        try:
            return checks.compared(planned)
        except ObjectReadFailed:  # nothing of the object may be resumed
            self._checkpoints.roll_back(mark)
            self._checkpoints.rolled_back()
            raise

    def _count_member(
        self, planned: PlannedObject, member: PackedMember, row: dict[str, Any], *, log: bool
    ) -> None:
        start_byte, end_byte = member.start_byte, member.end_byte
        self._index.add(planned.member, start_byte, end_byte)
        self._manifest.add(row)
        self._member_count += 1
        self._member_bytes += planned.size_bytes
        if log:
            add_log_times(self._manifest, start_byte, end_byte, self._sink.read_staged)

    def _count_skip(self, planned: PlannedObject, reason: SkipReason, detail: str) -> None:
        self._manifest.add(
            _described(planned) | {"skip_reason": str(reason), "skip_detail": detail}
        )
        self._skipped_count += 1

    def _fits(
        self, planned: PlannedObject, member: PackedMember, row: dict[str, Any], *, log: bool
    ) -> bool:
        end_byte = member.end_byte
        manifest_bytes = (
            self._manifest.bound_bytes + self._manifest.row_bound(row) + (LOG_BYTES if log else 0)
        )
        if (
            end_byte + manifest_bytes + self._index.index_size_bytes + _TWO_ENTRIES_BYTES
            <= self._limit_bytes
        ):
            return True
        index = self._index.size_with(planned.member, member.start_byte, end_byte)
        # The size of the manifest's entry depends on where the manifest would end.
        empty = IndexBuilder()
        last = empty.size_with(self._chunk.manifest_member, end_byte, end_byte + manifest_bytes)
        entry_bytes = last - empty.index_size_bytes + 1
        return (
            end_byte + manifest_bytes + index + entry_bytes + FOOTER_SIZE_BYTES <= self._limit_bytes
        )

    def _is_staged_log(self, planned: PlannedObject, start_byte: int, end_byte: int) -> bool:
        end_byte = min(start_byte + HEAD_BYTES, end_byte)
        return is_log(planned, self._sink.read_staged(start_byte, end_byte))

    # --- manifest and index -----------------------------------------------------------------------

    def _add_tail(self, file: SealedSpool, path: Path) -> bytes:
        tail = hashlib.sha256()
        with staging_errors(path):
            self._manifest.close()
            start_byte = self._sink.size_bytes
            for piece in file.pieces(_COPY_BYTES):
                tail.update(piece)
                self._sink.write(piece)
        self._index.add(self._chunk.manifest_member, start_byte, self._sink.size_bytes)
        for piece in chain(self._index.iter_index(), [self._index.footer()]):
            tail.update(piece)
            self._sink.write(piece)
        return tail.digest()


class _MemberChecks:
    def __init__(
        self, s3: Checksum | None, *, compare: bool, sha256: RunningHash | None = None
    ) -> None:
        self.s3 = s3
        self.sha256 = sha256 or hashlib.sha256()
        self._crc64nvme = new_crc64nvme()
        self._digest: Digest | None = new_digest(s3.algorithm) if s3 and compare else None

    def update(self, body: Buffer) -> None:
        self.sha256.update(body)
        self.update_crcs(body)

    def update_crcs(self, body: Buffer) -> None:
        self._crc64nvme.update(body)
        if self._digest:
            self._digest.update(body)

    def compared(self, planned: PlannedObject) -> BodySums:
        if self.s3 and self._digest and self._digest.digest() != self.s3.digest:
            raise checksum_differs(planned.object, self.s3.algorithm)
        return BodySums(self.sha256.digest(), self._crc64nvme.digest())


def _checks_of(
    planned: PlannedObject, fetch: OrderedFetch, sha256: RunningHash | None = None
) -> _MemberChecks:
    return _MemberChecks(
        fetch.s3_checksum(planned), compare=fetch.is_comparable(planned), sha256=sha256
    )


def _require_whole(planned: PlannedObject, received_bytes: int) -> None:
    if received_bytes != planned.size_bytes:
        raise ObjectReadFailed(
            f"{planned.object.key!r} returned {received_bytes} bytes instead of "
            f"{planned.size_bytes}"
        )


def _packed(
    planned: PlannedObject,
    start_byte: int,
    headers: ObjectHeaders | None,
    s3: Checksum | None,
    sums: BodySums | None = None,
) -> PackedMember:
    return PackedMember(
        start_byte,
        start_byte + planned.size_bytes,
        *(sums or (b"", b"")),
        s3.text if s3 else None,
        None if headers == _NO_HEADERS else headers,
    )


def _described(planned: PlannedObject) -> dict[str, Any]:
    obj = planned.object
    return {
        "key": obj.key.decode(),
        "version_id": obj.version_id,
        "etag": obj.etag,
        "size_bytes": obj.size_bytes,
        "last_modified": obj.last_modified,
        "storage_class": obj.storage_class,
        "rewritten_at": obj.rewritten_at,
        **(dict(zip(PART_COLUMNS, astuple(planned.part), strict=True)) if planned.part else {}),
    }


def _member_row(planned: PlannedObject, member: PackedMember) -> dict[str, Any]:
    headers = member.headers or _NO_HEADERS
    return _described(planned) | {
        "member": planned.member,
        "start_byte": member.start_byte,
        "end_byte": member.end_byte,
        "sha256": member.sha256,
        "crc64nvme": member.crc64nvme,
        "s3_checksum": member.s3_checksum,
        "content_type": headers.content_type or None,
        "content_encoding": headers.content_encoding or None,
        "content_language": headers.content_language or None,
        "content_disposition": headers.content_disposition or None,
        "cache_control": headers.cache_control or None,
        "expires": headers.expires or None,
        "user_metadata": dict(headers.user_metadata),
    }


def remove_staged(*paths: Path) -> None:
    """Remove the files that exist. Journals, which may hold a file key, are overwritten first."""
    for path in paths:
        try:
            if path.suffix == ".journal":
                overwrite(path)
        finally:
            path.unlink(missing_ok=True)
