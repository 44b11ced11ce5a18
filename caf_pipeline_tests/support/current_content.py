"""Look-ups of current content, and objects of different seconds, for tests of several folders."""

import time

from caf_pipeline.retrieval.reader import fetch

A, B = b"first content", b"second content, longer"


def next_second() -> None:
    """Wait, so that later objects have another LastModified, which has whole seconds."""
    time.sleep(1.01 - time.time() % 1)


def current(context, key="k"):
    """Return the bytes of a look-up, and its currency."""
    reader = fetch(context.ledger.lookup, context.store, "src", key)
    return b"".join(reader.pieces), reader.location.currency


def packed(context):
    """Return the number of objects in all chunks."""
    return sum(chunk.member_count for chunk in context.ledger.chunks.list("src"))
