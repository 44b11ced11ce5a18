"""A finding of the doctor, and the leases that protect what live runs hold."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from caf_pipeline.errors import CafError, HeldByOther
from caf_pipeline.ledger.records import LeaseRecord, chunk_lease
from caf_pipeline.maintenance.deletion.assessment import ProgressReporter
from caf_pipeline.records import Chunk, Lease
from caf_pipeline.run_context import RunContext
from caf_pipeline.system.processes import Holder

if TYPE_CHECKING:
    from caf_pipeline.maintenance.doctor.key_changes import KeyChange

BETWEEN_STEPS_SECONDS: Final = 1.0
"""A run has no lease for some milliseconds between steps."""


class Kind(StrEnum):
    """The subject of a finding."""

    KEYS = "keys"
    LEASE = "lease"
    TRANSACTION = "transaction"
    BACKUP = "backup"
    ROWS = "rows"
    FILE = "file on the store"
    ACCOUNT = "account"
    COPIES = "copies"
    STAGED = "staged file"
    RESERVATION = "reservation"
    LEFTOVER = "leftover"
    CHUNK = "chunk"
    PARTITION = "partition"
    INSTANCE = "instance"
    RUN = "run"
    UNSEEN = "not looked at"


class Actor(StrEnum):
    """The next to act."""

    DOCTOR = "doctor"  # the doctor can mend it
    MENDED = "mended"
    RUN = "run"  # the next run of the source
    OPERATOR = "operator"
    NOBODY = "nobody"  # nothing is done


class UnknownPosts(StrEnum):
    """The order about posts that nothing shows to be this ledger's."""

    REPORT = "report"
    ADD = "add"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class MendResult:
    """The result in words ("given back"), and who acts next."""

    done: str
    actor: Actor = Actor.MENDED


@dataclass(frozen=True, slots=True)
class Finding:
    """Remains of a crash, or something unchecked.

    `remedy` is the effect of `mend`, as a participle ("given back"), or advice. `mend` checks the
    subject again, and may be repeated after an error. An operator must have seen the
    `changes`, and answered the `question`, if there is one. `changes` may be called until the next
    finding is taken.
    """

    kind: Kind
    name: str
    problem: str
    remedy: str
    actor: Actor
    mend: Callable[[], MendResult] | None = None
    error: CafError | None = None
    question: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    changes: Callable[[], Iterator["KeyChange"]] = lambda: iter(())


ALREADY_GONE = MendResult("no longer there: another process was faster")


@dataclass(frozen=True, slots=True)
class Examination:
    """The context of one source. `alive` may return None: unknown."""

    context: RunContext
    alive: Callable[[Holder], bool | None]
    unknown_posts: UnknownPosts = UnknownPosts.REPORT
    reporter: ProgressReporter = field(default_factory=ProgressReporter)

    def may_be_held(self, lease: LeaseRecord) -> bool:
        """An unknown process may live until its lease expires."""
        alive = self.alive(lease.holder)
        return lease.live if alive is None else alive

    def leases_of_live_runs(self) -> dict[str, LeaseRecord]:
        return {
            lease.name: lease
            for lease in self.context.ledger.leases.list()
            if self.may_be_held(lease)
        }

    def require_free(self, name: str) -> None:
        lease = self.leases_of_live_runs().get(name)
        if lease is not None:
            raise HeldByOther(f"{name} is held by run {lease.holder.run}", holder=lease.holder.run)

    def without_run(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        """Yield chunks without lease and progress at two looks."""
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
        """Hold a lease that no live run has, not even a paused run whose lease has expired."""
        self.require_free(name)
        with self.context.ledger.leases.hold(name, self.context.holder) as lease:
            yield lease


def mendable(
    kind: Kind, name: str, problem: str, remedy: str, mend: Callable[[], MendResult]
) -> Finding:
    """Return a finding that can be mended."""
    return Finding(kind, name, problem, remedy, Actor.DOCTOR, mend)


def not_checked(name: str, error: CafError) -> Finding:
    """Return the finding for an unchecked subject."""
    return Finding(Kind.UNSEEN, name, str(error), error.hint, Actor.OPERATOR, error=error)
