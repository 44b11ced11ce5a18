"""Archived objects as objects of a bucket, with their headers and user metadata.

What writes them there is `source.protocol.ObjectTarget`.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

from caf_pipeline.errors import IntegrityError, StoreError
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.ledger.protocol import LocationLookups
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.bulk import ObjectRead, is_small, read_located
from caf_pipeline.retrieval.holders import holders_of
from caf_pipeline.retrieval.object_file import IN_MEMORY_BYTES
from caf_pipeline.retrieval.reader import Found
from caf_pipeline.retrieval.restore import RestoredObject, RestoreOutcome
from caf_pipeline.retrieval.side_by_side import side_by_side
from caf_pipeline.source.protocol import ExistingObject, KeyTaken, ObjectTarget
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.files_below import NotRestored

OBJECTS_AT_ONCE: Final = 2_000
"""Objects whose headers are read at once."""

_Prepared = tuple[Location, ObjectHeaders | None, bool, ObjectRead | None]
"""An object, its headers (None: not known, as of an adopted file), whether it may be there already,
and its bytes if they were read.
"""


class RestoreBucket:
    """A `RestoreTarget`: each object appears when its bytes were compared, both here and by S3."""

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

    def restore(self, listed: Iterable[Location]) -> Iterator[RestoredObject]:
        """See `RestoreTarget.restore`."""
        yield from side_by_side(self._prepared(listed), self._restore, drains=True)

    def _prepared(self, listed: Iterable[Location]) -> Iterator[_Prepared]:
        """Yield each object with what is known of it, in any order.

        Headers are read for many objects at once, one listing tells of many that they are not
        there, and of these the small ones are read by few requests.
        """
        locations = iter(listed)
        while some := list(islice(locations, OBJECTS_AT_ONCE)):
            headers = self._lookup.header_sets(
                {one.row.header_set for one in some if one.row.header_set}
            )
            first = some[0].row.key
            there = self._bucket.keys_between(first, some[-1].row.key)
            new = list[tuple[Location, ObjectHeaders | None]]()
            for one in some:
                key, own = one.row.key, headers.get(one.row.header_set or b"")
                may_be_there = there is None or key == first or key in there
                if is_small(one) and not may_be_there and not self._dry_run:
                    new.append((one, own))
                else:
                    yield one, own, may_be_there, None
            for read in read_located(self._store, (one for one, _ in new)):
                yield *new[read.number], False, read

    def _restore(self, given: _Prepared) -> RestoredObject:
        one, headers, may_be_there, read = given
        try:
            place = self._bucket.place(one.row.key)
            outcome = self._outcome(one, headers, may_be_there, read)
            return RestoredObject(one, outcome, place, headers_known=headers is not None)
        except (NotRestored, StoreError, IntegrityError) as error:
            return RestoredObject(one, RestoreOutcome.FAILED, error=error)

    def _outcome(
        self,
        one: Location,
        headers: ObjectHeaders | None,
        may_be_there: bool,
        read: ObjectRead | None,
    ) -> RestoreOutcome:
        """Write an object that is not there; where another is written meanwhile, look again."""
        for look in (may_be_there, True):
            there = self._bucket.find(one.row.key) if look else None
            if there and self._is_equal(one, headers, there):
                return RestoreOutcome.EQUAL
            if there and not self._force:
                return RestoreOutcome.DIFFERENT
            if self._dry_run:
                return RestoreOutcome.RESTORED
            try:
                checked = self._write(
                    one, headers or ObjectHeaders(), read, replace=there is not None
                )
            except KeyTaken:
                continue
            if not checked:  # a server that knows no SHA-256
                self._compare(one, headers)
            return RestoreOutcome.RESTORED
        raise NotRestored(
            f"{self._bucket.place(one.row.key)} was not written: others write it, too"
        )

    def _is_equal(
        self, one: Location, headers: ObjectHeaders | None, there: ExistingObject
    ) -> bool:
        """Compare size and headers, if known, and then the bytes: by S3's SHA-256 of all of them,
        else they are read.
        """
        headers = headers or there.headers
        expected = (
            headers
            if headers.content_type
            else replace(headers, content_type=there.headers.content_type)
        )
        if there.size_bytes not in (one.size_bytes, None) or there.headers != expected:
            return False
        if there.sha256 and there.sha256 == one.row.sha256:
            return True
        pieces, rest = self._bucket.read(one.row.key, there), b""
        for each in one.ranges:
            digest, left = hashlib.sha256(), each.end_byte - each.start_byte
            while left and (piece := rest or next(pieces, b"")):
                digest.update(piece[:left])
                left, rest = left - len(piece[:left]), piece[left:]
            if digest.digest() != each.sha256:
                return False
        return there.size_bytes is not None or not (rest or next(pieces, b""))

    def _write(
        self, one: Location, headers: ObjectHeaders, read: ObjectRead | None, *, replace: bool
    ) -> bool:
        """Write an object; tell whether the bucket compared it. Raises KeyTaken."""
        key = one.row.key
        if one.size_bytes <= IN_MEMORY_BYTES:
            body = read.body if read else Found(one, self._store).open().read()
            sha256 = hashlib.sha256(body).digest() if one.parts else one.row.sha256
            return self._bucket.put(key, body, sha256, headers, replace=replace)
        upload = self._bucket.upload(key, one.size_bytes, headers)
        try:
            for each in holders_of(one, self._store):
                each.copy(upload.write, partial(upload.rewind, upload.mark()))
            return upload.complete(replace=replace)
        except BaseException:
            upload.abort()
            raise

    def _compare(self, one: Location, headers: ObjectHeaders | None) -> None:
        there = self._bucket.find(one.row.key)
        if not there or not self._is_equal(one, headers, there):
            raise IntegrityError(
                f"{self._bucket.place(one.row.key)} is not what was sent",
                hint="look at the server: it does not check SHA-256",
            )
