"""Sources: their address, their archive id, and how they are removed."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import HeldByOther, IllegalMove, LeaseLost, LedgerError, NotLocated
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.records import Skip, plan_lease
from caf_pipeline_tests.support.ledger_rows import (
    SOURCE,
    VERSION,
    archive,
    batches,
    bring_to,
    chunk_in,
    claims,
    end,
    held,
    holder,
    location,
    plan_record,
    planned,
    register,
    register_plan,
    remove,
    restore,
    restored,
    skip,
)


def address_in(ledger):
    """Return the address of the only source."""
    (archive,) = ledger.sources.archives()
    return archive.address


def test_an_address_is_replaced_until_there_is_a_chunk(ledger):
    ledger.sources.register(SOURCE, "s3://typo/")
    ledger.skips.record(SOURCE, [Skip("key", "etag:1:1", SkipReason.TOO_LARGE, "", "1", 1)])
    ledger.rebuilds.begin(SOURCE)
    assert ledger.sources.address(SOURCE) is None
    ledger.sources.register(SOURCE, "s3://a/")
    assert address_in(ledger) == "s3://a/"
    assert ledger.chunks.account(SOURCE).skipped == {}
    assert ledger.rebuilds.began_at(SOURCE) is None


def test_address_of_a_planning_run_is_kept(ledger):
    ledger.sources.register(SOURCE, "s3://a/")
    with ledger.leases.hold(plan_lease(SOURCE), holder()) as lease:
        with pytest.raises(HeldByOther):
            ledger.sources.register(SOURCE, "s3://b/")
        ledger.sources.register(SOURCE, "s3://b/", lease=lease)
    assert address_in(ledger) == "s3://b/"


def test_another_address_under_the_same_name_is_refused(ledger):
    ledger.sources.register(SOURCE, "s3://a/")
    ledger.sources.register(SOURCE, "s3://a/")
    register_plan(ledger, plan_record(), [planned(1, ["a"])], claims((1, "a")))
    with pytest.raises(LedgerError, match="s3://b/"):
        ledger.sources.register(SOURCE, "s3://b/")
    assert ledger.lookup.sources() == [SOURCE]
    assert address_in(ledger) == "s3://a/"


def test_each_source_gets_its_own_archive_id(ledger):
    for name in (SOURCE, "another"):
        ledger.sources.register(name, "s3://a/")
    ids = [ledger.sources.archive_id(name) for name in (SOURCE, "another")]
    assert all(re.fullmatch("[0-9a-f]{32}", archive_id) for archive_id in ids)
    assert len({*ids}) == 2


def test_source_keeps_its_archive_id(ledger):
    assert ledger.sources.archive_id(SOURCE) is None
    ledger.sources.register(SOURCE, "s3://a/")
    archive_id = ledger.sources.archive_id(SOURCE)
    ledger.sources.register(SOURCE, "s3://a/")
    assert ledger.sources.archive_id(SOURCE) == archive_id


def test_concurrent_registrations_make_one_archive_id(ledger):
    def register_source(_):
        ledger.sources.register(SOURCE, "s3://a/")
        return ledger.sources.archive_id(SOURCE)

    with ThreadPoolExecutor(4) as pool:
        assert len({*pool.map(register_source, range(8))}) == 1


def test_id_of_stored_archive_replaces_that_of_an_empty_source(ledger):
    ledger.sources.register(SOURCE, "s3://a/")
    log = ledger.transactions(holder())
    log.record_look("account", ledger.sources.archive_id(SOURCE), 5, 1)
    ledger.sources.restore_archive_id(SOURCE, "a" * 32)
    assert ledger.sources.archive_id(SOURCE) == "a" * 32
    assert ledger.rebuilds.unknown_posts(SOURCE) == 0
    register(ledger, ["a"])
    ledger.sources.restore_archive_id(SOURCE, "b" * 32)
    assert ledger.sources.archive_id(SOURCE) == "a" * 32


def test_restored_chunk_keeps_the_archive_id_of_its_post(ledger):
    ledger.sources.register(SOURCE, "s3://a/")
    source_id = ledger.sources.archive_id(SOURCE)
    for number, archive_id in enumerate([source_id, "b" * 32], 1):
        key = f"key-{number}"
        chunk = restored(number, [key], archive_id=archive_id)
        restore(ledger, chunk, batches([location(key)]), ())
        assert ledger.chunks.get(chunk.name).archive_id == archive_id
    assert ledger.sources.archive_ids(SOURCE) == {source_id, "b" * 32}
    assert {chunk.archive_id for chunk in ledger.chain_listings.located_copies()[1]} == {
        source_id,
        "b" * 32,
    }


def test_archives_are_set_aside_until_the_address_changes(ledger):
    ledger.sources.register(SOURCE, "s3://a/")
    ledger.sources.set_aside(SOURCE, ["b" * 32])
    ledger.sources.set_aside(SOURCE, ["a" * 32])
    assert ledger.sources.ids_set_aside(SOURCE) == {"a" * 32, "b" * 32}
    ledger.sources.register(SOURCE, "s3://b/")
    assert ledger.sources.ids_set_aside(SOURCE) == set()


def test_a_source_with_nothing_stored_is_removed(ledger):
    names = register(ledger, ["a"], ["b"], ["c"], ["d"], skips=[skip("s")])
    kept = archive(ledger, ["a"], source="another")
    bring_to(ledger, names[1], ChunkState.PACKING)
    bring_to(ledger, names[2], ChunkState.SEALED)
    end(ledger, names[3], ChunkState.PARKED, ChunkState.WITHDRAWN)
    ledger.read_failures.count(names[1], [("b", VERSION)], "run-1")
    removable = ledger.removal.removable(SOURCE)
    assert (removable.address, removable.plans, removable.chunks) == (f"s3://{SOURCE}", 1, 4)
    remove(ledger)
    assert ledger.lookup.sources() == ["another"]
    assert [chunk.name for chunk in ledger.chunks.list()] == [kept]
    with pytest.raises(NotLocated):
        ledger.removal.removable(SOURCE)


def test_a_removed_source_may_be_planned_again(ledger):
    plan = plan_record()
    epochs = []
    for address in ("s3://typo/", "s3://right/"):
        ledger.sources.register(SOURCE, address)
        register_plan(ledger, plan, [planned(1, ["a"])], claims((1, "a")))
        (chunk,) = ledger.chunks.list(SOURCE)
        bring_to(ledger, chunk.name, ChunkState.SEALED)
        epochs.append(ledger.chunks.get(chunk.name).epoch)
        if address == "s3://typo/":
            remove(ledger)
    assert epochs[1] > epochs[0]
    end(ledger, chunk.name, ChunkState.POSTING)
    with pytest.raises(IllegalMove):
        remove(ledger)


def test_a_source_with_an_intended_chunk_goes_after_its_withdrawal(ledger):
    chunk = chunk_in(ledger, ChunkState.POSTING)
    assert ledger.removal.removable(SOURCE).intended == [chunk]
    with pytest.raises(IllegalMove, match=chunk):
        remove(ledger)
    with pytest.raises(LedgerError):
        ledger.sources.register(SOURCE, "s3://b/")
    end(ledger, chunk, ChunkState.WITHDRAWN)
    assert ledger.removal.removable(SOURCE).intended == []
    remove(ledger)


def test_given_up_chunks_let_the_address_and_the_archive_change(ledger):
    register(ledger, ["a"])
    (withdrawn,) = (chunk.name for chunk in ledger.chunks.list(SOURCE))
    end(ledger, withdrawn, ChunkState.WITHDRAWN)
    ledger.sources.register(SOURCE, "s3://b/")
    ledger.sources.restore_archive_id(SOURCE, "b" * 32)
    assert (address_in(ledger), ledger.sources.archive_id(SOURCE)) == ("s3://b/", "b" * 32)


@pytest.mark.parametrize("state", ["posted", "uploading", "verified", "located"])
def test_a_source_with_a_stored_chunk_stays(ledger, state):
    chunk = chunk_in(ledger, ChunkState(state))
    with pytest.raises(IllegalMove, match=chunk):
        ledger.removal.removable(SOURCE)
    with pytest.raises(IllegalMove, match=chunk):
        remove(ledger)
    assert ledger.chunks.get(chunk).state == state


def test_a_source_whose_parked_chunk_was_posted_stays(ledger):
    chunk = chunk_in(ledger, ChunkState.POSTED)
    end(ledger, chunk, ChunkState.PARKED)
    with pytest.raises(IllegalMove, match=chunk):
        remove(ledger)


def test_a_source_that_a_run_works_on_stays(ledger):
    first, second = register(ledger, ["a"], ["b"])
    with held(ledger, second), pytest.raises(HeldByOther):
        remove(ledger)
    with ledger.leases.hold(plan_lease(SOURCE), holder()), pytest.raises(HeldByOther):
        ledger.removal.removable(SOURCE)
    remove(ledger)
    with pytest.raises(NotLocated), held(ledger, first):
        pass


def test_a_source_whose_rebuild_goes_on_stays(ledger):
    ledger.sources.register(SOURCE, "s3://a/")
    ledger.rebuilds.begin(SOURCE)
    with pytest.raises(LedgerError, match="rebuild"):
        remove(ledger)
    ledger.rebuilds.end(SOURCE)
    remove(ledger)
    assert ledger.lookup.sources() == []


def test_a_removal_without_its_lease_removes_nothing(ledger):
    register(ledger, ["a"])
    with ledger.leases.hold(plan_lease(SOURCE), holder()) as lease:
        pass
    with pytest.raises(LeaseLost):
        ledger.removal.remove(lease, SOURCE)
    assert ledger.lookup.sources() == [SOURCE]
