"""A chunk's life cycle: the table of moves, and the ledger driven through it by runs that crash and
wake again.
"""

import itertools
import re
from pathlib import Path

import psycopg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from caf_pipeline.chunk_state import (
    CLAIMING,
    COPY_STATES,
    IN_GOOD_STANDING,
    MAY_BE_POSTED,
    UNDER_WAY,
    ChunkState,
    CopyState,
    copy_after,
    has_reached,
    may_move,
    require_move,
    unparked_state,
)
from caf_pipeline.errors import ClaimConflict, IllegalMove, LeaseLost
from caf_pipeline.records import Copy
from caf_pipeline_tests.support.ledger_rows import (
    POSTING,
    SOURCE,
    holder,
    location,
    register,
    seal,
    seal_facts,
    skip,
    standing,
)

S = ChunkState
FINAL = set(S) - CLAIMING  # no run has work to do
STATES = list(ChunkState)


def reachable(state):
    """Every state that a chunk may get to from this one."""
    found, todo = set(), [state]
    while todo:
        here = todo.pop()
        new = {after for after in STATES if may_move(here, after)} - found
        found |= new
        todo.extend(new)
    return found


def test_the_flow_is_legal_step_by_step():
    flow = [*UNDER_WAY, S.LOCATED]
    for before, after in itertools.pairwise(flow):
        require_move("c", before, after)


def test_the_picture_in_the_docs_has_each_legal_move():
    """But those into `parked` and back, which a sentence below it tells."""
    page = (Path(__file__).parents[1] / "docs" / "explanation" / "architecture.md").read_text(
        encoding="utf-8"
    )
    drawn = re.findall(
        r"^    (\w+) --> (\w+)",
        page.partition("stateDiagram-v2")[2].partition("```")[0],
        re.MULTILINE,
    )
    parked = {(state, S.PARKED) for state in UNDER_WAY} | {(S.PARKED, state) for state in UNDER_WAY}
    legal = {
        (before, after)
        for before, after in itertools.permutations(STATES, 2)
        if may_move(before, after)
    }
    assert {(S(before), S(after)) for before, after in drawn} == legal - parked
    assert all(may_move(before, after) for before, after in parked)


@pytest.mark.parametrize("state", sorted(CLAIMING))
def test_work_that_is_begun_can_always_be_ended(state):
    assert S.LOCATED in reachable(state)
    assert reachable(state) & FINAL - {S.LOCATED}


@pytest.mark.parametrize("state", sorted(UNDER_WAY))
def test_any_work_can_be_parked_and_taken_up_again(state):
    assert may_move(state, S.PARKED)
    assert may_move(S.PARKED, state)


@pytest.mark.parametrize("state", [S.EMPTY, S.WITHDRAWN, S.ABANDONED, S.EXPIRED])
def test_the_ends_are_ends(state):
    assert reachable(state) == set()


def test_only_a_verified_or_repaired_chunk_becomes_located():
    assert {state for state in STATES if may_move(state, S.LOCATED)} == {S.VERIFIED, S.DAMAGED}


def test_chunks_that_may_be_paid_for_are_not_withdrawn():
    for state in (S.POSTED, S.UPLOADING, S.VERIFIED, S.LOCATED):
        assert not may_move(state, S.WITHDRAWN)


def test_only_chunks_that_may_lack_a_post_are_posted():
    assert sorted(MAY_BE_POSTED) == [S.DAMAGED, S.POSTING]


@pytest.mark.parametrize("state", [S.LOCATED, S.EXPIRED, S.WITHDRAWN])
def test_damage_is_repaired_or_given_up(state):
    assert may_move(S.DAMAGED, state)


@pytest.mark.parametrize("copy", [None, *CopyState])
def test_unparked_state_follows_from_the_copy(copy):
    if copy in (CopyState.DAMAGED, CopyState.EXPIRED, CopyState.RETIRED):
        return
    claimed = [
        state for state in STATES if may_move(S.PARKED, state) and is_legal(S.PARKED, state, copy)
    ]
    assert unparked_state(copy) in claimed
    kept = {state for state in claimed if state in UNDER_WAY and COPY_STATES.get(state) is copy}
    again = {S.UPLOADING} if copy is CopyState.VERIFIED else set()
    ends = {S.WITHDRAWN} if copy in (None, CopyState.WANTED, CopyState.POSTING) else set()
    ends |= {S.ABANDONED} if copy in (CopyState.POSTED, CopyState.UPLOADING) else set()
    assert set(claimed) == kept | again | ends


def test_a_copy_past_wanted_never_lets_its_chunk_be_packed():
    packed = {S.PLANNED, S.PACKING, S.SEALED, S.EMPTY}
    for before, after in itertools.product(STATES, STATES):
        for copy in set(CopyState) - {CopyState.WANTED}:
            assert not (
                may_move(before, after) and after in packed and is_legal(before, after, copy)
            ), (before, after, copy)


def test_an_illegal_move_names_the_chunk_and_both_states():
    with pytest.raises(IllegalMove, match="chunk c is 'planned' and cannot become 'located'"):
        require_move("c", S.PLANNED, S.LOCATED)


@pytest.mark.parametrize(
    ("state", "hint"),
    [
        (S.POSTED, "'caf run'"),
        (S.EXPIRED, "nothing more happens"),
        (S.LOCATED, "'caf status' shows"),
    ],
)
def test_refused_withdrawal_has_a_hint(state, hint):
    with pytest.raises(IllegalMove) as raised:
        require_move("c", state, S.WITHDRAWN)
    assert hint in raised.value.hint


@pytest.mark.parametrize(("number", "state"), list(enumerate(UNDER_WAY)))
def test_milestones_are_reached_in_the_order_of_the_flow(number, state):
    assert [has_reached(state, milestone) for milestone in UNDER_WAY] == [
        n <= number for n in range(len(UNDER_WAY))
    ]


@pytest.mark.parametrize("state", sorted(FINAL))
def test_a_final_chunk_has_passed_all_milestones_or_none(state):
    assert {has_reached(state, milestone) for milestone in UNDER_WAY} == {
        state in (S.LOCATED, S.DAMAGED, S.EXPIRED)
    }


# --- the ledger, driven ---

KEYS = [f"k{n}" for n in range(6)]
RUNS = ["run-1", "run-2"]


def is_legal(before, after, copy):
    """Return whether a move of nothing but states is legal."""
    try:
        copy_after("c", before, after, copy)
    except IllegalMove:
        return False
    by_a_step = {
        (S.PACKING, S.SEALED),
        (S.PACKING, S.EMPTY),
        (S.POSTING, S.POSTED),
        (S.UPLOADING, S.VERIFIED),
    }
    return may_move(before, after) and (before, after) not in by_a_step | {(S.VERIFIED, S.LOCATED)}


class LedgerMachine(RuleBasedStateMachine):
    """Runs that take the lease of any chunk, do any next step, and crash between any two; an
    operator who ends chunks.

    The model keeps what each object is; the ledger's own account of it must be the same at every
    point.
    """

    def __init__(self, ledger, database_url, path):
        super().__init__()
        self.ledger, self.database_url, self.path = ledger, database_url, path
        self.chunks = {}  # name -> keys that it claims or locates
        self.skipped = set()
        self.past_wanted = set()
        self.leases = []  # (chunk, lease), the last of a chunk being the one that counts
        with psycopg.connect(database_url) as connection:
            connection.execute("TRUNCATE sources, claims, file_locations, leases CASCADE")
        ledger.sources.register(SOURCE, f"s3://{SOURCE}")

    def state(self, name):
        return self.ledger.chunks.get(name).state

    def keys_in(self, states):
        return set().union(
            *(keys for name, keys in self.chunks.items() if self.state(name) in states)
        )

    @rule(keys=st.sets(st.sampled_from(KEYS), min_size=1, max_size=3))
    def plan(self, keys):
        taken = self.keys_in(CLAIMING | IN_GOOD_STANDING)
        if keys & taken:
            with pytest.raises(ClaimConflict):
                register(self.ledger, sorted(keys))
        else:
            (name,) = register(self.ledger, sorted(keys))
            self.chunks[name] = set(keys)

    @precondition(lambda self: self.chunks)
    @rule(
        which=st.integers(0, 99),
        run=st.sampled_from(RUNS),
        steps=st.integers(0, 8),
        odd=st.sets(st.sampled_from(KEYS)),
    )
    def run(self, which, run, steps, odd):
        """A run takes the lease of a chunk whose last run crashed, works for some steps and
        crashes.

        Those that had it before wake up at each step, and get nothing done.
        """
        name = list(self.chunks)[which % len(self.chunks)]
        with psycopg.connect(self.database_url) as connection:
            connection.execute("UPDATE leases SET expires_at = to_timestamp(0)")
        lease = self.ledger.leases.hold(f"chunk/{name}", holder(run))
        lease.__enter__()
        woken = [other for chunk, other in self.leases if chunk == name]
        self.leases.append((name, lease))
        for _ in range(steps):
            for other in woken[-2:]:
                self.step_in_vain(name, other)
            self.step(name, lease, odd & self.chunks[name])

    def step(self, name, lease, unreadable):
        before = self.state(name)
        skips = unreadable if before is S.PACKING else set()
        act = self.next_step(name, lease, before, skips)
        if act is None:
            return
        act()
        if before is S.PACKING:
            self.chunks[name] -= skips
            self.skipped |= skips
        if before is S.VERIFIED:
            self.skipped -= self.chunks[name]

    def step_in_vain(self, name, lease):
        before = self.state(name)
        act = self.next_step(name, lease, before, set())
        if act is not None:
            with pytest.raises(LeaseLost):
                act()
            assert self.state(name) is before

    def next_step(self, name, lease, before, skips):
        keys, ledger = self.chunks[name], self.ledger
        rows = [location(key) for key in sorted(keys - skips)]
        facts = seal_facts(len(rows), ledger.chunks.get(name).object_count - len(rows))
        steps = {
            S.PLANNED: lambda: ledger.moves.move(lease, name, S.PLANNED, S.PACKING),
            S.PACKING: lambda: seal(
                ledger, lease, name, [skip(key) for key in sorted(skips)], rows=rows, facts=facts
            ),
            S.SEALED: lambda: ledger.moves.move(lease, name, S.SEALED, S.POSTING),
            S.POSTING: lambda: ledger.moves.record_posting(lease, name, POSTING),
            S.POSTED: lambda: ledger.moves.move(lease, name, S.POSTED, S.UPLOADING),
            S.UPLOADING: lambda: ledger.replicas.record_verified(lease, name, [Copy("p", "q")]),
            S.VERIFIED: lambda: ledger.moves.load_locations(lease, name),
        }
        return steps.get(before)

    @precondition(lambda self: self.leases)
    @rule(after=st.sampled_from(STATES))
    def operate(self, after):
        name, lease = self.leases[-1]
        row = self.ledger.chunks.get(name)
        if (row.state, after) == (S.SEALED, S.PACKING):  # claims again what the seal skipped
            return
        if is_legal(row.state, after, row.copy_state):
            self.ledger.moves.move(lease, name, row.state, after)
            assert self.state(name) is after
        else:
            with pytest.raises(IllegalMove):
                self.ledger.moves.move(lease, name, row.state, after)
            assert self.ledger.chunks.get(name) == row

    @invariant()
    def no_copy_that_may_be_posted_is_forgotten(self):
        rows = [self.ledger.chunks.get(name) for name in self.chunks]
        past = {row.name for row in rows if row.copy_state not in (None, CopyState.WANTED)}
        assert self.past_wanted <= past
        assert not [
            row
            for row in rows
            if row.name in past and row.state in (S.PLANNED, S.PACKING, S.SEALED, S.EMPTY)
        ]
        self.past_wanted = past

    @invariant()
    def pending_rows_are_there_from_the_seal_until_they_are_located(self):
        for rows in self.ledger.stray_rows.by_chunk(SOURCE):
            is_sealed = (
                rows.state in CLAIMING and self.ledger.chunks.get(rows.chunk).copy_state is not None
            )
            assert rows.pending == (rows.member_count if is_sealed else 0)

    @invariant()
    def every_object_stands_where_its_chunk_is(self):
        found = standing(self.ledger, self.path)
        assert {key for key, what, *_ in found if what == "claimed"} == self.keys_in(CLAIMING)
        assert {key for key, what, *_ in found if what == "located"} == self.keys_in(
            IN_GOOD_STANDING
        )
        assert {key for key, what, *_ in found if what == "skipped"} == self.skipped
        assert len([row for row in found if row[1] != "skipped"]) == len(
            {row[0] for row in found if row[1] != "skipped"}
        )

    @invariant()
    def the_account_is_the_sum_of_the_objects(self):
        account = self.ledger.chunks.account(SOURCE)
        assert account.claimed_objects == len(self.keys_in(CLAIMING))
        located = self.keys_in(IN_GOOD_STANDING)
        assert account.located_objects == len(located)
        assert {key for key in KEYS[:2] if self.ledger.lookup.locate(SOURCE, key)} == located & set(
            KEYS[:2]
        )
        assert sum(account.skipped.values()) == len(self.skipped)

    def teardown(self):
        for _, lease in self.leases:
            lease.__exit__(None, None, None)


@pytest.mark.parametrize("examples", [3, pytest.param(20, marks=pytest.mark.thorough)])
def test_crashing_runs_lose_nothing_and_repeat_nothing(ledger, database_url, tmp_path, examples):
    run_state_machine_as_test(
        lambda: LedgerMachine(ledger, database_url, tmp_path / "standing.parquet"),
        settings=settings(max_examples=examples, stateful_step_count=12),
    )
