"""Copies at several providers of the loopback network, with ordered faults."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from caf_pipeline.errors import (
    ChainUnreachable,
    ChunkTooLarge,
    LeaseLost,
    NoProvider,
    NotProven,
    RootRefused,
    StoredChunkMissing,
    StoreError,
    UploadsRefused,
)
from caf_pipeline.ledger.records import OperatorControls
from caf_pipeline.records import PostRecord
from caf_pipeline.store.jackal.answers import Provider
from caf_pipeline.throttle import Throttle
from caf_pipeline_tests.support.jackal_stores import open_store
from caf_pipeline_tests.support.scripted_provider import answer, scripted
from caf_pipeline_tests.support.tiers import sampled

MIB = 1 << 20


@pytest.fixture
def opened(network):
    opened = open_store(network, proof_seconds=3)
    yield opened
    opened.store.close()


@pytest.fixture
def open_with(network):
    made = []

    def make(**changes):
        made.append(open_store(network, **{"proof_seconds": 3} | changes))
        return made[-1]

    yield make
    for opened in made:
        opened.store.close()


@pytest.fixture
def staged(tmp_path):
    path = tmp_path / "chunk.caf"
    path.write_bytes(os.urandom(300_000))
    return path


@pytest.fixture
def large(tmp_path):
    path = tmp_path / "large.caf"
    path.write_bytes(os.urandom(5 * MIB))
    return path


def silent(_):
    """Report no progress."""


def put(opened, posting, staged, progress=silent):
    opened.store.put(posting, staged, progress)


def sent_since(opened, before) -> Counter:
    return Counter(
        {
            number: count - before[number]
            for number, count in opened.begun().items()
            if count > before[number]
        }
    )


def only(network, *numbers):
    """Let only these providers accept connections."""
    for number in set(range(4)) - set(numbers):
        network.misbehave(provider=number, refuse=True)


def prefer(opened, number):
    """Put this provider first."""
    for other, address in enumerate(opened.network.provider_addresses):
        opened.records.set(address, upload_rate=1e9 if other == number else 1e6)


@pytest.fixture
def everyone_active(open_with, tmp_path):
    """Let each of the four providers prove a file. Others would come last, whatever their rate."""
    path = tmp_path / "everywhere.caf"
    path.write_bytes(os.urandom(100_000))
    assert open_with(copies=4).stored(path)


# --- success ---


def test_each_copy_goes_to_one_provider_once(opened, staged):
    before = opened.begun()
    posting = opened.stored(staged)
    sent = sent_since(opened, before)
    assert sorted(sent.values()) == [1, 1, 1]
    assert opened.providers_of(posting) == set(sent)


def test_stored_file_is_not_sent_again(opened, staged):
    posting = opened.stored(staged)
    before = opened.begun()
    put(opened, posting, staged)
    assert not sent_since(opened, before)


def test_only_a_lost_copy_is_uploaded_again(opened, network, staged):
    posting = opened.stored(staged)
    lost = min(opened.providers_of(posting))
    network.drop_proofs(posting.merkle_root, lost)
    network.delete_blob(lost, posting.merkle_root)
    before = opened.begun()
    put(opened, posting, staged)
    assert sum(sent_since(opened, before).values()) <= 1
    assert len(opened.providers_of(posting)) == 3


def test_rate_is_recorded_despite_slow_order_reads(opened, large, monkeypatch):
    """No order throttled the upload, so its rate is the provider's."""
    sent = Throttle.sent

    def slow(throttle, *args):
        time.sleep(0.1)
        return sent(throttle, *args)

    monkeypatch.setattr(Throttle, "sent", slow)
    opened.stored(large)
    assert sum(record.upload_rate is not None for record in opened.records.all().values()) == 3


@pytest.mark.thorough
def test_throttled_upload_does_not_record_a_rate(open_with, large):
    opened = open_with(bandwidth=MIB, copies=1)
    opened.stored(large)
    assert not [record for record in opened.records.all().values() if record.upload_rate]


def test_rates_of_small_bodies_are_not(opened, staged):
    opened.stored(staged)
    assert not [record for record in opened.records.all().values() if record.upload_rate]


def test_progress_counts_the_chunk_once(opened, large):
    reports = []
    put(opened, opened.posted(large), large, reports.append)
    assert sum(reports) == 5 * MIB
    assert min(reports) >= 0


def test_proof_type_zero_goes_the_same_way(open_with, staged):
    opened = open_with(proof_type=0)
    assert len(opened.providers_of(opened.stored(staged))) == 3


# --- selection ---


def test_fast_providers_are_used_before_slow_ones(opened, network):
    rates = dict(zip(network.provider_addresses, (9e6, 1e5, 8e6, 7e6), strict=True))
    for address, rate in rates.items():
        opened.records.set(address, upload_rate=rate)
    selection = opened.store._selection
    order = selection.to_upload(1000)
    # Earlier tests decide which providers are active. Active ones come first, whatever their rate.
    assert order == sorted(
        rates, key=lambda address: (address not in selection._active, -rates[address])
    )


@pytest.mark.parametrize(
    "conduct",
    sampled(
        [
            {"refuse": True},
            {"fail": 503},
            {"nonsense": "html"},
            {"nonsense": "huge"},
            {"nonsense": "short"},
            {"full": True},
            {"error_status": "disk on fire"},
            {"drop_upload_after": 100_000},
            {"never_prove": True},
        ],
        every=3,
    ),
    ids=lambda conduct: "-".join(map(str, *conduct.items())),
)
@pytest.mark.usefixtures("everyone_active")
def test_one_that_fails_is_left_for_another(opened, network, staged, conduct):
    network.misbehave(provider=1, **conduct)
    prefer(opened, 1)
    assert opened.providers_of(opened.stored(staged)) == {0, 2, 3}
    assert opened.records.all()[network.provider_addresses[1]].failures >= 1


# --- broken uploads ---


def test_broken_but_stored_upload_is_not_repeated(opened, network, staged):
    for number in range(4):
        network.misbehave(provider=number, drop_reply=True)
    before = opened.begun()
    posting = opened.stored(staged)
    assert sorted(sent_since(opened, before).values()) == [1, 1, 1]
    assert len(opened.providers_of(posting)) == 3


def test_chain_confirms_broken_upload_that_the_provider_forgot(opened, network, staged):
    for number in range(4):
        network.misbehave(provider=number, drop_reply=True, lose_jobs=True)
    before = opened.begun()
    opened.stored(staged)
    assert sorted(sent_since(opened, before).values()) == [1, 1, 1]


@pytest.mark.thorough
def test_failed_provider_is_retried_after_all_others(opened, network, staged):
    only(network, 0, 1, 2)
    network.misbehave(provider=0, drop_upload_after=100_000, times=1)
    assert opened.providers_of(opened.stored(staged)) == {0, 1, 2}


@pytest.mark.thorough
def test_next_run_finishes_the_upload_of_a_killed_one(opened, network, large):
    posting = opened.posted(large)
    for number in range(4):
        network.misbehave(provider=number, upload_rate=1e6)
    before = opened.begun()
    script = (
        "import sys; from pathlib import Path\n"
        "from caf_pipeline.store.protocol import PostRecord\n"
        "from caf_pipeline_tests.support.jackal_stores import open_store\n"
        "from types import SimpleNamespace as N\n"
        "lcd, chain_id, root, owner, start, large = sys.argv[1:]\n"
        "opened = open_store(N(lcds=[lcd], chain_id=chain_id))\n"
        "posting = PostRecord(bytes.fromhex(root), owner, int(start), Path(large).stat().st_size)\n"
        "opened.store.put(posting, Path(large), lambda n: print(n, flush=True) if n else None)\n"
    )
    arguments = [
        network.lcd,
        network.chain_id,
        posting.merkle_root.hex(),
        posting.owner,
        str(posting.start),
        str(large),
    ]
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE
    ) as run:
        assert run.stdout.readline()
        run.send_signal(signal.SIGKILL)
    assert sum(sent_since(opened, before).values()) > 0
    network.well_behaved()
    put(opened, posting, large)
    assert len(opened.providers_of(posting)) == 3


@pytest.mark.thorough
def test_upload_continues_after_the_network_was_killed(network, open_with, large):
    opened = open_with(proof_seconds=5)
    posting = opened.posted(large)
    for number in range(4):
        network.misbehave(provider=number, upload_rate=2e6)
    killed = []

    def kill(sent):
        if sent and not killed:
            killed.append(sent)
            network.kill()
            network.start()
            network.well_behaved()

    put(opened, posting, large, kill)
    assert killed
    assert len(opened.providers_of(posting)) == 3


# --- false reports ---


@pytest.mark.thorough
def test_too_few_proofs_list_proven_and_unproven_providers(opened, network, staged):
    only(network, 0, 1, 2)
    network.misbehave(provider=1, never_prove=True)
    posting = opened.posted(staged)
    with pytest.raises(NotProven) as raised:
        put(opened, posting, staged)
    first, second, third, fourth = network.provider_addresses
    message = str(raised.value)
    holders, others = message.split("; ", 1)
    assert "2 of 3 copies" in holders
    assert {first in holders, third in holders} == {True}
    assert f"{second} is not listed" in others
    assert f"{fourth} is unreachable" in others
    assert not raised.value.permanent


def test_fewer_required_copies_are_enough_where_so_set(open_with, network, staged):
    only(network, 0, 1)
    opened = open_with(required_copies=2)
    assert opened.providers_of(opened.stored(staged)) == {0, 1}


def test_provider_with_wrong_bytes_gets_the_file_once_more(opened, network, staged):
    only(network, 0, 1, 2)
    network.misbehave(provider=2, flip_byte=-1)
    posting, before = opened.posted(staged), opened.begun()
    with pytest.raises(NotProven, match="bytes 0 to"):
        put(opened, posting, staged)
    assert sent_since(opened, before) == Counter({0: 1, 1: 1, 2: 2})


def test_listed_provider_without_the_bytes_gets_them_again(opened, network, staged):
    posting = opened.stored(staged)
    lost = min(opened.providers_of(posting))
    network.delete_blob(lost, posting.merkle_root)
    before = opened.begun()
    put(opened, posting, staged)
    assert sent_since(opened, before) == Counter({lost: 1})


def test_a_provider_without_a_place_is_no_failure(open_with, network, staged):
    posting = open_with(copies=3).stored(staged)
    opened = open_with(copies=3, required_copies=2)
    before = opened.begun()
    network.misbehave(provider=min(opened.providers_of(posting)), fail=500)
    put(opened, posting, staged)
    assert not sent_since(opened, before)


@pytest.mark.usefixtures("everyone_active")
def test_provider_without_a_slot_is_not_counted_failed(opened, network, staged):
    network.misbehave(provider=1, error_status="Can't claim")
    prefer(opened, 1)
    assert opened.providers_of(opened.stored(staged)) == {0, 2, 3}
    assert opened.records.all()[network.provider_addresses[1]].failures == 0


def test_bytes_that_were_not_posted_are_refused_by_all(opened, staged):
    posting = opened.posted(staged)
    staged.write_bytes(os.urandom(300_000))
    with pytest.raises(RootRefused):
        put(opened, posting, staged)
    assert not opened.records.all()


# --- no provider, no file ---


def test_unreachable_providers_raise_no_provider(opened, network, staged):
    posting = opened.posted(staged)
    only(network)
    with pytest.raises(NoProvider):
        put(opened, posting, staged)


def test_full_providers_raise_no_provider(opened, network, staged):
    posting = opened.posted(staged)
    for number in range(4):
        network.misbehave(provider=number, full=True)
    with pytest.raises(NoProvider, match="no room"):
        put(opened, posting, staged)


def test_a_chain_that_goes_away_is_not_held_against_providers(opened, network, staged):
    posting = opened.posted(staged)
    network.misbehave(lcd=0, refuse=True)
    network.misbehave(lcd=1, refuse=True)
    with pytest.raises(ChainUnreachable):
        put(opened, posting, staged)
    assert not opened.records.all()


def test_a_file_that_the_chain_does_not_have_is_missing(opened, staged):
    with pytest.raises(StoredChunkMissing, match="has no file"):
        put(opened, PostRecord(b"\2" * 32, opened.store.wallet.address, 1, 300_000), staged)


def test_missing_or_resized_staged_file_is_not_sent(opened, staged):
    posting, before = opened.posted(staged), opened.begun()
    os.truncate(staged, 1000)
    with pytest.raises(StoreError, match="has 1000 bytes"):
        put(opened, posting, staged)
    staged.unlink()
    with pytest.raises(StoreError, match="missing"):
        put(opened, posting, staged)
    assert not sent_since(opened, before)


# --- too large, too slow ---


def test_an_upload_that_would_take_too_long_is_not_begun(opened, network, staged):
    posting, before = opened.posted(staged), opened.begun()
    for address in network.provider_addresses:
        opened.records.set(address, upload_rate=1000.0)
    with pytest.raises(ChunkTooLarge) as raised:
        put(opened, posting, staged)
    assert raised.value.fitting_bytes == 1000 * 60 * 0.9
    assert not sent_since(opened, before)


def test_slow_provider_is_skipped_if_enough_are_fast(opened, network, staged):
    opened.records.set(network.provider_addresses[1], upload_rate=1000.0)
    assert opened.providers_of(opened.stored(staged)) == {0, 2, 3}


def test_upload_impossible_within_bandwidth_does_not_start(open_with, staged):
    posting, opened = open_with().posted(staged), open_with(bandwidth=1000)
    before = opened.begun()
    with pytest.raises(UploadsRefused, match="limit is 1000 B/s"):
        put(opened, posting, staged)
    assert not sent_since(opened, before)


def test_a_chunk_that_is_there_needs_no_bandwidth(open_with, staged):
    posting = open_with().stored(staged)
    put(open_with(bandwidth=1000), posting, staged)


def test_low_bandwidth_uploads_to_one_provider_at_a_time(open_with):
    opened = open_with(bandwidth=1000)
    uploads = opened.store._uploads
    assert [uploads.parallel_uploads(size_bytes) for size_bytes in (10_000, 20_000, 50_000)] == [
        3,
        2,
        1,
    ]


# --- the operator, the lease ---


@pytest.mark.thorough
def test_while_paused_no_byte_is_sent(opened, staged):
    posting, before = opened.posted(staged), opened.begun()
    opened.pause()
    ticks, states = [], []

    def look(_):
        ticks.append(1)
        if len(ticks) == 4:
            states.append(sent_since(opened, before))
            opened.board.controls = OperatorControls()

    put(opened, posting, staged, look)
    assert states == [Counter()]
    assert len(opened.providers_of(posting)) == 3


@pytest.mark.thorough
def test_a_pause_stops_an_upload_in_its_middle(open_with, large):
    opened = open_with(bandwidth=MIB // 2, copies=1)
    posting = opened.posted(large)
    reports, when_paused, when_released = [], [], []

    def look(sent):
        reports.append(sent)
        if sum(reports) and not when_paused:
            opened.board.controls = OperatorControls(paused="stop")
            when_paused.append(len(reports))
        # Orders take effect within seconds. After that, no more bytes may come.
        elif when_paused and not when_released and len(reports) >= when_paused[0] + 14:
            when_released.append(sum(reports[-6:]))
            opened.board.controls = OperatorControls(bandwidth=0)

    put(opened, posting, large, look)
    assert when_released == [0]
    assert sum(reports) == 5 * MIB


def test_a_lost_lease_ends_all_uploads(opened, network, large):
    posting = opened.posted(large)
    for number in range(4):
        network.misbehave(provider=number, upload_rate=100_000)

    def lost(sent):
        if sent:
            raise LeaseLost("another run has it")

    with pytest.raises(LeaseLost):
        put(opened, posting, large, lost)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("upload")]
    assert not opened.providers_of(posting)


@pytest.mark.thorough
def test_a_lost_lease_ends_the_wait_for_proofs(open_with, network, staged):
    opened = open_with(proof_seconds=900)
    posting = opened.posted(staged)
    for number in range(4):
        network.misbehave(provider=number, never_prove=True)
    reports = []

    def lost(sent):
        reports.append(sent)
        if len(reports) > 6:
            raise LeaseLost("another run has it")

    with pytest.raises(LeaseLost):
        put(opened, posting, staged, lost)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("upload")]


# --- other providers ---


@pytest.mark.thorough
def test_provider_with_a_lagging_node_gets_the_file_again(opened, network, staged):
    only(network, 0, 1, 2)
    network.misbehave(provider=1, error_status="No such file on chain", times=1)
    assert opened.providers_of(opened.stored(staged)) == {0, 1, 2}


def test_a_redirecting_provider_is_not_followed(opened, network, staged, monkeypatch):
    with scripted(answer(302, Location=network.providers[0])) as script:
        listed = [Provider(address, script.url, 0) for address in network.provider_addresses]
        monkeypatch.setattr(opened.store.chain, "providers", lambda: listed)
        monkeypatch.setattr(opened.store.chain, "active_providers", frozenset)
        posting, before = opened.posted(staged), opened.begun()
        with pytest.raises(NotProven):
            put(opened, posting, staged)
    assert not sent_since(opened, before)
