"""The states of a chunk and of its copy, and the legal moves between them; nothing else knows which
move is legal.

`ChunkState` is one word for both: how far a chunk is on its way into the store.

    the flow     planned ─▶ packing ─▶ sealed ─▶ posting ─▶ posted ─▶ uploading ─▶ verified ─▶
    located back         sealed ─▶ packing    verified ─▶ uploading    damaged ─▶ located an end
    packing ─▶ empty     planned, packing, sealed, damaged, parked ─▶ withdrawn
                 posted, uploading, parked ─▶ abandoned    located, damaged ─▶ expired
    found later  located ─▶ damaged

Any state in which work is under way may also move to `parked` (the pipeline gave up; an operator's
turn) and back. A parked chunk's copy stays as it is: what the copy is decides where the chunk may
go from there.

The ledger stores a chunk's state and a copy's state. From `posting` to `verified` the chunk is
`sealed`; a damaged or expired chunk is `located`. Once a copy is past `wanted`, its chunk never
returns to `packing`, and is withdrawn only if the copy is damaged.

Source: "A chunk" in docs/explanation/design.md.
"""

from enum import StrEnum
from typing import Final

from caf_pipeline.errors import IllegalMove


class ChunkState(StrEnum):
    """How far a chunk and its copy are: the column `state` of the ledger's view `chunks`."""

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


class CopyState(StrEnum):
    """How far a chunk's copy in a store is. The values are what the ledger stores."""

    WANTED = "wanted"
    POSTING = "posting"
    POSTED = "posted"
    UPLOADING = "uploading"
    VERIFIED = "verified"
    DAMAGED = "damaged"
    EXPIRED = "expired"
    RETIRED = "retired"


_S = ChunkState
_C = CopyState

UNDER_WAY: Final = (
    _S.PLANNED,
    _S.PACKING,
    _S.SEALED,
    _S.POSTING,
    _S.POSTED,
    _S.UPLOADING,
    _S.VERIFIED,
)
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
"""States in which a post of the chunk may be asked for; a damaged chunk's, where the chain no
longer has the first.
"""

IN_GOOD_STANDING: Final = frozenset({_S.LOCATED, _S.DAMAGED})
"""States whose locations count as archived.

A damaged chunk is repaired, not planned again, until it is withdrawn.
"""

GOOD: Final = sorted(IN_GOOD_STANDING)
"""IN_GOOD_STANDING as a list, which psycopg sends as an array."""

EVER_LOCATED: Final = frozenset({_S.LOCATED, _S.DAMAGED, _S.EXPIRED, _S.WITHDRAWN})
"""States in which a chunk may have location rows; those of an expired or withdrawn one are history
that no look-up finds.
"""

COPY_STATES: Final = {
    _S.SEALED: _C.WANTED,
    _S.POSTING: _C.POSTING,
    _S.POSTED: _C.POSTED,
    _S.UPLOADING: _C.UPLOADING,
    _S.VERIFIED: _C.VERIFIED,
    _S.LOCATED: _C.VERIFIED,
    _S.DAMAGED: _C.DAMAGED,
    _S.EXPIRED: _C.EXPIRED,
}
"""The state of the copy that each of these says; with the others, but `parked`, a chunk under way
has no copy.
"""

_LEGAL: Final[dict[ChunkState, frozenset[ChunkState]]] = {
    # A move to itself is a step begun again after a crash: it is written so that the epoch is
    # checked.
    _S.PLANNED: frozenset({_S.PACKING, _S.WITHDRAWN, _S.PARKED}),
    _S.PACKING: frozenset({_S.PACKING, _S.SEALED, _S.EMPTY, _S.WITHDRAWN, _S.PARKED}),
    # Back to packing: what was sealed is gone from staging before anything was posted.
    _S.SEALED: frozenset({_S.PACKING, _S.POSTING, _S.WITHDRAWN, _S.PARKED}),
    _S.POSTING: frozenset({_S.POSTING, _S.POSTED, _S.PARKED}),
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
        raise IllegalMove(
            f"chunk {chunk} is '{before}' and cannot become '{after}'",
            hint=_what_is_left(before, after),
        )


def stored_state(state: ChunkState) -> ChunkState:
    """Return what the ledger stores of a chunk in `state`, beside the state of its copy."""
    if state in (_S.POSTING, _S.POSTED, _S.UPLOADING, _S.VERIFIED):
        return _S.SEALED
    return _S.LOCATED if state in (_S.DAMAGED, _S.EXPIRED) else state


def copy_after(
    chunk: str, before: ChunkState, after: ChunkState, copy: CopyState | None
) -> CopyState | None:
    """Return what becomes of a chunk's copy by the legal move `before` → `after`; None: there is
    none, or it is removed.

    Raises: IllegalMove: the copy is not what `before` says, or the move would claim more of it than
        is so, or forget it.
    """
    if before is not _S.PARKED and copy is not COPY_STATES.get(before):
        raise IllegalMove(f"chunk {chunk} is '{before}', but its copy is '{copy or 'missing'}'")
    if after is _S.PARKED:
        return copy
    if after is _S.WITHDRAWN and copy in (None, _C.WANTED):
        return None
    if (after is _S.WITHDRAWN and copy is _C.DAMAGED) or (
        after is _S.ABANDONED and copy in (_C.POSTED, _C.UPLOADING)
    ):
        return _C.RETIRED
    if after in (_S.WITHDRAWN, _S.ABANDONED):
        raise IllegalMove(
            f"chunk {chunk} is '{before}', its copy is '{copy or 'missing'}', and it cannot become "
            f"'{after}'",
            hint=f"'caf unpark {chunk}', then let 'caf run' go on with it",
        )
    # A chunk that was parked after its copies were verified is uploaded and verified again.
    if (
        before is _S.PARKED
        and copy is not COPY_STATES.get(after)
        and (copy, after) != (_C.VERIFIED, _S.UPLOADING)
    ):
        raise IllegalMove(
            f"chunk {chunk} is parked, its copy is '{copy or 'missing'}', and it cannot become "
            f"'{after}'"
        )
    return COPY_STATES.get(after)


def unparked_state(copy: CopyState | None) -> ChunkState:
    """Return the state from which runs go on with a parked chunk whose copy is in `copy`."""
    if copy is None:
        return _S.PLANNED
    return (
        _S.UPLOADING
        if copy is _C.VERIFIED
        else next(state for state in UNDER_WAY if COPY_STATES.get(state) is copy)
    )


def _what_is_left(before: ChunkState, after: ChunkState) -> str:
    """Return what the user can do where `before` → `after` is not legal."""
    if not _LEGAL[before]:
        return "nothing more happens to this chunk"
    if before in UNDER_WAY and after is _S.WITHDRAWN:
        return "it is posted, or may be: 'caf run' goes on with it and finds out"
    return "'caf status' shows how far it is"


def has_reached(state: ChunkState, milestone: ChunkState) -> bool:
    """Tell whether a chunk in `state` is at `milestone` (a state under way) or further along the
    flow.

    Located, damaged and expired chunks have passed every milestone; empty, withdrawn, abandoned and
    parked ones none.
    """
    if state in (_S.LOCATED, _S.DAMAGED, _S.EXPIRED):
        return True
    return state in UNDER_WAY and UNDER_WAY.index(state) >= UNDER_WAY.index(milestone)
