"""Reads archived objects back and verifies them, without keeping anything."""

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from caf_pipeline.encryption.opening_reader import OpeningReader
from caf_pipeline.errors import (
    ArchiveError,
    CafError,
    IdentityMissing,
    IntegrityError,
    KeyRefused,
    StoreError,
)
from caf_pipeline.ledger.records import Location
from caf_pipeline.records import PostRecord
from caf_pipeline.retrieval.bulk import in_order, is_small, read_located
from caf_pipeline.retrieval.reader import ArchivedObject
from caf_pipeline.retrieval.side_by_side import side_by_side
from caf_pipeline.store.protocol import ChunkReader

UNREAD_IN_A_ROW: Final = 50
"""Consecutive transient failures that mean that the network is down."""

BATCH_OBJECTS: Final = 10_000
"""Objects listed before the first is read: neighbours share requests."""


@dataclass(frozen=True, slots=True)
class CheckedObject:
    """The result for an object. A transient `error` does not mean that its bytes are wrong."""

    location: Location
    error: CafError | None = None
    failed: Mapping[str, CafError] = field(default_factory=dict)


class FailuresInARow:
    """Ends a loop over results after `UNREAD_IN_A_ROW` consecutive transient failures."""

    def __init__(self, hint: str = "") -> None:
        """`hint` follows the last error's own."""
        self._count = 0
        self._hint = hint

    def add(self, error: CafError | None) -> None:
        """Count a result. Raises an error of the same class when there are too many failures."""
        self._count = self._count + 1 if error and not error.permanent else 0
        if error and self._count == UNREAD_IN_A_ROW:
            raise type(error)(
                f"{self._count} objects in a row could not be read; the last: {error}",
                hint="; ".join(filter(None, (error.hint, self._hint))),
            ) from error


def check_objects(locations: Iterable[Location], store: ChunkReader) -> Iterator[CheckedObject]:
    """Verify each object, and yield the results in order.

    Memory: `BATCH_OBJECTS` locations, 16 requests of 8 MiB, and a piece of each larger object.
    Raises an error like the last after `UNREAD_IN_A_ROW` transient failures.
    """

    def check_large(location: Location) -> CheckedObject:
        try:
            return CheckedObject(location, failed=ArchivedObject(location, store).compare())
        except (StoreError, IntegrityError) as error:
            return CheckedObject(location, error)

    remaining, failures = iter(locations), FailuresInARow()
    while batch := list(islice(remaining, BATCH_OBJECTS)):
        # The verified bytes are dropped while a result waits for its turn.
        large = (location for location in batch if not is_small(location))
        with (
            closing(read_located(store, filter(is_small, batch))) as small_reads,
            closing(side_by_side(large, check_large)) as large_checks,
        ):
            reads = in_order(replace(read, content=b"") for read in small_reads)
            for location in batch:
                if is_small(location):
                    read = next(reads)
                    checked = CheckedObject(location, read.error, read.failed)
                else:
                    checked = next(large_checks)
                yield checked
                failures.add(checked.error)


class Openable:
    """The objects whose chunks this process can open. The others are counted."""

    def __init__(self, locations: Iterable[Location], reader: OpeningReader) -> None:
        self.closed_count = 0
        self.reason = ""
        self._locations = locations
        self._reader = reader
        self._closed: set[bytes] = set()

    def __iter__(self) -> Iterator[Location]:
        for location in self._locations:
            if all(self._opens(part.posting) for part in location.ranges):
                yield location
            else:
                self.closed_count += 1

    def _opens(self, posting: PostRecord) -> bool:
        if posting.merkle_root in self._closed:
            return False
        try:
            self._reader.open(posting)
        except (IdentityMissing, KeyRefused, ArchiveError) as error:
            self._closed.add(posting.merkle_root)
            self.reason = str(error)
            return False
        return True


def sampled(
    locations: Iterable[Location], share: float, seed: int | None = None
) -> Iterator[Location]:
    """Yield each object with a probability of `share`, but at least one."""
    dice = random.Random(seed)
    substitute, seen_count, is_empty = None, 0, True
    for location in locations:
        if dice.random() < share:
            is_empty = False
            yield location
        elif is_empty:
            seen_count += 1
            substitute = location if dice.randrange(seen_count) == 0 else substitute
    if substitute is not None and is_empty:
        yield substitute
