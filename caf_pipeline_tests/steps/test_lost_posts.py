"""A chunk that was posted is claimed or archived; otherwise its source stops, and pays nothing."""

import contextlib
import os

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import LedgerError, StoredAlready
from caf_pipeline.maintenance.doctor.findings import Actor, Kind
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline_tests.support.doctors import examined, mended
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import archive_chunk, archive_everything


@pytest.fixture
def context(ledger, wallet, jackal_context):
    source = MemorySource({f"key-{number}": os.urandom(5_000) for number in range(5)})
    return jackal_context(source, ledger, jackal={"mnemonic": wallet.words})


@contextlib.contextmanager
def damaged_view(database, word):
    """Damage a word of the view of chunks, as a flipped bit in a backup may do."""
    with connected(database) as connection:
        view = connection.execute("SELECT pg_get_viewdef('chunks'::regclass)").scalar_one()
        damaged = view.replace(f"'{word}'::text", f"'{word[:-1]}e'::text")
        assert damaged != view
        connection.execute(f"CREATE OR REPLACE VIEW chunks AS {damaged}")
    try:
        yield
    finally:
        with connected(database) as connection:
            connection.execute(f"CREATE OR REPLACE VIEW chunks AS {view}")


def run(context):
    planning.cut_plan(context, inventories.take_inventory(context))


def lost(context):
    return context.ledger.transactions(context.holder).lost_posts(context.archive_id)


def posts_of(context):
    return [file.posting.start for file in context.store.posted(context.archive_id)]


def transactions_of(database):
    with connected(database) as connection:
        return connection.execute("SELECT count(*) FROM transactions").scalar_one()


def test_damaged_view_makes_no_plan_pay_again(context, database):
    (name,) = archive_everything(context)
    assert lost(context) == []
    with damaged_view(database, "verified"):
        for new_archive in (False, True):
            with pytest.raises(StoredAlready, match=name) as refused:
                planning.cut_plan(
                    context, inventories.take_inventory(context), new_archive=new_archive
                )
        assert "caf doctor" in refused.value.hint
        findings = [finding for finding in examined(context) if finding.name == name]
        assert [(finding.kind, finding.actor) for finding in findings] == [
            (Kind.ROWS, Actor.OPERATOR)
        ]
    run(context)
    assert len(posts_of(context)) == 1


@pytest.mark.parametrize(
    ("word", "before", "step"),
    [
        ("sealed", ChunkState.SEALED, chunk_steps.post_file),
        ("verified", ChunkState.VERIFIED, chunk_steps.load_locations),
    ],
)
def test_a_move_that_a_view_shows_wrongly_is_not_made(context, database, word, before, step):
    (chunk,) = planning.cut_plan(context, inventories.take_inventory(context)).chunks
    with damaged_view(database, word):
        for _ in range(3):
            run(context)
            with pytest.raises(LedgerError, match=chunk.name):
                archive_chunk(context, chunk.name)
    assert context.ledger.chunks.get(chunk.name).state is before
    step(context, chunk.name)
    assert len(posts_of(context)) == 1


@pytest.mark.parametrize("rows", ["true", "file_path = 'key-1'"])
def test_a_posted_chunk_without_claims_stops_its_source(context, database, rows):
    (chunk,) = planning.cut_plan(context, inventories.take_inventory(context)).chunks
    archive_chunk(context, chunk.name, until=chunk_steps.post_file)
    with connected(database) as connection:
        connection.execute(f"DELETE FROM claims WHERE {rows}")
    with pytest.raises(StoredAlready, match=chunk.name):
        run(context)
    assert (Kind.ROWS, chunk.name, "claimed again") in mended(context)
    run(context)
    archive_chunk(context, chunk.name)
    assert context.ledger.chunks.get(chunk.name).state is ChunkState.LOCATED
    assert len(posts_of(context)) == 1


def test_a_lost_post_whose_objects_others_claim_needs_an_operator(context, database):
    (chunk,) = planning.cut_plan(context, inventories.take_inventory(context)).chunks
    archive_chunk(context, chunk.name, until=chunk_steps.post_file)
    context.objects.bodies["later"] = os.urandom(5_000)
    (other,) = planning.cut_plan(context, inventories.take_inventory(context)).chunks
    with connected(database) as connection:
        connection.execute(
            "UPDATE claims SET caf_file_id = (SELECT max(caf_file_id) FROM caf_files)"
        )
    assert lost(context) == [chunk.name]
    (finding,) = [finding for finding in examined(context) if finding.kind is Kind.ROWS]
    assert finding.mend().actor is Actor.OPERATOR
    assert lost(context) == [chunk.name]
    assert other.name != chunk.name


def test_nothing_is_signed_for_a_source_with_a_lost_post(context, database):
    (first,) = planning.cut_plan(context, inventories.take_inventory(context)).chunks
    archive_chunk(context, first.name, until=chunk_steps.post_file)
    context.objects.bodies["later"] = os.urandom(5_000)
    (second,) = planning.cut_plan(context, inventories.take_inventory(context)).chunks
    archive_chunk(context, second.name, until=chunk_steps.seal_chunk)
    with chunk_steps.lease_chunk(context, second.name) as lease:
        context.ledger.moves.move(lease, second.name, ChunkState.SEALED, ChunkState.POSTING)
        with connected(database) as connection:
            connection.execute("DELETE FROM claims WHERE file_path = 'key-1'")
        chunk = chunk_steps.to_store(context, lease, context.ledger.chunks.get(second.name))
        with pytest.raises(StoredAlready, match=first.name):
            context.store.post(chunk, context.ledger.transactions(context.holder))
    assert transactions_of(database) == len(posts_of(context)) == 1


def test_a_live_transaction_counts_as_a_post(context, database):
    (chunk,) = planning.cut_plan(context, inventories.take_inventory(context)).chunks
    archive_chunk(context, chunk.name, until=chunk_steps.post_file)
    with connected(database) as connection:
        connection.execute(
            "UPDATE chunk_copies SET state = 'posting', owner = NULL, start = NULL, "
            "posted_at = NULL, archive_id = repeat('f', 32); DELETE FROM claims"
        )
    assert lost(context) == [chunk.name]
    log = context.ledger.transactions(context.holder)
    assert log.lost_posts("f" * 32) == [chunk.name]  # as a post of an older archive of the source
    assert log.lost_posts("e" * 32) == []
