"""One finding of the doctor, and the leases that keep it from changing what a live run holds."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from caf_pipeline.errors import CafError, HeldByOther
from caf_pipeline.ledger.records import Chunk, Holder, LeaseRecord, chunk_lease
from caf_pipeline.run_context import RunContext
from caf_pipeline.store.protocol import Lease

BETWEEN_STEPS_SECONDS: Final = 1.0
"""A run gives its lease back between two steps, for some milliseconds: who holds nothing at two
looks so far apart, and has not gone on, is gone.
"""


class Kind(StrEnum):
    """What a finding is about. The values are what users see."""

    LEASE = "lease"
    TRANSACTION = "transaction"
    ROWS = "rows"
    FILE = "file on the store"
    COPIES = "copies"
    STAGED = "staged file"
    RESERVATION = "reservation"
    LEFTOVER = "leftover"
    CHUNK = "chunk"
    PARTITION = "partition"
    UNSEEN = "not looked at"


class Actor(StrEnum):
    """Who acts next on a finding."""

    DOCTOR = "doctor"  # can be mended
    MENDED = "mended"
    RUN = "run"  # the next run of the source goes on with it
    OPERATOR = "operator"
    NOBODY = "nobody"  # reported only


@dataclass(frozen=True, slots=True)
class Mended:
    """The result of mending: in words ("given back"), and who acts next."""

    done: str
    actor: Actor = Actor.MENDED


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a crash left, or that could not be checked.

    Attributes: kind: what it is about. name: of the thing: of a lease, a chunk, a file. found: what
        is wrong with it, a clause. remedy: what `mend` would do, as a participle ("given back"); or
        what the next actor can do. actor: who acts next; RUN also where nothing is wrong and runs
        mend it in time. mend: looks again under the lease of the thing and mends it; None where
        nothing can be done here. Raises HeldByOther
            where a live run took the thing meanwhile, and what store and ledger raise; it may then
            be called again.
        error: why it could not be checked.
    """

    kind: Kind
    name: str
    found: str
    remedy: str
    actor: Actor
    mend: Callable[[], Mended] | None = None
    error: CafError | None = None


NO_LONGER_THERE = Mended("no longer there: another process was faster")


@dataclass(frozen=True, slots=True)
class Examination:
    """One source's run context, and which of its leases live runs may hold.

    Attributes:
        context: its parts; `objects` is never used.
        alive: tells whether a holder's process runs; None where that cannot be told from here.
    """

    context: RunContext
    alive: Callable[[Holder], bool | None]

    def may_be_held(self, lease: LeaseRecord) -> bool:
        """Tell whether a live run may have the lease: its process lives, or cannot be seen and has
        not let it run out.
        """
        alive = self.alive(lease.holder)
        return lease.live if alive is None else alive

    def leases_of_live_runs(self) -> dict[str, LeaseRecord]:
        """Return, by name, the leases that live runs may have at this moment."""
        return {
            lease.name: lease
            for lease in self.context.ledger.leases.list()
            if self.may_be_held(lease)
        }

    def require_free(self, name: str) -> None:
        """Raise HeldByOther where a live run may have the lease."""
        held = self.leases_of_live_runs().get(name)
        if held is not None:
            raise HeldByOther(f"{name} is held by run {held.holder.run}", holder=held.holder.run)

    def without_run(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks that no run has at two looks, and that have not gone on between them."""
        held = self.leases_of_live_runs()
        free = {
            chunk.name: (chunk.state, chunk.epoch)
            for chunk in chunks
            if chunk_lease(chunk.name) not in held
        }
        if not free:
            return
        time.sleep(BETWEEN_STEPS_SECONDS)
        held = self.leases_of_live_runs()
        for chunk in self.context.ledger.chunks.list(
            self.context.source, {state for state, _ in free.values()}
        ):
            if chunk_lease(chunk.name) not in held and free.get(chunk.name) == (
                chunk.state,
                chunk.epoch,
            ):
                yield chunk

    @contextmanager
    def lease(self, name: str) -> Iterator[Lease]:
        """Hold a lease that no live run has, not even one that is paused and has let it run out.

        Raises:
            HeldByOther: a live run may have it.
        """
        self.require_free(name)
        with self.context.ledger.leases.hold(name, self.context.holder) as lease:
            yield lease


def mendable(kind: Kind, name: str, found: str, remedy: str, mend: Callable[[], Mended]) -> Finding:
    """Return a finding that the doctor can mend."""
    return Finding(kind, name, found, remedy, Actor.DOCTOR, mend)


def not_checked(name: str, error: CafError) -> Finding:
    """Return a finding of what could not be checked, and why."""
    return Finding(Kind.UNSEEN, name, str(error), error.hint, Actor.OPERATOR, error=error)
