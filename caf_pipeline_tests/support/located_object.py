"""Locations of one object in a random chunk: whole, or split into parts."""

import hashlib
import os
from itertools import pairwise

from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.ledger.records import LocatedRange, Location
from caf_pipeline_tests.support.plans import MOMENT

CHUNK = os.urandom(4 << 20)
START, END = 1000, 4_100_000
BODY = CHUNK[START:END]


def whole(posting, body=BODY):
    sha256 = hashlib.sha256(body).digest()
    return Location(
        LocationRow("a/key", "v1", "v1", START, END, "etag", MOMENT, sha256), "src-1-1", posting
    )


def in_parts(posting, *cuts):
    """Return the same bytes as parts, all in one chunk."""
    edges = [START, *cuts, END]
    parts = [
        LocatedRange(
            first, last, hashlib.sha256(CHUNK[first:last]).digest(), f"src-1-{number}", posting
        )
        for number, (first, last) in enumerate(pairwise(edges), 1)
    ]
    return Location(
        LocationRow("a/key", "v1", "v1", 0, END - START, "etag", MOMENT, b""),
        "src-1-1",
        posting,
        None,
        parts,
    )
