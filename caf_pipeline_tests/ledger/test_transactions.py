"""The transaction log on Postgres and in memory: the contract, and tests with real processes."""

import itertools
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import IllegalMove, LeaseLost, LedgerError, NotLocated
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.records import Copy, PostRecord
from caf_pipeline_tests.contracts.transaction_log import (
    ACCOUNT,
    OTHER,
    TransactionLogContract,
    ask,
    commit,
    names,
    settle,
    signed,
)
from caf_pipeline_tests.support.ledger_rows import (
    POSTING,
    ROOT,
    archive,
    bring_to,
    chunk_in,
    end,
    held,
    holder,
    register,
)
from caf_pipeline_tests.support.memory_log import MemoryLog

S = ChunkState


@pytest.fixture
def chunks(ledger):
    """Three chunks that need a post."""
    names = register(ledger, ["a"], ["b"], ["c"])
    for chunk in names:
        bring_to(ledger, chunk, S.POSTING)
    return names


@pytest.fixture
def log(ledger):
    return ledger.transactions(holder())


class TestTransactionLog(TransactionLogContract):
    @pytest.fixture
    def take_over(self, database_url):
        def take(account):
            with psycopg.connect(database_url) as connection:
                connection.execute(
                    "UPDATE leases SET epoch = epoch + 1 WHERE name = %s", (f"account/{account}",)
                )

        return take


class TestMemoryLog(TransactionLogContract):
    """Passes the same contract, so that tests with it hold for the ledger."""

    @pytest.fixture
    def log(self):
        return MemoryLog()

    @pytest.fixture
    def chunks(self):
        return ["c-1", "c-2", "c-3"]

    @pytest.fixture
    def take_over(self, log):
        return log.take_over


# --- leases ---


def test_a_lease_that_was_given_back_commits_nothing(log):
    with log.lease(ACCOUNT) as lease:
        pass
    with pytest.raises(LeaseLost):
        log.commit(lease, signed(1), [])


def test_the_lease_of_another_account_signs_and_settles_nothing(log):
    transaction = commit(log, signed(1))
    with log.lease(OTHER) as lease:
        with pytest.raises(LeaseLost):
            log.commit(lease, signed(2), [])
        with pytest.raises(LeaseLost):
            log.settle(lease, transaction.hash, "expired")
    assert log.pending(ACCOUNT) == [transaction]


# --- the database itself ---


def test_a_transaction_with_a_wrong_hash_is_refused(log):
    with log.lease(ACCOUNT) as lease, pytest.raises(LedgerError):
        log.commit(lease, signed(1).__class__("A" * 64, b"body", ACCOUNT, 1, 100), [])
    assert log.pending(ACCOUNT) == []


def test_the_database_itself_keeps_a_chunk_from_two_live_posts(log, chunks, database_url):
    ask(log, chunks[0])
    commit(log, signed(1), chunks[0])
    commit(log, signed(2))
    with psycopg.connect(database_url) as connection, pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute(
            "INSERT INTO transaction_posts (hash, account, position, caf_file_id)"
            " SELECT %s, account, 0, caf_file_id FROM transaction_posts",
            (signed(2).hash,),
        )


def test_a_commit_is_durable_despite_asynchronous_commit(log, database, database_url):
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {database.name} SET synchronous_commit = off")
        admin.execute(
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " INSERT INTO noted VALUES (current_setting('synchronous_commit')); RETURN NEW; END $$"
        )
        admin.execute("CREATE TABLE noted (setting text)")
        admin.execute(
            "CREATE TRIGGER note BEFORE INSERT OR UPDATE ON transactions FOR EACH ROW EXECUTE "
            "FUNCTION note()"
        )
    database.close()  # so that the next connection has the database's setting
    settle(log, commit(log, signed(1)), "included")
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("off",)
        settings = connection.execute("SELECT setting FROM noted").fetchall()
    assert settings == [("on",), ("on",)]


# --- processes ---

CHILD = """
import sys
from caf_pipeline.ledger.database import Database
from caf_pipeline.errors import CafError
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.system.processes import this_process
from caf_pipeline_tests.contracts.transaction_log import ACCOUNT, signed

url, seconds, chunk, body = sys.argv[1:]
log = Ledger(Database(url), lease_seconds=float(seconds)).transactions(this_process("run-child"))
log.ask(ACCOUNT, chunk, chunk.encode(), 30)
print("asked", flush=True)
sys.stdin.readline()
try:
    with log.lease(ACCOUNT) as lease:
        print("owned", flush=True)
        sys.stdin.readline()
        log.commit(lease, signed(1, body.encode()), [chunk])
        print("committed", flush=True)
        sys.stdin.readline()
except CafError as error:
    print(type(error).__name__, flush=True)
"""


@contextmanager
def child(database_url, chunk, body="", *, seconds=3600.0):
    """A process that has requested a post. Each line of input lets it take the next step."""
    command = [sys.executable, "-c", CHILD, database_url, str(seconds), chunk, body]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert heard(process) == "asked"
            yield process
        finally:
            process.kill()


def heard(process):
    return process.stdout.readline().strip()


def tell(process):
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.thorough
def test_one_of_two_processes_committing_for_an_account_wins(database_url, log, chunks):
    with (
        child(database_url, chunks[0], "one", seconds=1.5) as first,
        child(database_url, chunks[0], "two", seconds=1.5) as second,
    ):
        both = (first, second)
        for process in both:
            tell(process)
        with ThreadPoolExecutor(2) as pool:
            owners = list(pool.map(heard, both))
        assert sorted(owners) == ["HeldByOther", "owned"]
        winner = both[owners.index("owned")]
        tell(winner)
        assert heard(winner) == "committed"
    assert len(log.pending(ACCOUNT)) == 1


@pytest.mark.thorough
def test_a_run_killed_after_its_commit_leaves_its_transaction(database_url, log, chunks):
    with child(database_url, chunks[0]) as process:
        for answer in ("owned", "committed"):
            tell(process)
            assert heard(process) == answer
        process.kill()
        process.wait()
    assert log.pending(ACCOUNT) == [signed(1)]
    settle(log, signed(1), "included", 7)
    assert log.start_of(ACCOUNT, chunks[0]) == 7


def test_a_run_paused_beyond_its_lease_commits_nothing(database_url, ledger, log, chunks):
    with child(database_url, chunks[0], seconds=1.5) as process:
        tell(process)
        assert heard(process) == "owned"
        process.send_signal(signal.SIGSTOP)
        with psycopg.connect(database_url) as connection:  # as if its lease had run out
            connection.execute(
                "UPDATE leases SET expires_at = to_timestamp(0) WHERE name = %s",
                (f"account/{ACCOUNT}",),
            )
        with ledger.transactions(holder("run-2")).lease(ACCOUNT):
            process.send_signal(signal.SIGCONT)
            tell(process)
            assert heard(process) == "LeaseLost"
    assert log.pending(ACCOUNT) == []


def test_one_of_two_concurrent_commits_of_a_chunk_wins(log, chunks):
    ask(log, *chunks)

    def attempt(number):
        try:
            log.commit(
                lease, signed(number), [chunks[number % 2], chunks[2], chunks[(number + 1) % 2]]
            )
        except LedgerError:
            return 0
        return 1

    with log.lease(ACCOUNT) as lease, ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(1, 9))) == 1
    assert len(log.pending(ACCOUNT)) == 1


# --- the chunk's moves ---


def test_a_chunk_that_needs_no_post_cannot_request_one(ledger, log):
    (chunk,) = register(ledger, ["a"])
    with pytest.raises(IllegalMove):
        ask(log, chunk)
    with pytest.raises(NotLocated):
        ask(log, "src-none")


def test_a_parked_chunks_request_waits_until_it_is_unparked(ledger, log, chunks):
    ask(log, chunks[0])
    end(ledger, chunks[0], S.PARKED)
    assert log.waiting(ACCOUNT) == []
    with pytest.raises(LedgerError):
        commit(log, signed(1), chunks[0])
    end(ledger, chunks[0], S.POSTING)
    assert names(log.waiting(ACCOUNT)) == [chunks[0]]


def test_a_damaged_chunk_given_up_is_not_posted(ledger, log, damaged, database_url):
    ask(log, damaged)
    end(ledger, damaged, S.WITHDRAWN)
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM posts").fetchone() == (0,)
    with pytest.raises(LedgerError):
        commit(log, signed(2), damaged)


@pytest.mark.parametrize(
    ("after", "outcome"),
    [
        *itertools.product([S.PACKING, S.SEALED, S.PLANNED], ["", "included", "expired"]),
        (S.WITHDRAWN, ""),
        (S.WITHDRAWN, "included"),
    ],
)
def test_a_chunk_whose_copy_is_posting_is_not_given_up(ledger, log, chunks, after, outcome):
    ask(log, chunks[0])
    one = commit(log, signed(1), chunks[0])
    if outcome:
        settle(log, one, outcome, *([7] if outcome == "included" else []))
    with pytest.raises(IllegalMove):
        end(ledger, chunks[0], after)
    end(ledger, chunks[0], S.PARKED)
    with pytest.raises(IllegalMove):
        end(ledger, chunks[0], after)
    end(ledger, chunks[0], S.POSTING)
    assert names(log.waiting(ACCOUNT)) == ([chunks[0]] if outcome == "expired" else [])


@pytest.mark.parametrize("outcome", ["", "included"])
def test_a_chunk_with_a_live_post_is_not_abandoned(ledger, log, chunks, outcome):
    ask(log, chunks[0])
    one = commit(log, signed(1), chunks[0])
    if outcome:
        settle(log, one, outcome, 7)
    with pytest.raises(IllegalMove):
        end(ledger, chunks[0], S.ABANDONED)


def test_a_chunk_whose_post_expired_may_be_abandoned(ledger, log, chunks):
    ask(log, chunks[0])
    settle(log, commit(log, signed(1), chunks[0]), "expired")
    end(ledger, chunks[0], S.ABANDONED)


@pytest.mark.parametrize("outcome", ["failed", "expired", "superseded"])
@pytest.mark.parametrize("through", [[], [S.PARKED]])
def test_a_withdrawn_intention_leaves_no_request(ledger, log, chunks, outcome, through):
    ask(log, chunks[0])
    settle(log, commit(log, signed(1), chunks[0]), outcome)
    end(ledger, chunks[0], *through, S.WITHDRAWN)
    assert log.waiting(ACCOUNT) == []
    with pytest.raises(LedgerError):
        commit(log, signed(2), chunks[0])


def test_a_posted_chunk_may_be_abandoned_but_not_withdrawn(ledger, log, chunks):
    post(ledger, log, chunks[0], 1, 7)
    with pytest.raises(IllegalMove):
        end(ledger, chunks[0], S.PARKED, S.WITHDRAWN)
    end(ledger, chunks[0], S.ABANDONED)


@pytest.mark.parametrize("state", [S.DAMAGED, S.POSTING])
def test_a_withdrawal_and_a_commit_at_once_never_both_happen(request, ledger, log, state):
    if state is S.DAMAGED:
        chunk = request.getfixturevalue("damaged")
    else:
        chunk = request.getfixturevalue("chunks")[0]

    def withdraw():
        try:
            end(ledger, chunk, S.WITHDRAWN)
        except IllegalMove:
            return 0
        return 1

    def sign():
        try:
            commit(log, signed(2), chunk)
        except LedgerError:
            return 0
        return 1

    ask(log, chunk)
    with ThreadPoolExecutor(2) as pool:
        withdrawn, committed = pool.submit(withdraw), pool.submit(sign)
    assert withdrawn.result() + committed.result() == 1


def test_a_repair_and_a_commit_at_once_never_both_happen(ledger, log, damaged, database_url):
    """A commit that waits for the repair's lock must not use the copy's state from before."""
    ask(log, damaged)
    with ThreadPoolExecutor(1) as pool, psycopg.connect(database_url) as repair:
        repair.execute("SELECT FROM caf_files FOR NO KEY UPDATE")
        committed = pool.submit(commit, log, signed(2), damaged)
        while (
            not committed.done()
            and not repair.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone()
        ):
            pass
        repair.execute("UPDATE chunk_copies SET state = 'verified'")
        repair.commit()
        with pytest.raises(LedgerError, match="is 'located'"):
            committed.result()


def test_a_chunk_in_a_transaction_keeps_its_root(ledger, log, chunks):
    ask(log, chunks[0])
    one = commit(log, signed(1), chunks[0])
    with held(ledger, chunks[0]) as lease:
        with pytest.raises(IllegalMove):
            ledger.moves.record_root(lease, chunks[0], b"\2" * 64, 0, [])
        settle(log, one, "expired")
        ledger.moves.record_root(lease, chunks[0], b"\2" * 64, 0, [])
    assert log.waiting(ACCOUNT) == []


def test_a_chunk_in_a_transaction_keeps_its_store(database, log, chunks):
    ask(log, chunks[0])
    commit(log, signed(1), chunks[0])
    ask(log, chunks[1])
    other = Ledger(database, store="directory")
    for chunk in chunks[:2]:
        with held(other, chunk) as lease:
            if chunk == chunks[0]:
                with pytest.raises(IllegalMove):
                    other.moves.record_posting(lease, chunk, POSTING)
            else:
                other.moves.record_posting(lease, chunk, POSTING)
    assert [other.chunks.get(chunk).state for chunk in chunks[:2]] == [S.POSTING, S.POSTED]


# --- damage and the second post ---


def post(ledger, log, chunk, sequence, start):
    """Post a chunk in `posting` by a transaction that starts it at `start`."""
    ask(log, chunk)
    settle(log, commit(log, signed(sequence), chunk), "included", start)
    with held(ledger, chunk) as lease:
        ledger.moves.record_posting(lease, chunk, PostRecord(ROOT, "jkl1owner", start, 1000))


@pytest.fixture
def damaged(ledger, log):
    """A damaged chunk whose post at 42 is in a transaction."""
    chunk = chunk_in(ledger, S.POSTING, ["d"])
    ask(log, chunk)
    settle(log, commit(log, signed(1), chunk), "included", 42)
    with held(ledger, chunk) as lease:
        bring_on(ledger, lease, chunk)
    end(ledger, chunk, S.DAMAGED)
    return chunk


def bring_on(ledger, lease, chunk):
    ledger.moves.record_posting(lease, chunk, POSTING)
    ledger.moves.move(lease, chunk, S.POSTED, S.UPLOADING)
    ledger.replicas.record_verified(lease, chunk, [Copy("p", "proof")])
    ledger.moves.load_locations(lease, chunk)


def test_a_damaged_chunk_is_reposted_only_on_request(log, damaged):
    assert log.waiting(ACCOUNT) == []
    with pytest.raises(LedgerError):
        commit(log, signed(2), damaged)
    ask(log, damaged)
    assert names(log.waiting(ACCOUNT)) == [damaged]
    settle(log, commit(log, signed(2), damaged), "included", 99)
    assert log.start_of(ACCOUNT, damaged) == 99


def test_an_unrecorded_second_post_is_not_paid_again(ledger, log, damaged):
    ask(log, damaged)
    settle(log, commit(log, signed(2), damaged), "included", 99)
    ask(log, damaged)  # by the next run, after a crash
    assert log.waiting(ACCOUNT) == []
    with pytest.raises(LedgerError):
        commit(log, signed(3), damaged)
    with pytest.raises(IllegalMove, match="was posted"):
        end(ledger, damaged, S.WITHDRAWN)


def test_a_damaged_chunk_beyond_repair_may_be_withdrawn(ledger, damaged):
    end(ledger, damaged, S.WITHDRAWN)
    assert ledger.chunks.get(damaged).state is S.WITHDRAWN


def test_a_repair_that_ends_otherwise_posts_nothing(ledger, log, damaged):
    ask(log, damaged)
    end(ledger, damaged, S.LOCATED, S.DAMAGED)
    assert log.waiting(ACCOUNT) == []


def test_a_chunk_already_on_the_chain_is_not_posted(ledger, log, chunks):
    ask(log, chunks[0])
    with held(ledger, chunks[0]) as lease:
        ledger.moves.record_posting(lease, chunks[0], PostRecord(ROOT, "jkl1owner", 5, 1000))
    assert log.waiting(ACCOUNT) == []


def test_a_chunk_without_transactions_has_no_start(ledger, log):
    assert log.start_of(ACCOUNT, archive(ledger, ["x"])) is None


@pytest.mark.parametrize(
    ("purpose", "outcome", "kept"),
    [("buy", "included", 30), ("buy", "failed", 90), ("post", "included", 90)],
)
def test_a_purchase_that_is_settled_later_may_end_earlier(ledger, log, purpose, outcome, kept):
    now = datetime.now(UTC)

    def read(days: int) -> datetime | None:
        ledger.storage_plans.record(
            ACCOUNT, read_at=now, balance=1, plan=(1000, 10, now + timedelta(days=days))
        )
        return ledger.storage_plans.list()[0].latest_end

    read(90)
    transaction = commit(log, signed(1, purpose=purpose))
    assert read(30) == now + timedelta(days=90)
    settle(log, transaction, outcome)
    assert read(30) == now + timedelta(days=kept)
