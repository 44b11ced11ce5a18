"""Copies of chunks on Postgres: the database's constraints, and the effect of each move."""

from dataclasses import replace

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import IllegalMove, LedgerError
from caf_pipeline.ledger.engine import LedgerEngine
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline_tests.support.ledger_rows import (
    POSTING,
    ROOT,
    SOURCE,
    archive,
    batches,
    bring_to,
    chunk_in,
    end,
    held,
    holder,
    location,
    register,
    restore,
    restored,
    seal,
    seal_facts,
)
from caf_pipeline_tests.support.postgres import connected

S = ChunkState


def change(database, *statements):
    with LedgerEngine(database).begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def copies(database):
    """Return chunk, store, state, damage and start of each copy."""
    with connected(database) as connection:
        statement = (
            "SELECT name, store, c.state, damage, start FROM chunk_copies AS c JOIN "
            "caf_files USING (caf_file_id) ORDER BY 1"
        )
        return [tuple(row) for row in connection.execute(statement)]


POSTED = "owner = 'o', start = 1, posted_at = now()"
REFUSED = {
    "a posted chunk that is packed again": (S.POSTED, "UPDATE caf_files SET state = 'packing'"),
    "a posted chunk that is planned": (S.POSTED, "UPDATE caf_files SET state = 'planned'"),
    "a posted chunk that is withdrawn": (S.POSTED, "UPDATE caf_files SET state = 'withdrawn'"),
    "a posting chunk that is abandoned": (S.POSTING, "UPDATE caf_files SET state = 'abandoned'"),
    "a verified chunk that is withdrawn": (S.VERIFIED, "UPDATE caf_files SET state = 'withdrawn'"),
    "an uploaded chunk that is located": (
        S.UPLOADING,
        "UPDATE caf_files SET state = 'located', located_at = now()",
    ),
    "a planned chunk that is sealed": (
        S.PLANNED,
        "UPDATE caf_files SET state = 'sealed', sealed_at = now()",
    ),
    "a planned chunk that is located": (
        S.PLANNED,
        "UPDATE caf_files SET state = 'located', sealed_at = now(), located_at = now()",
    ),
    "a located chunk without a copy": (S.LOCATED, "DELETE FROM replicas; DELETE FROM chunk_copies"),
    "a located chunk whose copy is uploaded": (
        S.LOCATED,
        "UPDATE chunk_copies SET state = 'uploading'",
    ),
    "a located chunk whose copy is retired": (
        S.LOCATED,
        "UPDATE chunk_copies SET state = 'retired'",
    ),
    "a sealed chunk whose copy is damaged": (
        S.VERIFIED,
        "UPDATE chunk_copies SET state = 'damaged'",
    ),
    "a posted copy without a place": (S.POSTED, "UPDATE chunk_copies SET start = NULL"),
    "a wanted copy with a place": (S.SEALED, f"UPDATE chunk_copies SET {POSTED}"),
    "a posting copy with a place": (S.POSTING, f"UPDATE chunk_copies SET {POSTED}"),
    "a copy verified at no time": (S.UPLOADING, "UPDATE chunk_copies SET state = 'verified'"),
    "damage of a copy that is right": (S.LOCATED, "UPDATE chunk_copies SET damage = 'why'"),
    "a located chunk without the time": (S.LOCATED, "UPDATE caf_files SET located_at = NULL"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_database_refuses(ledger, database, what):
    state, statement = REFUSED[what]
    (chunk,) = register(ledger, ["a"])
    if state is not S.PLANNED:
        bring_to(ledger, chunk, state)
    with pytest.raises(IllegalMove):
        change(database, *statement.split("; "))
    assert ledger.chunks.get(chunk).state is state


def test_a_planned_chunk_has_no_copy(ledger, database):
    (chunk,) = register(ledger, ["a"])
    insert = "INSERT INTO chunk_copies (caf_file_id, store, merkle_root, proof_type)"
    with pytest.raises(IllegalMove, match=chunk):
        change(database, f"{insert} SELECT caf_file_id, 's', '', 0 FROM caf_files")


@pytest.mark.parametrize(
    "insert",
    [
        "INSERT INTO replicas (caf_file_id, store, provider, proof) SELECT caf_file_id, 'another', "
        "'p', '' FROM caf_files",
        "INSERT INTO full_reads (caf_file_id, store, provider, merkle_root) "
        "SELECT caf_file_id, 'another', 'p', sha256('') FROM caf_files",
    ],
)
def test_rows_without_a_copy_are_refused(ledger, database, insert):
    archive(ledger, ["a"])
    with pytest.raises(LedgerError):
        change(database, insert)


def test_a_copy_is_named_by_the_kind_of_the_store(ledger, database):
    directory_chunk = archive(Ledger(database, store="directory"), ["a"])
    chunk = archive(ledger, ["b"])
    assert {row[:3] for row in copies(database)} == {
        (directory_chunk, "directory", "verified"),
        (chunk, "jackal", "verified"),
    }


def test_a_chunk_is_posted_in_the_configured_store(ledger, database):
    chunk = chunk_in(ledger, S.SEALED)
    other = Ledger(database, store="directory", lease_seconds=1.0)
    end(other, chunk, S.POSTING)
    assert [row[:3] for row in copies(database)] == [(chunk, "directory", "posting")]


def test_damaged_chunk_is_not_posted_again_in_another_store(ledger, database):
    chunk = archive(ledger, ["a"])
    end(ledger, chunk, S.DAMAGED)
    other = Ledger(database, store="directory", lease_seconds=1.0)
    with held(other, chunk) as lease, pytest.raises(IllegalMove, match="directory"):
        other.moves.record_repost(lease, chunk, replace(POSTING, start=99))
    assert ledger.chunks.get(chunk).start == POSTING.start


def test_packing_again_removes_the_copy_until_the_seal(ledger, database):
    chunk = chunk_in(ledger, S.SEALED)
    end(ledger, chunk, S.PACKING)
    assert (ledger.chunks.get(chunk).was_sealed, copies(database)) == (False, [])
    with held(ledger, chunk) as lease:
        seal(ledger, lease, chunk, facts=replace(seal_facts(1), merkle_root=b"\7" * 32))
    assert ledger.chunks.get(chunk).merkle_root == b"\7" * 32


def test_a_withdrawn_chunk_keeps_the_counts_of_its_seal(ledger, database):
    chunk = chunk_in(ledger, S.SEALED)
    end(ledger, chunk, S.WITHDRAWN)
    assert copies(database) == []
    assert (ledger.chunks.get(chunk).was_sealed, ledger.chunks.get(chunk).member_count) == (True, 1)


@pytest.mark.parametrize(
    ("state", "back"),
    [
        (S.PLANNED, S.PLANNED),
        (S.PACKING, S.PLANNED),
        (S.SEALED, S.SEALED),
        (S.POSTING, S.POSTING),
        (S.POSTED, S.POSTED),
        (S.UPLOADING, S.UPLOADING),
        (S.VERIFIED, S.UPLOADING),
    ],
)
def test_a_parked_chunk_keeps_its_copy(ledger, state, back):
    (chunk,) = register(ledger, ["a"])
    if state is not S.PLANNED:
        bring_to(ledger, chunk, state)
    before = ledger.chunks.get(chunk)
    end(ledger, chunk, S.PARKED)
    parked = ledger.chunks.get(chunk)
    kept = ("copy_state", "merkle_root", "owner", "start")
    assert [getattr(parked, name) for name in kept] == [getattr(before, name) for name in kept]
    for after in set(S) - {back, S.WITHDRAWN, S.ABANDONED, S.PACKING, state}:
        with pytest.raises(IllegalMove):
            end(ledger, chunk, after)
    end(ledger, chunk, back)
    assert ledger.chunks.get(chunk).state is back


def test_a_parked_verified_chunk_cannot_be_given_up(ledger):
    chunk = chunk_in(ledger, S.VERIFIED)
    end(ledger, chunk, S.PARKED)
    for after in (S.WITHDRAWN, S.ABANDONED, S.LOCATED):
        with pytest.raises(IllegalMove):
            end(ledger, chunk, after)


def test_a_withdrawn_damaged_chunk_keeps_place_and_reason(ledger, database):
    chunk = archive(ledger, ["a"])
    with held(ledger, chunk) as lease:
        ledger.moves.move(lease, chunk, S.LOCATED, S.DAMAGED, reason="wrong bytes")
        ledger.moves.move(lease, chunk, S.DAMAGED, S.WITHDRAWN, reason="beyond repair")
    assert copies(database) == [(chunk, "jackal", "retired", "wrong bytes", 42)]
    assert ledger.chunks.get(chunk).reason == "beyond repair"
    assert ledger.rebuilds.unknown_posts(SOURCE) == 0
    assert ledger.transactions(holder()).unknown_roots([ROOT], signed=True) == []


def test_an_abandoned_chunk_keeps_its_post(ledger, database):
    chunk = chunk_in(ledger, S.UPLOADING)
    end(ledger, chunk, S.ABANDONED)
    assert copies(database) == [(chunk, "jackal", "retired", "", 42)]
    assert ledger.transactions(holder()).unknown_roots([ROOT], signed=True) == []


@pytest.mark.parametrize("fault", ["", "wrong bytes"])
def test_a_rebuilt_chunk_is_located_and_has_its_copy(ledger, database, fault):
    ledger.sources.register(SOURCE, "s3://src")
    chunk = restored(7, ["a"])
    restore(ledger, chunk, batches([location("a")]), [], fault=fault)
    assert copies(database) == [
        (chunk.name, "jackal", "damaged" if fault else "verified", fault, 7)
    ]
    assert ledger.chunks.get(chunk.name).reason == fault


@pytest.mark.parametrize(
    ("state", "is_replaced"),
    [(S.SEALED, True), (S.POSTING, True), (S.POSTED, False), (S.VERIFIED, False)],
)
def test_a_stored_file_replaces_only_an_unposted_chunk(ledger, database, state, is_replaced):
    name = chunk_in(ledger, state)
    end(ledger, name, S.PARKED)
    before = copies(database)
    stored = replace(restored(7, ["a"]), name=name, plan=ledger.chunks.get(name).plan)
    rows = list(batches([location("a")]))
    with held(ledger, name) as lease:
        if is_replaced:
            assert (
                ledger.rebuilds.restore_chunk(
                    stored, lambda: rows, [], plan_folder="p", lease=lease
                )
                == 1
            )
            assert copies(database) == [(name, "jackal", "verified", "", 7)]
        else:
            with pytest.raises(IllegalMove):
                ledger.rebuilds.restore_chunk(
                    stored, lambda: rows, [], plan_folder="p", lease=lease
                )
            assert copies(database) == before
            assert ledger.chunks.get(name).state is S.PARKED
