"""The states of a chunk and the legal moves between them; nothing else knows which move is legal.

    the flow     planned ─▶ packing ─▶ sealed ─▶ posting ─▶ posted ─▶ uploading ─▶ verified ─▶ located
    back         sealed ─▶ packing    posting ─▶ sealed    verified ─▶ uploading    damaged ─▶ located
    an end       packing ─▶ empty     planned, packing, sealed, damaged, parked ─▶ withdrawn
                 posted, uploading, parked ─▶ abandoned    located, damaged ─▶ expired
    found later  located ─▶ damaged

Any state in which work is under way may also move to `parked` (the pipeline gave up; an operator's turn) and back.

Source: "A chunk" in docs/design.md.
"""

from enum import StrEnum
from typing import Final

from caf_pipeline.errors import IllegalMove


class ChunkState(StrEnum):
    """How far a chunk is. The values are what the ledger stores."""

    PLANNED = "planned"
    PACKING = "packing"
    SEALED = "sealed"
    POSTING = "posting"
    POSTED = "posted"
    UPLOADING = "uploading"
    VERIFIED = "verified"
    LOCATED = "located"
    EMPTY = "empty"
    PARKED = "parked"
    WITHDRAWN = "withdrawn"
    ABANDONED = "abandoned"
    DAMAGED = "damaged"
    EXPIRED = "expired"


_S = ChunkState

UNDER_WAY: Final = (_S.PLANNED, _S.PACKING, _S.SEALED, _S.POSTING, _S.POSTED, _S.UPLOADING, _S.VERIFIED)
"""States in flow order in which a run has work to do."""

CLAIMING: Final = frozenset({*UNDER_WAY, _S.PARKED})
"""States whose objects are claimed: no other plan may take them."""

MAY_BE_PENDING: Final = CLAIMING - {_S.PLANNED, _S.PACKING}
"""States of chunks whose rows a seal may have written, and none has located."""

NOT_POSTED: Final = (_S.PLANNED, _S.PACKING, _S.SEALED, _S.POSTING)
"""States in flow order in which the chain is not known to have a post of the chunk.

While a chunk is `posting` it may have one.
"""

BEGUN_NOT_POSTED: Final = NOT_POSTED[1:]
"""Of these, the states of chunks that a run has begun: the store must have room for them now."""

MAY_BE_POSTED: Final = frozenset({_S.POSTING, _S.DAMAGED})
"""States in which a post of the chunk may be asked for; a damaged chunk's, where the chain no longer has the first."""

IN_GOOD_STANDING: Final = frozenset({_S.LOCATED, _S.DAMAGED})
"""States whose locations count as archived. A damaged chunk is repaired, not planned again, until it is withdrawn."""

EVER_LOCATED: Final = frozenset({_S.LOCATED, _S.DAMAGED, _S.EXPIRED, _S.WITHDRAWN})
"""States in which a chunk may have location rows; those of an expired or withdrawn one are history that no look-up finds."""

_LEGAL: Final[dict[ChunkState, frozenset[ChunkState]]] = {
    # A move to itself is a step begun again after a crash: it is written so that the epoch is checked.
    _S.PLANNED: frozenset({_S.PACKING, _S.WITHDRAWN, _S.PARKED}),
    _S.PACKING: frozenset({_S.PACKING, _S.SEALED, _S.EMPTY, _S.WITHDRAWN, _S.PARKED}),
    # Back to packing: what was sealed is gone from staging before anything was posted.
    _S.SEALED: frozenset({_S.PACKING, _S.POSTING, _S.WITHDRAWN, _S.PARKED}),
    # Back to sealed: the post is known never to have happened.
    _S.POSTING: frozenset({_S.POSTING, _S.POSTED, _S.SEALED, _S.PARKED}),
    _S.POSTED: frozenset({_S.UPLOADING, _S.ABANDONED, _S.PARKED}),
    _S.UPLOADING: frozenset({_S.UPLOADING, _S.VERIFIED, _S.ABANDONED, _S.PARKED}),
    _S.VERIFIED: frozenset({_S.LOCATED, _S.UPLOADING, _S.PARKED}),
    _S.LOCATED: frozenset({_S.DAMAGED, _S.EXPIRED}),
    _S.DAMAGED: frozenset({_S.LOCATED, _S.EXPIRED, _S.WITHDRAWN}),
    _S.PARKED: frozenset({*UNDER_WAY, _S.WITHDRAWN, _S.ABANDONED}),
    _S.EMPTY: frozenset(),
    _S.WITHDRAWN: frozenset(),
    _S.ABANDONED: frozenset(),
    _S.EXPIRED: frozenset(),
}


def may_move(before: ChunkState, after: ChunkState) -> bool:
    """Tell whether a chunk in state `before` may be moved to `after`."""
    return after in _LEGAL[before]


def require_move(chunk: str, before: ChunkState, after: ChunkState) -> None:
    """Raise IllegalMove, naming `chunk`, unless `before` → `after` is legal."""
    if not may_move(before, after):
        raise IllegalMove(f"chunk {chunk} is '{before}' and cannot become '{after}'", hint=_what_is_left(before, after))


def _what_is_left(before: ChunkState, after: ChunkState) -> str:
    """Return what the user can do where `before` → `after` is not legal."""
    if not _LEGAL[before]:
        return "nothing more happens to this chunk"
    if before in UNDER_WAY and after is _S.WITHDRAWN:
        return "it is posted, or may be: 'caf run' goes on with it and finds out"
    return "'caf status' shows how far it is"


def has_reached(state: ChunkState, milestone: ChunkState) -> bool:
    """Tell whether a chunk in `state` is at `milestone` (a state under way) or further along the flow.

    Located, damaged and expired chunks have passed every milestone; empty, withdrawn, abandoned and parked ones none.
    """
    if state in (_S.LOCATED, _S.DAMAGED, _S.EXPIRED):
        return True
    return state in UNDER_WAY and UNDER_WAY.index(state) >= UNDER_WAY.index(milestone)
