"""Leases: the right of one run to work on one thing, with an epoch and an expiry.

The epoch grows with each holder, and every move names it: a holder that was paused and taken for
dead can move nothing. An epoch is at least the time in milliseconds, so that none repeats after an
older backup was restored. The expiry, by the database's clock, only says when others may take over.
Source: "A chunk" in docs/explanation/design.md.
"""

import contextlib
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Final, Self

from sqlalchemy import (
    BigInteger,
    Connection,
    Interval,
    Row,
    Text,
    and_,
    any_,
    bindparam,
    cast,
    extract,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert

from caf_pipeline.chunk_state import UNDER_WAY
from caf_pipeline.errors import (
    OUTAGES,
    HeldByOther,
    LeaseLost,
    LedgerError,
    NotLocated,
    interrupt_behind,
    with_hint,
)
from caf_pipeline.ledger.engine import LedgerEngine, LedgerPart
from caf_pipeline.ledger.records import LeaseRecord, chunk_of_lease
from caf_pipeline.ledger.tables import CAF_FILES, LEASES
from caf_pipeline.records import LEASE_SECONDS, Lease
from caf_pipeline.system.processes import Holder, is_alive
from caf_pipeline.waits import Waits

RENEWALS_PER_LEASE: Final = 3  # two may fail in a row

_RELEASED: Final = datetime.fromtimestamp(0, UTC)

_LEASES: Final = select(LEASES, (LEASES.c.expires_at > func.clock_timestamp()).label("live"))
_LEASE: Final = _LEASES.where(LEASES.c.name == bindparam("name"))
_LOCK: Final = _LEASE.with_for_update()
_EVER_HELD: Final = select(LEASES.c.name).where(
    LEASES.c.name == any_(bindparam("names", type_=ARRAY(Text)))
)
_EXPIRY: Final = func.clock_timestamp() + bindparam("duration", type_=Interval)
_NEW_LEASE: Final = insert(LEASES).values(
    epoch=cast(extract("epoch", func.clock_timestamp()) * 1000, BigInteger), expires_at=_EXPIRY
)
_TAKE: Final = _NEW_LEASE.on_conflict_do_update(
    index_elements=[LEASES.c.name],
    set_={
        "epoch": func.greatest(LEASES.c.epoch + 1, _NEW_LEASE.excluded.epoch),
        **{
            name: _NEW_LEASE.excluded[name]
            for name in ("run", "boot_id", "pid", "process_started", "expires_at")
        },
    },
    where=LEASES.c.epoch == bindparam("seen"),
).returning(LEASES.c.epoch)
_CHUNK: Final = CAF_FILES.c.name == bindparam("chunk")
_SET_CHUNK_EPOCH: Final = update(CAF_FILES).where(_CHUNK).values(epoch=bindparam("epoch"))
_RUN: Final = bindparam("run", type_=Text)
_OTHER_RUNS: Final = func.array_remove(CAF_FILES.c.failures, _RUN)
# Until the attempt ends, it counts as failed: a killed run cannot count itself.
_BEGIN_ATTEMPT: Final = _SET_CHUNK_EPOCH.values(failures=func.array_append(_OTHER_RUNS, _RUN))
_TAKE_BACK: Final = update(CAF_FILES).where(_CHUNK).values(failures=_OTHER_RUNS)
# The chunk's next move clears it. A parked or withdrawn chunk keeps its own reason.
_SET_REASON: Final = (
    update(CAF_FILES)
    .where(_CHUNK, CAF_FILES.c.state.in_(UNDER_WAY))
    .values(reason=bindparam("why", type_=Text))
)
_HELD: Final = and_(LEASES.c.name == bindparam("lease"), LEASES.c.epoch == bindparam("held"))
_RENEW: Final = update(LEASES).where(_HELD).values(expires_at=_EXPIRY)
_LOCK_HELD: Final = (
    select(LEASES.c.name).where(_HELD, LEASES.c.expires_at > _RELEASED).with_for_update(read=True)
)
# The row stays: its epoch must go on growing.
_RELEASE: Final = update(LEASES).where(_HELD).values(expires_at=_RELEASED)


class HeldLease:
    """Waits for a lease, renews it in the background, and releases it. `epoch` is 0 before."""

    def __init__(
        self,
        engine: LedgerEngine,
        name: str,
        holder: Holder,
        *,
        seconds: float = LEASE_SECONDS,
        waits: Waits | None = None,
        attempt: bool = False,
    ) -> None:
        self.name = name
        self.epoch = 0
        self._engine = engine
        self._holder = holder
        self._seconds = seconds
        self._waits = waits or Waits()
        self._attempt = attempt
        self._lost = ""
        self._error = ""
        self._good_until = 0.0
        self._released = threading.Event()
        self._renewing = threading.Thread(
            target=self._renew_until_released, name=f"lease {name}", daemon=True
        )

    def __enter__(self) -> Self:
        first = lease = self._take()
        if first is not None:
            with self._waits.lease(self.name, first.holder.run):
                while lease is not None:
                    if (lease.epoch, lease.expires_at) != (first.epoch, first.expires_at):
                        raise _held_by(lease)  # it was renewed: the holder lives
                    time.sleep(self._seconds / 30)
                    lease = self._take()
        self._renewing.start()
        return self

    def _take(self) -> LeaseRecord | None:
        started = time.monotonic()
        with self._engine.begin() as connection:
            lease = self._try(connection)
        self._good_until = started + self._seconds
        return lease

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._released.set()
        self._renewing.join()
        ended_early = bool(interrupt_behind(error)) or isinstance(error, HeldByOther)
        # If the database is away, the lease expires, and an attempt counts.
        with contextlib.suppress(LedgerError), self._engine.begin() as connection:
            released = connection.execute(_RELEASE, {"lease": self.name, "held": self.epoch})
            chunk = chunk_of_lease(self.name)
            if self._attempt and (error is None or ended_early or isinstance(error, OUTAGES)):
                connection.execute(_TAKE_BACK, {"chunk": chunk, "run": self._holder.run})
            failed = self._attempt and not ended_early and released.rowcount == 1
            if failed and isinstance(error, Exception):
                why = f"its last attempt failed: {with_hint(error)}"
                connection.execute(_SET_REASON, {"chunk": chunk, "why": why})

    def check(self) -> None:
        reason = self._lost
        if not reason and time.monotonic() > self._good_until:
            reason = f"it could not be renewed for {self._seconds:g} s{self._error}"
        if reason:
            raise LeaseLost(
                f"the lease on {self.name} is lost: {reason}", hint="run it again: it resumes"
            )

    def _try(self, connection: Connection) -> LeaseRecord | None:
        row = connection.execute(_LOCK, {"name": self.name}).one_or_none()
        if row is not None:
            lease = _record(row)
            if lease.live and _is_alive(lease) is not False:
                return lease
        values = {
            "name": self.name,
            "duration": timedelta(seconds=self._seconds),
            "seen": row.epoch if row else 0,
        }
        epoch = connection.execute(_TAKE, {**asdict(self._holder), **values}).scalar_one_or_none()
        if epoch is None:  # another run inserted the row between our two statements
            return self._try(connection)
        self.epoch = epoch
        chunk = chunk_of_lease(self.name)
        if chunk is not None:
            values = {"epoch": epoch, "chunk": chunk, "run": self._holder.run}
            statement = _BEGIN_ATTEMPT if self._attempt else _SET_CHUNK_EPOCH
            if not connection.execute(statement, values).rowcount:
                raise NotLocated(f"the ledger has no chunk {chunk}")
        return None

    def _renew_until_released(self) -> None:
        wait = self._seconds / RENEWALS_PER_LEASE
        values = {
            "lease": self.name,
            "held": self.epoch,
            "duration": timedelta(seconds=self._seconds),
        }
        while not self._released.wait(wait):
            started = time.monotonic()
            try:
                with self._engine.begin() as connection:
                    renewed = connection.execute(_RENEW, values).rowcount
            except LedgerError as error:
                self._error = f" ({error})"
                wait = self._seconds / 10  # `check` notices if retries take too long
                continue
            if not renewed:
                self._lost = "another run took it over"
                return
            self._good_until = started + self._seconds
            wait = self._seconds / RENEWALS_PER_LEASE


class Leases(LedgerPart):
    """Takes, lists and ends leases."""

    def __init__(self, engine: LedgerEngine, seconds: float) -> None:
        super().__init__(engine)
        self._seconds = seconds

    def hold(
        self, name: str, holder: Holder, *, waits: Waits | None = None, attempt: bool = False
    ) -> HeldLease:
        """Hold a lease in a context. A chunk's lease also sets the chunk's epoch.

        An `attempt` at a chunk is one of its failures until it ends. A killed one stays, and one
        with an error, but for OUTAGES, an interrupt, and HeldByOther. The chunk keeps the error
        as its reason, also one of OUTAGES, until its next move.

        The lease of a dead process of this machine is taken over immediately. Otherwise the call
        waits until the holder renews the lease or it expires. Raises HeldByOther if a live run has
        it.
        """
        return HeldLease(
            self._engine, name, holder, seconds=self._seconds, waits=waits, attempt=attempt
        )

    def list(self) -> Sequence[LeaseRecord]:
        return [
            _record(row)
            for row in self._rows(
                _LEASES.where(LEASES.c.expires_at > _RELEASED).order_by(LEASES.c.name)
            )
        ]

    def ever_held(self, names: Collection[str]) -> set[str]:
        return {row.name for row in self._rows(_EVER_HELD, names=[*names])}

    def end(self, name: str, epoch: int) -> bool:
        """Release a lease that its holder left. Its row and epoch stay.

        Returns False if the lease has another epoch, was released, or may still be held: by a live
        process of this machine, or elsewhere and not expired.
        """
        with self._engine.begin() as connection:
            row = connection.execute(_LOCK, {"name": name}).one_or_none()
            lease = _record(row) if row else None
            if lease is None or lease.epoch != epoch or lease.expires_at == _RELEASED:
                return False
            alive = _is_alive(lease)
            if alive or (lease.live and alive is None):
                return False
            return connection.execute(_RELEASE, {"lease": name, "held": epoch}).rowcount == 1


def lock_lease(connection: Connection, lease: Lease) -> None:
    """Keep the lease until the transaction ends. Raises LeaseLost if another run has it."""
    if (
        connection.execute(_LOCK_HELD, {"lease": lease.name, "held": lease.epoch}).one_or_none()
        is None
    ):
        raise LeaseLost(f"another run holds the lease on {lease.name} now; this run wrote nothing")


def require_free(connection: Connection, name: str) -> None:
    """Raise HeldByOther if a run holds the lease and is not known to be dead."""
    row = connection.execute(_LEASE, {"name": name}).one_or_none()
    lease = _record(row) if row else None
    if lease and lease.live and _is_alive(lease) is not False:
        raise _held_by(lease)


def _held_by(lease: LeaseRecord) -> HeldByOther:
    run = lease.holder.run
    return HeldByOther(
        f"{lease.name} is held by run {run}", holder=run, hint="wait for that run, or end it first"
    )


def _record(row: Row[Any]) -> LeaseRecord:
    holder = Holder(
        run=row.run, boot_id=row.boot_id, pid=row.pid, process_started=row.process_started
    )
    return LeaseRecord(row.name, row.epoch, holder, row.expires_at, row.live)


def _is_alive(lease: LeaseRecord) -> bool | None:
    return is_alive(lease.holder.boot_id, lease.holder.pid, lease.holder.process_started)
