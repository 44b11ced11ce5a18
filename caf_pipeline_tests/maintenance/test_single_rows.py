"""Single rows of located chunks: missing rows come back, and altered rows blame no store."""

import dataclasses
import os

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import IdentityMissing, IntegrityError, RowAltered
from caf_pipeline.maintenance import rebuild
from caf_pipeline.maintenance.doctor.findings import Actor, Kind
from caf_pipeline.maintenance.rebuild import FileKind
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.records import posting_of
from caf_pipeline.retrieval.check import check_objects
from caf_pipeline.retrieval.listing import list_objects
from caf_pipeline.run_context import Lazy
from caf_pipeline.steps.inventories import take_inventory
from caf_pipeline.steps.planning import cut_plan
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.support.doctors import examined
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import new_ledger, rows_of  # noqa: F401 - a fixture
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.private_contexts import IDENTITY, a_private_context
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    archive_chunk,
    archive_everything,
    object_bytes,
)

BODIES = {f"key-{number}": os.urandom(50_000) for number in range(6)} | {"empty": b""}
ONE = "file_path = 'key-3'"


@pytest.fixture
def context(tmp_path, ledger):
    context = a_run_context(tmp_path, MemorySource(dict(BODIES)), ledger)
    archive_everything(context)
    return context


def change(context, *statements):
    with connected(context.ledger.database) as connection:
        for statement in statements:
            connection.execute(statement)


def rebuilt(context, **options):
    return [
        (outcome.finding.kind, outcome.rows)
        for outcome in rebuild.rebuild(context, **options)
        if outcome.finding.kind is not FileKind.KNOWN
    ]


def of_rows(context):
    """Return the doctor's findings about rows that need an operator."""
    return [
        finding
        for finding in examined(context)
        if finding.kind is Kind.ROWS and finding.actor is Actor.OPERATOR
    ]


def stored_file(context):
    (chunk,) = context.ledger.chunks.list("src")
    return context.store._chunk_path(posting_of(chunk))


@pytest.mark.parametrize("rows", [ONE, "file_path = 'empty'", "true"])
def test_missing_rows_come_back_from_the_chunk(context, rows):
    before = rows_of(context.ledger)
    change(context, f"DELETE FROM file_locations WHERE {rows}")
    (finding,) = of_rows(context)
    assert "caf rebuild" in finding.remedy
    ((kind, missing),) = rebuilt(context, dry_run=True)
    assert (kind, missing) == (FileKind.INCOMPLETE, None)
    assert rows_of(context.ledger) != before
    ((kind, missing),) = rebuilt(context)
    assert (kind, missing) == (FileKind.INCOMPLETE, len(BODIES) if rows == "true" else 1)
    assert rows_of(context.ledger) == before
    assert not context.ledger.chunks.list("src")[
        0
    ].unread  # the seal's hash of the tail was compared
    assert of_rows(context) == []
    assert rebuilt(context) == []
    assert all(object_bytes(context, key) == content for key, content in BODIES.items())


def test_missing_row_of_a_private_source_needs_an_identity(tmp_path, ledger):
    def context(identity=None):
        return a_private_context(tmp_path, MemorySource(dict(BODIES)), ledger, identity=identity)

    archive_everything(context())
    assert rebuilt(context()) == []
    before = rows_of(ledger)
    change(context(), f"DELETE FROM file_locations WHERE {ONE}")
    with pytest.raises(IdentityMissing):
        rebuilt(context())
    assert rows_of(ledger) != before
    assert rebuilt(context(IDENTITY)) == [(FileKind.INCOMPLETE, 1)]
    assert rows_of(ledger) == before


def test_object_that_a_new_chunk_claims_stays_with_that_chunk(context):
    change(context, f"DELETE FROM file_locations WHERE {ONE}")
    (chunk,) = cut_plan(context, take_inventory(context)).chunks
    assert rebuilt(context) == [(FileKind.CONFLICTING, None)]
    archive_chunk(context, chunk.name)
    assert context.ledger.chunks.get(chunk.name).state is ChunkState.LOCATED
    assert rebuilt(context) == [(FileKind.INCOMPLETE, 0)]
    assert of_rows(context) == []
    change(context, "DELETE FROM file_locations WHERE file_path = 'key-1'")
    assert len(of_rows(context)) == 1
    assert rebuilt(context) == [(FileKind.INCOMPLETE, 1)]
    assert of_rows(context) == []


def test_row_that_a_rebuilt_ledger_lost_is_noticed(context, new_ledger):
    lost = dataclasses.replace(context, lazy_ledger=Lazy.of(new_ledger()))
    assert [kind for kind, _ in rebuilt(lost)] == [FileKind.CHUNK]
    assert of_rows(lost) == []
    (chunk,) = lost.ledger.chunks.list("src")
    change(lost, "UPDATE caf_files SET unread = NULL")
    change(lost, f"DELETE FROM file_locations WHERE {ONE}")
    assert len(of_rows(lost)) == 1
    assert rebuilt(lost) == [(FileKind.INCOMPLETE, 1)]
    assert lost.ledger.chunks.get(chunk.name).unread  # its root was not compared this time


def test_restored_row_ends_an_earlier_full_read(context):
    (chunk,) = context.ledger.chunks.list("src")
    change(
        context,
        "INSERT INTO full_reads (caf_file_id, store, provider, merkle_root) "
        "SELECT caf_file_id, store, 'p', merkle_root FROM chunk_copies",
        f"DELETE FROM file_locations WHERE {ONE}",
    )
    assert context.ledger.chunks.get(chunk.name).read_back_at is not None
    rebuilt(context)
    assert context.ledger.chunks.get(chunk.name).read_back_at is None


def test_rows_of_a_damaged_manifest_are_not_restored(context):
    (chunk,) = context.ledger.chunks.list("src")
    before = rows_of(context.ledger)
    change(context, f"DELETE FROM file_locations WHERE {ONE}")
    corrupt(stored_file(context), chunk.tail_start + 2_000)
    ((kind, rows),) = rebuilt(context)
    assert kind not in rebuild.NOTHING_MISSING
    assert rows is None
    assert len(rows_of(context.ledger)["file_locations"]) < len(before["file_locations"])


ALTERED = [
    "sha256 = sha256('other')",
    "start_byte = start_byte + 1, end_byte = end_byte + 1",
    "end_byte = end_byte - 1",
]


@pytest.mark.parametrize("alteration", ALTERED)
def test_altered_row_is_not_blamed_on_the_store(context, alteration):
    (chunk,) = context.ledger.chunks.list("src")
    change(context, f"UPDATE file_locations SET {alteration} WHERE {ONE}")
    with pytest.raises(RowAltered, match="key-3") as refused:
        object_bytes(context, "key-3")
    assert "caf repair" not in refused.value.hint
    checked = check_objects(list_objects(context.ledger.lookup, "src"), context.store)
    assert {result.location.row.key: type(result.error) for result in checked if result.error} == {
        "key-3": RowAltered
    }
    assert prove_chunk(context, chunk.name).proven
    assert context.ledger.chunks.get(chunk.name).state is ChunkState.LOCATED


def test_altered_row_of_a_private_chunk_is_told_from_damage(tmp_path, ledger):
    context = a_private_context(tmp_path, MemorySource(dict(BODIES)), ledger, identity=IDENTITY)
    archive_everything(context)
    change(context, f"UPDATE file_locations SET {ALTERED[0]} WHERE {ONE}")
    with pytest.raises(RowAltered):
        object_bytes(context, "key-3")


def test_damaged_bytes_are_blamed_on_the_store(context):
    location = context.ledger.lookup.locate("src", "key-3")
    corrupt(stored_file(context), location.row.start_byte + 10)
    with pytest.raises(IntegrityError) as damaged:
        object_bytes(context, "key-3")
    assert not isinstance(damaged.value, RowAltered)
    assert "caf repair" in damaged.value.hint


def test_rebuild_reports_altered_rows_and_leaves_them(context):
    change(
        context,
        f"DELETE FROM file_locations WHERE {ONE}",
        "UPDATE file_locations SET sha256 = sha256('other') WHERE file_path = 'key-1'",
    )
    altered = [
        outcome for outcome in rebuild.rebuild(context) if outcome.finding.kind is FileKind.ALTERED
    ]
    assert [(outcome.rows, "key-1" in outcome.finding.why) for outcome in altered] == [(1, True)]
    with pytest.raises(RowAltered):
        object_bytes(context, "key-1")
    change(context, "DELETE FROM file_locations WHERE file_path = 'key-1'")
    assert rebuilt(context) == [(FileKind.INCOMPLETE, 1)]
    assert object_bytes(context, "key-1") == BODIES["key-1"]
