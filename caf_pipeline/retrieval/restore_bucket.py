"""Restores archived objects to a bucket, with their headers and user metadata."""

import hashlib
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Final

from caf_pipeline.errors import IntegrityError, StoreError
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.ledger.records import Location, LocationLookups
from caf_pipeline.retrieval.bulk import ObjectRead, is_small, read_located
from caf_pipeline.retrieval.holders import holders_of
from caf_pipeline.retrieval.object_file import IN_MEMORY_BYTES
from caf_pipeline.retrieval.reader import ArchivedObject
from caf_pipeline.retrieval.restore import RestoredObject, RestoreOutcome
from caf_pipeline.retrieval.side_by_side import THREADS, side_by_side
from caf_pipeline.source.protocol import ExistingObject, KeyTaken, ObjectTarget
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.files_below import NotRestored

OBJECTS_AT_ONCE: Final = 2_000

WRITES: Final = 64
"""Objects written or compared concurrently, as many as the client has connections.

At a round trip of 30 ms, 8 took three times as long, and 32 took about as long.
"""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """`headers` is None if they are unknown."""

    location: Location
    headers: ObjectHeaders | None
    may_exist: bool
    read: ObjectRead | None = None


class RestoreBucket:
    """Writes to a bucket. Both this process and S3 verify each object."""

    def __init__(
        self,
        bucket: ObjectTarget,
        store: ChunkReader,
        lookup: LocationLookups,
        *,
        force: bool,
        dry_run: bool,
    ) -> None:
        self._bucket = bucket
        self._store = store
        self._lookup = lookup
        self._force = force
        self._dry_run = dry_run
        # Bodies that are read here may be large, and come from providers.
        self._few_at_once = threading.BoundedSemaphore(THREADS)
        self._is_over = False

    def restore(self, listed: Iterable[Location]) -> Iterator[RestoredObject]:
        def restore_one(candidate: _Candidate) -> RestoredObject:
            location, headers = candidate.location, candidate.headers
            try:
                place = self._bucket.place(location.row.key)
                outcome = self._outcome(candidate, place)
                return RestoredObject(location, outcome, place, headers_known=headers is not None)
            except (NotRestored, StoreError, IntegrityError) as error:
                return RestoredObject(location, RestoreOutcome.FAILED, error=error)

        try:
            with closing(self._candidates(listed)) as candidates:
                yield from side_by_side(candidates, restore_one, WRITES, drains=True)
        finally:
            # An interrupt must not be followed by the copies that wait for their turn.
            self._is_over = True

    def _candidates(self, listed: Iterable[Location]) -> Generator[_Candidate, None, None]:
        remaining = iter(listed)
        while page := list(islice(remaining, OBJECTS_AT_ONCE)):
            headers = self._lookup.header_sets(
                {location.row.header_set for location in page if location.row.header_set}
            )
            first = page[0].row.key
            existing = self._bucket.keys_between(first, page[-1].row.key)
            new = list[_Candidate]()
            for location in page:
                key = location.row.key
                may_exist = existing is None or key == first or key in existing
                candidate = _Candidate(
                    location, headers.get(location.row.header_set or b""), may_exist
                )
                if is_small(location) and not may_exist and not self._dry_run:
                    new.append(candidate)
                else:
                    yield candidate
            locations = (candidate.location for candidate in new)
            with closing(read_located(self._store, locations)) as reads:
                for read in reads:
                    yield replace(new[read.number], read=read)

    def _outcome(self, candidate: _Candidate, place: str) -> RestoreOutcome:
        """If another process writes the object first, compare with that."""
        location, headers = candidate.location, candidate.headers
        for looks in (candidate.may_exist, True):
            existing = self._bucket.find(location.row.key) if looks else None
            if existing and self._is_equal(location, headers, existing):
                return RestoreOutcome.EQUAL
            if existing and not self._force:
                return RestoreOutcome.DIFFERENT
            if self._dry_run:
                return RestoreOutcome.RESTORED
            try:
                is_verified = self._write(candidate, replaces=existing is not None)
            except KeyTaken:
                continue
            if not is_verified:  # the server does not check SHA-256
                written = self._bucket.find(location.row.key)
                if not written or not self._is_equal(location, headers, written):
                    raise IntegrityError(
                        f"{place} is not what was sent",
                        hint="check the server: it does not verify SHA-256",
                    )
            return RestoreOutcome.RESTORED
        raise NotRestored(f"{place} was not written: other processes write it, too")

    def _is_equal(
        self, location: Location, headers: ObjectHeaders | None, existing: ExistingObject
    ) -> bool:
        headers = headers or existing.headers
        if not headers.content_type:
            headers = replace(headers, content_type=existing.headers.content_type)
        if existing.size_bytes not in (location.size_bytes, None) or existing.headers != headers:
            return False
        if existing.sha256 and existing.sha256 == location.row.sha256:
            return True
        pieces, rest = self._bucket.read(location.row.key, existing), b""
        for part in location.ranges:
            digest, remaining = hashlib.sha256(), part.end_byte - part.start_byte
            while remaining and (piece := rest or next(pieces, b"")):
                digest.update(piece[:remaining])
                remaining, rest = remaining - len(piece[:remaining]), piece[remaining:]
            if digest.digest() != part.sha256:
                return False
        return existing.size_bytes is not None or not (rest or next(pieces, b""))

    def _write(self, candidate: _Candidate, *, replaces: bool) -> bool:
        """Return whether the bucket verified the object."""
        row, headers = candidate.location.row, candidate.headers or ObjectHeaders()
        if candidate.read:
            return self._bucket.put(
                row.key, candidate.read.body, row.sha256, headers, replace=replaces
            )
        with self._few_at_once:
            if self._is_over:
                raise NotRestored(f"{self._bucket.place(row.key)} was not written: interrupted")
            return self._copy(candidate.location, headers, replaces=replaces)

    def _copy(self, location: Location, headers: ObjectHeaders, *, replaces: bool) -> bool:
        key = location.row.key
        if location.size_bytes <= IN_MEMORY_BYTES:
            body = ArchivedObject(location, self._store).open().read()
            sha256 = hashlib.sha256(body).digest() if location.parts else location.row.sha256
            return self._bucket.put(key, body, sha256, headers, replace=replaces)
        upload = self._bucket.upload(key, location.size_bytes, headers)
        try:
            for part in holders_of(location, self._store):
                part.copy(upload.write, partial(upload.rewind, upload.mark()))
            return upload.complete(replace=replaces)
        except BaseException:
            upload.abort()
            raise
