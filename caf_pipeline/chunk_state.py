"""The states of a chunk and of its copy, and the legal moves between them.

    forward   planned ─▶ packing ─▶ sealed ─▶ posting ─▶ posted ─▶ uploading ─▶ verified ─▶ located
    back      sealed ─▶ packing    verified ─▶ uploading    damaged ─▶ located
    end       packing ─▶ empty     planned, packing, sealed, posting, damaged, parked ─▶ withdrawn
              posting, posted, uploading, parked ─▶ abandoned
              located, damaged ─▶ expired
    later     located ─▶ damaged

A chunk may also move to `parked` from every state in which a run has work to do, and back. The
pipeline has given up on a parked chunk, and waits for an operator. Its copy keeps its state, which
decides where the chunk may continue.

The ledger stores two states: the chunk's and the copy's. `ChunkState` combines them. From `posting`
to `verified` the stored chunk is `sealed`; if it is damaged or expired, the stored chunk is
`located`. Once the copy is past `wanted`, the chunk never returns to `packing`. Once it is past
`posting`, the chunk can be withdrawn only if the copy is damaged.

A copy in `posting` is an intention: a run wants to post it, and may have done so. Such a chunk is
withdrawn only after the store was asked.

Source: "A chunk" in docs/explanation/design.md.
"""

from enum import StrEnum
from typing import Final

from caf_pipeline.errors import IllegalMove


class ChunkState(StrEnum):
    """Progress of a chunk and its copy: the column `state` of the ledger's view `chunks`."""

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
    """Progress of a chunk's copy in a store. The values are stored in the ledger."""

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
"""States in which a run has work to do, in order."""

CLAIMING: Final = frozenset({*UNDER_WAY, _S.PARKED})
"""States in which a chunk's objects are claimed, so that no other plan may include them."""

MAY_BE_PENDING: Final = CLAIMING - {_S.PLANNED, _S.PACKING}
"""States in which a seal may have written the chunk's rows, before they are located."""

NOT_POSTED: Final = (_S.PLANNED, _S.PACKING, _S.SEALED, _S.POSTING)
"""States without a known post on the chain, in order.

A chunk that is `posting` may have a post.
"""

BEGUN_NOT_POSTED: Final = NOT_POSTED[1:]
"""Started chunks without a known post: the store must have room for them now."""

MAY_BE_POSTED: Final = frozenset({_S.POSTING, _S.DAMAGED})
"""States in which a run may post the chunk.

A damaged chunk is posted again if the chain no longer has its first post.
"""

IN_GOOD_STANDING: Final = frozenset({_S.LOCATED, _S.DAMAGED})
"""States in which a chunk's objects count as archived.

A damaged chunk is repaired. Its objects are planned again only after it is withdrawn.
"""

GOOD: Final = sorted(IN_GOOD_STANDING)
"""IN_GOOD_STANDING as a list, which psycopg sends as an array."""

EVER_LOCATED: Final = frozenset({_S.LOCATED, _S.DAMAGED, _S.EXPIRED, _S.WITHDRAWN})
"""States in which a chunk may have location rows.

No look-up returns the rows of an expired or withdrawn chunk.
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
"""The copy's state for each of these chunk states.

In all other states except `parked`, a chunk has no copy.
"""

_LEGAL: Final[dict[ChunkState, frozenset[ChunkState]]] = {
    # A move to the same state restarts a step after a crash. It is written to check the epoch.
    _S.PLANNED: frozenset({_S.PACKING, _S.WITHDRAWN, _S.PARKED}),
    _S.PACKING: frozenset({_S.PACKING, _S.SEALED, _S.EMPTY, _S.WITHDRAWN, _S.PARKED}),
    # Back to packing: the staged file was lost before a post was made.
    _S.SEALED: frozenset({_S.PACKING, _S.POSTING, _S.WITHDRAWN, _S.PARKED}),
    # Abandoned: an encrypted chunk's staged file is lost, and no transaction posts it.
    _S.POSTING: frozenset({_S.POSTING, _S.POSTED, _S.WITHDRAWN, _S.ABANDONED, _S.PARKED}),
    _S.POSTED: frozenset({_S.UPLOADING, _S.ABANDONED, _S.PARKED}),
    _S.UPLOADING: frozenset({_S.UPLOADING, _S.VERIFIED, _S.ABANDONED, _S.PARKED}),
    _S.VERIFIED: frozenset({_S.LOCATED, _S.UPLOADING, _S.PARKED}),
    _S.LOCATED: frozenset({_S.DAMAGED, _S.EXPIRED}),
    # Damaged again: the look that found the first fault went on, and knows the whole reason.
    _S.DAMAGED: frozenset({_S.DAMAGED, _S.LOCATED, _S.EXPIRED, _S.WITHDRAWN}),
    _S.PARKED: frozenset({*UNDER_WAY, _S.WITHDRAWN, _S.ABANDONED}),
    _S.EMPTY: frozenset(),
    _S.WITHDRAWN: frozenset(),
    _S.ABANDONED: frozenset(),
    _S.EXPIRED: frozenset(),
}


def may_move(before: ChunkState, after: ChunkState) -> bool:
    """Return whether a chunk may move from `before` to `after`."""
    return after in _LEGAL[before]


def require_move(chunk: str, before: ChunkState, after: ChunkState) -> None:
    """Raise IllegalMove, naming `chunk`, unless the move is legal."""
    if not may_move(before, after):
        raise IllegalMove(
            f"chunk {chunk} is '{before}' and cannot become '{after}'",
            hint=_next_step(before, after),
        )


def stored_state(state: ChunkState) -> ChunkState:
    """Return the chunk's own state, as the ledger stores it."""
    if state in (_S.POSTING, _S.POSTED, _S.UPLOADING, _S.VERIFIED):
        return _S.SEALED
    return _S.LOCATED if state in (_S.DAMAGED, _S.EXPIRED) else state


def copy_after(
    chunk: str, before: ChunkState, after: ChunkState, copy: CopyState | None
) -> CopyState | None:
    """Return the copy's state after a legal move of its chunk; None if it has no copy then.

    Raises IllegalMove if the copy lacks the state that `before` requires. Raises it also if the
    move would skip a step of the copy or drop a paid copy.
    """
    if before is not _S.PARKED and copy is not COPY_STATES.get(before):
        raise IllegalMove(f"chunk {chunk} is '{before}', but its copy is '{copy or 'missing'}'")
    if after is _S.PARKED:
        return copy
    if after is _S.WITHDRAWN and copy in (None, _C.WANTED, _C.POSTING):
        return None
    if (after is _S.WITHDRAWN and copy is _C.DAMAGED) or (
        after is _S.ABANDONED
        and (copy in (_C.POSTED, _C.UPLOADING) or (before, copy) == (_S.POSTING, _C.POSTING))
    ):
        return _C.RETIRED
    if after in (_S.WITHDRAWN, _S.ABANDONED):
        raise IllegalMove(
            f"chunk {chunk} is '{before}', its copy is '{copy or 'missing'}', and it cannot become "
            f"'{after}'",
            hint=f"'caf unpark {chunk}', then continue with 'caf run'",
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
    """Return the state in which a parked chunk continues, given its copy's state."""
    if copy is None:
        return _S.PLANNED
    return (
        _S.UPLOADING
        if copy is _C.VERIFIED
        else next(state for state in UNDER_WAY if COPY_STATES.get(state) is copy)
    )


def _next_step(before: ChunkState, after: ChunkState) -> str:
    if not _LEGAL[before]:
        return "nothing more happens to this chunk"
    if before in UNDER_WAY and after is _S.WITHDRAWN:
        return "it is posted: 'caf run' continues it"
    return "'caf status' shows its progress"


def has_reached(state: ChunkState, milestone: ChunkState) -> bool:
    """Return whether a chunk is at `milestone`, a state of UNDER_WAY, or past it.

    Located, damaged and expired chunks have passed all; empty, withdrawn, abandoned and parked
    chunks have passed none.
    """
    if state in (_S.LOCATED, _S.DAMAGED, _S.EXPIRED):
        return True
    return state in UNDER_WAY and UNDER_WAY.index(state) >= UNDER_WAY.index(milestone)
