"""Reads archived objects back and compares their SHA-256, several at a time; nothing is kept, and nothing is written.

A whole chunk is compared with its Merkle root by `maintenance.full_read`; this is what whoever reads an object meets.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from caf_pipeline.errors import CafError, IntegrityError, StoreError, StoreUnreachable
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.reader import Found
from caf_pipeline.retrieval.side_by_side import side_by_side
from caf_pipeline.store.protocol import ChunkStore

UNREAD_IN_A_ROW: Final = 50
"""After so many objects that no provider could give, the network is away: to ask for a million more would tell nothing."""


@dataclass(frozen=True, slots=True)
class CheckedObject:
    """What reading an object back found.

    Attributes:
        location: which.
        error: why it is not given out right; None where it is. A transient one says nothing of its bytes.
        failed: what is wrong with providers that others stood in for.
    """

    location: Location
    error: CafError | None = None
    failed: Mapping[str, CafError] = field(default_factory=dict)


def check_objects(locations: Iterable[Location], store: ChunkStore) -> Iterator[CheckedObject]:
    """Read each object whole, and yield what was found, in order. Memory is bounded by a piece for each that is read at once.

    Raises:
        StoreUnreachable: `UNREAD_IN_A_ROW` objects one after the other could not be read.
    """
    unread = 0
    for checked in side_by_side(locations, partial(_check, store)):
        yield checked
        unread = unread + 1 if checked.error is not None and not checked.error.permanent else 0
        if unread == UNREAD_IN_A_ROW:
            raise StoreUnreachable(
                f"the last {unread} objects could not be read, the last one since {checked.error}", hint="try again later"
            )


def _check(store: ChunkStore, location: Location) -> CheckedObject:
    try:
        return CheckedObject(location, failed=Found(location, store).compare())
    except (StoreError, IntegrityError) as error:
        return CheckedObject(location, error)


def sampled(locations: Iterable[Location], share: float, seed: int | None = None) -> Iterator[Location]:
    """Yield each object with a probability, by another choice each time; one of all where none was chosen, if there is any."""
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
