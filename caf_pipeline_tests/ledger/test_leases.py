"""Leases of real processes: killed, paused, on another machine, and without their database."""

import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import psycopg
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import CafError, HeldByOther, LeaseLost, NotLocated, SourceUnreachable
from caf_pipeline.ledger import records
from caf_pipeline.ledger.engine import LedgerEngine
from caf_pipeline.ledger.leases import HeldLease
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.system.processes import Holder, boot_id, is_alive, this_process
from caf_pipeline_tests.support.ledger_rows import bring_to, held, holder, pending, register, seal

SHORT = 1.5
NEVER = 3600.0  # a test that waits for this lease to expire would not end

CHILD = """
import sys
from dataclasses import replace
from caf_pipeline.ledger.database import Database
from caf_pipeline.errors import LeaseLost
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.system.processes import this_process
from caf_pipeline_tests.support.ledger_rows import batches, location, seal_facts

url, chunk, seconds, boot, what = sys.argv[1:]
ledger = Ledger(Database(url), lease_seconds=float(seconds))
me = this_process("run-child")
with ledger.leases.hold(f"chunk/{chunk}", replace(me, boot_id=boot) if boot else me) as lease:
    print("held", flush=True)
    sys.stdin.readline()
    if what == "move":
        move = ledger.moves.move
        for attempt in (
            lease.check,
            lambda: move(lease, chunk, ChunkState.PLANNED, ChunkState.PACKING),
        ):
            try:
                attempt()
                print("done", flush=True)
            except LeaseLost as lost:
                print("lost", flush=True)
    if what == "load":
        def rows():
            yield from batches([location("a")])
            print("loading", flush=True)
            sys.stdin.readline()
        ledger.moves.seal(lease, chunk, seal_facts(1), [], [], rows=rows)
"""


@contextmanager
def child(database_url, chunk, *, seconds=NEVER, boot="", what=""):
    """A process that holds the chunk's lease."""
    command = [sys.executable, "-c", CHILD, database_url, chunk, str(seconds), boot, what]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def tell(process):
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def engine(database):
    return LedgerEngine(database)


@pytest.fixture
def chunk(ledger):
    (name,) = register(ledger, ["a"])
    return name


@pytest.mark.thorough
def test_a_killed_local_run_is_replaced_immediately(database, database_url, chunk):
    with child(database_url, chunk) as process:
        process.kill()
        process.wait()
        with Ledger(database, lease_seconds=NEVER).leases.hold(f"chunk/{chunk}", holder()) as lease:
            assert lease.epoch > 1


@pytest.mark.thorough
def test_a_zombie_run_is_dead(database, database_url, chunk):
    with child(database_url, chunk) as process:
        process.kill()
        while is_alive(boot_id(), process.pid, _started_of(database_url, process)):
            time.sleep(0.01)
        assert process.returncode is None
        with Ledger(database, lease_seconds=NEVER).leases.hold(f"chunk/{chunk}", holder()) as lease:
            assert lease.epoch > 1


def _started_of(database_url, process):
    with psycopg.connect(database_url) as connection:
        [[started]] = connection.execute(
            "SELECT process_started FROM leases WHERE pid = %s", [process.pid]
        ).fetchall()
        return started


@pytest.mark.thorough
def test_a_killed_remote_run_is_replaced_after_its_lease(database, database_url, chunk):
    with child(database_url, chunk, seconds=SHORT, boot="another machine") as process:
        process.kill()
        process.wait()
        with Ledger(database, lease_seconds=SHORT).leases.hold(f"chunk/{chunk}", holder()) as lease:
            assert lease.epoch > 1


@pytest.mark.thorough
def test_a_live_run_on_another_machine_is_seen_renewing(database, database_url, chunk):
    ledger = Ledger(database, lease_seconds=SHORT)
    with child(database_url, chunk, seconds=SHORT, boot="another machine"):
        with pytest.raises(HeldByOther) as refused:
            held(ledger, chunk).__enter__()
        assert refused.value.holder == "run-child"


def test_a_holder_with_a_reused_pid_is_dead(engine):
    gone = replace(this_process("run-1"), process_started=1.0)
    with HeldLease(engine, "plan/src", gone, seconds=NEVER) as lease:
        taken = HeldLease(engine, "plan/src", holder("run-2"), seconds=NEVER)
        with taken:
            assert taken.epoch > lease.epoch


@pytest.mark.thorough
@pytest.mark.parametrize("boot", ["", "another machine"])
def test_a_run_paused_beyond_its_lease_moves_nothing(database, database_url, chunk, boot):
    ledger = Ledger(database, lease_seconds=SHORT)
    with child(database_url, chunk, seconds=SHORT, boot=boot, what="move") as process:
        process.send_signal(signal.SIGSTOP)
        with held(ledger, chunk, "run-2"):
            process.send_signal(signal.SIGCONT)
            tell(process)
            assert [process.stdout.readline() for _ in range(2)] == ["lost\n", "lost\n"]
            assert ledger.chunks.get(chunk).state is ChunkState.PLANNED


@pytest.mark.thorough
def test_a_run_killed_while_sealing_leaves_no_row(database, database_url, ledger, chunk):
    bring_to(ledger, chunk, ChunkState.PACKING)
    with child(database_url, chunk, what="load") as process:
        tell(process)
        assert process.stdout.readline() == "loading\n"
        process.kill()
        process.wait()
        with Ledger(database, lease_seconds=NEVER).leases.hold(f"chunk/{chunk}", holder()) as lease:
            assert pending(ledger, chunk) == 0
            seal(ledger, lease, chunk)
            assert pending(ledger, chunk) == 1


@pytest.mark.thorough
def test_a_lease_outlives_its_time_while_it_is_renewed(engine, database_url):
    ends = "SELECT expires_at FROM leases WHERE name = 'plan/src'"
    with HeldLease(engine, "plan/src", holder("run-1"), seconds=4 * SHORT) as lease:
        with psycopg.connect(database_url, autocommit=True) as connection:
            first = connection.execute(ends).fetchone()
            while connection.execute(ends).fetchone() == first:
                time.sleep(0.05)
        lease.check()
        with pytest.raises(HeldByOther):
            HeldLease(engine, "plan/src", holder("run-2"), seconds=SHORT).__enter__()


def test_a_lease_taken_over_is_reported_lost(engine, database_url):
    with HeldLease(engine, "plan/src", holder("run-1"), seconds=SHORT) as lease:
        with psycopg.connect(database_url) as connection:
            connection.execute("UPDATE leases SET epoch = epoch + 1, run = 'run-2'")
        with pytest.raises(LeaseLost, match="another run"):
            _check_until_it_fails(lease)
    # The other run's lease is left alone.
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT run, epoch FROM leases").fetchone() == (
            "run-2",
            lease.epoch + 1,
        )


def test_a_lease_is_lost_if_the_database_stays_away(postgres_url, database, engine):
    with HeldLease(engine, "plan/src", holder("run-1"), seconds=SHORT) as lease:
        lease.check()
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            name = database.name
            admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,)
            )
        with pytest.raises(LeaseLost, match="not be renewed"):
            _check_until_it_fails(lease)


def _check_until_it_fails(lease):
    for _ in range(2000):
        lease.check()
        time.sleep(0.01)


def test_liveness_of_a_remote_process_is_unknown():
    assert is_alive("another machine", 1, 1.0) is None


def test_this_process_is_alive_with_a_stable_start():
    me = this_process("run")
    assert me == this_process("run")
    assert is_alive(me.boot_id, me.pid, me.process_started) is True


def test_a_process_that_ended_is_not_alive():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        code = (
            "from caf_pipeline.system.processes import _started; "
            f"print(repr(_started({process.pid})))"
        )
        started = float(subprocess.check_output([sys.executable, "-c", code]))
        other = Holder("run", boot_id(), process.pid, started)
        assert is_alive(other.boot_id, other.pid, other.process_started) is True
    assert is_alive(other.boot_id, other.pid, other.process_started) is False


def test_leases_have_the_names_that_earlier_versions_gave_them():
    names = [
        records.chunk_lease("c"),
        records.plan_lease("s"),
        records.deletion_lease("s"),
        records.account_lease("i/a"),
    ]
    assert names == ["chunk/c", "plan/s", "deletion/s", "account/i/a"]
    assert [records.chunk_of_lease(name) for name in names] == ["c", None, None, None]


def test_hidden_process_of_another_user_is_unknown(monkeypatch):
    me = this_process("run")
    with subprocess.Popen(["true"]) as process:
        process.wait()

    def refuse(pid, number):
        raise PermissionError

    assert is_alive(me.boot_id, process.pid, 1.0) is False
    monkeypatch.setattr("os.kill", refuse)
    assert is_alive(me.boot_id, process.pid, 1.0) is None


# --- one process ---


def test_a_held_lease_names_its_run_to_others(ledger):
    with ledger.leases.hold("plan/src", holder("run-1")), pytest.raises(HeldByOther) as refused:
        ledger.leases.hold("plan/src", holder("run-2")).__enter__()
    assert refused.value.holder == "run-1"


def test_each_holding_has_a_greater_epoch(ledger):
    (chunk,) = register(ledger, ["a"])
    epochs = []
    for run in ("r1", "r2", "r3"):
        with held(ledger, chunk, run) as lease:
            lease.check()
            epochs.append((lease.epoch, ledger.chunks.get(chunk).epoch))
    assert all(of_lease == of_chunk for of_lease, of_chunk in epochs)
    assert epochs[0] < epochs[1] < epochs[2]


def test_a_lease_is_given_back_when_its_holder_fails(ledger):
    with pytest.raises(ConnectionError), ledger.leases.hold("plan/src", holder("r1")):
        raise ConnectionError("the cable")
    with ledger.leases.hold("plan/src", holder("r2")) as lease:
        lease.check()


@pytest.mark.parametrize(
    ("error", "failures", "has_reason"),
    [
        (None, [], False),
        (ZeroDivisionError(), ["a", "b"], True),
        (SourceUnreachable("away"), [], True),
        (HeldByOther("another lease", holder="c"), [], False),
        (KeyboardInterrupt(), [], False),
    ],
    ids=repr,
)
def test_only_an_attempts_own_failure_counts(ledger, chunk, error, failures, has_reason):
    for run in ("a", "a", "b"):
        lease = ledger.leases.hold(chunk_lease(chunk), holder(run), attempt=True)
        with suppress(BaseException), lease:
            assert run in ledger.chunks.get(chunk).failures
            if error:
                raise error
    assert ledger.chunks.get(chunk).failures == failures
    assert bool(ledger.chunks.get(chunk).reason) == has_reason


def test_the_next_move_clears_the_reason(ledger, chunk):
    with suppress(CafError), ledger.leases.hold(chunk_lease(chunk), holder("a"), attempt=True):
        raise CafError("own", hint="mend it")
    assert "own; mend it" in ledger.chunks.get(chunk).reason
    with ledger.leases.hold(chunk_lease(chunk), holder("b"), attempt=True) as lease:
        ledger.moves.move(lease, chunk, ChunkState.PLANNED, ChunkState.PACKING)
    assert ledger.chunks.get(chunk).reason == ""


@pytest.mark.parametrize("state", [ChunkState.PARKED, ChunkState.WITHDRAWN])
def test_a_set_aside_chunk_keeps_its_reason(ledger, chunk, state):
    with suppress(CafError), ledger.leases.hold(chunk_lease(chunk), holder(), attempt=True) as held:
        ledger.moves.move(held, chunk, ChunkState.PLANNED, state, reason="set aside")
        raise CafError("own")
    assert ledger.chunks.get(chunk).reason == "set aside"


def test_an_attempt_takes_back_its_own_run_alone(ledger, chunk):
    for run, error in (("a", CafError("own")), ("b", CafError("own")), ("a", None)):
        with suppress(CafError), ledger.leases.hold(chunk_lease(chunk), holder(run), attempt=True):
            if error:
                raise error
    assert ledger.chunks.get(chunk).failures == ["b"]


def test_an_unknown_chunk_cannot_be_held(ledger):
    with pytest.raises(NotLocated):
        ledger.leases.hold("chunk/src-none", holder()).__enter__()


def test_held_leases_are_listed_with_their_holder(ledger):
    with (
        ledger.leases.hold("plan/src", holder("run-1")) as lease,
        ledger.leases.hold("account/x", holder("run-2")),
    ):
        first, second = ledger.leases.list()
        assert (first.name, first.holder, first.live) == ("account/x", holder("run-2"), True)
        assert (second.name, second.epoch) == ("plan/src", lease.epoch)
    assert ledger.leases.list() == []


def test_a_lease_whose_holder_may_live_is_not_ended(ledger):
    far = replace(holder("far"), boot_id="another machine")
    with (
        ledger.leases.hold("plan/src", holder("run-1")) as here,
        ledger.leases.hold("plan/other", far) as there,
    ):
        assert not ledger.leases.end("plan/src", here.epoch)
        assert not ledger.leases.end("plan/other", there.epoch)
        assert len(ledger.leases.list()) == 2


def test_a_dead_lease_ends_once_and_by_epoch(ledger):
    with ledger.leases.hold("plan/src", replace(holder("dead"), process_started=-1.0)) as lease:
        assert not ledger.leases.end("plan/src", lease.epoch + 1)
        assert ledger.leases.end("plan/src", lease.epoch)
        assert not ledger.leases.end("plan/src", lease.epoch)
        assert ledger.leases.list() == []
    with ledger.leases.hold("plan/src", holder("next")) as next_:
        assert next_.epoch > lease.epoch
