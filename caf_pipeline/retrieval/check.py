"""Reads archived objects back and compares their SHA-256; nothing is kept, and nothing is written.

A whole chunk is compared with its Merkle root by `maintenance.full_read`; this is what whoever
reads an object meets.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Final

from caf_pipeline.errors import CafError, IntegrityError, StoreError, StoreUnreachable
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.bulk import in_order, is_small, read_located
from caf_pipeline.retrieval.reader import Found
from caf_pipeline.retrieval.side_by_side import side_by_side
from caf_pipeline.store.protocol import ChunkReader

UNREAD_IN_A_ROW: Final = 50
"""After so many objects that no provider could give, the network is away: to ask for a million more
would tell nothing.
"""

BATCH_OBJECTS: Final = 10_000
"""Objects that are listed before any of them is read, so that those that lie close together are
read at once.
"""


@dataclass(frozen=True, slots=True)
class CheckedObject:
    """What reading an object back found.

    Attributes: location: which. error: why it is not given out right; None where it is. A transient
        one says nothing of its bytes. failed: what is wrong with providers that others stood in
        for.
    """

    location: Location
    error: CafError | None = None
    failed: Mapping[str, CafError] = field(default_factory=dict)


def check_objects(locations: Iterable[Location], store: ChunkReader) -> Iterator[CheckedObject]:
    """Read each object whole, and yield what was found, in order; small ones that lie close
    together by one request.

    Memory: what `BATCH_OBJECTS` locations take, and what is read at once: 16 requests of 8 MiB, a
    piece of each larger object.

    Raises:
        StoreUnreachable: `UNREAD_IN_A_ROW` objects one after the other could not be read.
    """
    unread = 0
    for checked in _checked(iter(locations), store):
        yield checked
        unread = unread + 1 if checked.error is not None and not checked.error.permanent else 0
        if unread == UNREAD_IN_A_ROW:
            raise StoreUnreachable(
                f"{unread} objects in a row could not be read; the last: {checked.error}",
                hint="try again later",
            )


def _checked(locations: Iterator[Location], store: ChunkReader) -> Iterator[CheckedObject]:
    while batch := list(islice(locations, BATCH_OBJECTS)):
        # What was read and compared is not held until its turn comes.
        small = in_order(
            replace(read, given=b"") for read in read_located(store, filter(is_small, batch))
        )
        large = side_by_side((one for one in batch if not is_small(one)), partial(_check, store))
        for one in batch:
            if is_small(one):
                read = next(small)
                yield CheckedObject(one, read.error, read.failed)
            else:
                yield next(large)


def _check(store: ChunkReader, location: Location) -> CheckedObject:
    try:
        return CheckedObject(location, failed=Found(location, store).compare())
    except (StoreError, IntegrityError) as error:
        return CheckedObject(location, error)


def sampled(
    locations: Iterable[Location], share: float, seed: int | None = None
) -> Iterator[Location]:
    """Yield each object with a probability, by another choice each time; one of all where none was
    chosen, if there is any.
    """
    dice = random.Random(seed)
    one, seen, chosen = None, 0, False
    for location in locations:
        if dice.random() < share:
            chosen = True
            yield location
        elif not chosen:
            seen += 1
            one = location if dice.randrange(seen) == 0 else one
    if one is not None and not chosen:
        yield one
