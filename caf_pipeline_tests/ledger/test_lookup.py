"""Look-ups and exports of located objects."""

import hashlib
from datetime import timedelta
from itertools import chain

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.inventory.headers import HEADERS, ObjectHeaders
from caf_pipeline.inventory.manifest import CHECKSUM_COLUMNS
from caf_pipeline.inventory.objects import CurrentException, SkipReason
from caf_pipeline.ledger.records import InventoryRecord
from caf_pipeline_tests.support.ledger_rows import (
    CHECKSUMS,
    EARLY,
    ODD_KEYS,
    POSTING,
    SOURCE,
    VERSION,
    archive,
    bring_to,
    claims,
    end,
    located,
    location,
    plan_record,
    planned,
    register,
    register_plan,
    settled,
    skip,
    standing,
)
from caf_pipeline_tests.support.postgres import connected


def test_recorded_checksums_are_returned(ledger, tmp_path):
    archive(ledger, ["with-checksums"])
    (version,) = ledger.content.located_versions(SOURCE, ["with-checksums"])
    sha256 = hashlib.sha256(b"with-checksums").digest()
    assert version.checksums == {
        "sha256": sha256,
        "crc64nvme": b"\0" * 7 + b"\1",
        "crc32": b"\0\0\0\2",
    }
    (row,) = located(ledger, tmp_path / "located.parquet")
    assert {name: row[name] for name in CHECKSUM_COLUMNS} == CHECKSUMS["with-checksums"]


def test_odd_keys_are_located_byte_for_byte(ledger):
    chunk = archive(ledger, ODD_KEYS)
    for key in ODD_KEYS:
        located_object = ledger.lookup.locate(SOURCE, key)
        assert (located_object.row, located_object.chunk, located_object.posting) == (
            location(key),
            chunk,
            POSTING,
        )


def test_objects_share_a_set_of_headers(ledger):
    headers = ObjectHeaders(
        "text/plain", cache_control="no-store", user_metadata={"b": "2", "a": "é"}
    )
    for keys in (["a", "b"], ["c"]):
        (chunk,) = register(ledger, keys)
        bring_to(ledger, chunk, ChunkState.LOCATED, headers=headers)
    assert {ledger.lookup.locate(SOURCE, key).row.header_set for key in "abc"} == {headers.id}
    assert [version.header_set for version in ledger.content.located_versions(SOURCE, ["a"])] == [
        headers.id
    ]
    assert ledger.lookup.header_sets([headers.id, bytes(16)]) == {headers.id: headers}


@pytest.mark.parametrize("column", [*HEADERS, "user_metadata"])
def test_header_set_with_other_texts_is_exported_as_unknown(ledger, tmp_path, column):
    metadata = {"b": "2", "a": "é", "Z": "\U0001f600", "a-b": "", "\uffee": "x", "\U00010000": "y"}
    headers = ObjectHeaders(*HEADERS, user_metadata=metadata)
    (chunk,) = register(ledger, ["a"])
    bring_to(ledger, chunk, ChunkState.LOCATED, headers=headers)
    (row,) = located(ledger, tmp_path / "located.parquet")
    assert row["header_set"] == headers.id
    other = """'{"b": "2"}'""" if column == "user_metadata" else "'other'"
    with connected(ledger.database) as connection:
        connection.execute(f"UPDATE header_sets SET {column} = {other}")
    (row,) = located(ledger, tmp_path / "located.parquet")
    assert row["header_set"] is None


def test_headers_that_are_not_known_have_no_set(ledger):
    archive(ledger, ["a"])
    assert ledger.lookup.locate(SOURCE, "a").row.header_set is None


def test_newest_object_is_current_in_any_loading_order(ledger):
    ledger.sources.register(SOURCE, "s3://a/")
    for day, version in [(2, "v2"), (3, "v3"), (1, "v1")]:
        plan = plan_record()
        name = f"src-{plan.name}-00001"
        register_plan(ledger, plan, [planned(1, ["a"])], claims((1, "a"), version=version))
        bring_to(ledger, name, ChunkState.LOCATED, modified=EARLY + timedelta(days=day))
    assert ledger.lookup.locate(SOURCE, "a").row.object_version == "v3"
    assert ledger.lookup.locate(SOURCE, "a", "v1").row.object_version == "v1"
    assert ledger.lookup.locate(SOURCE, "a", "v4") is None
    assert [row.object_version for row in ledger.lookup.versions(SOURCE, "a", 2)[0]] == ["v3", "v2"]
    assert ledger.lookup.versions(SOURCE, "a", 2)[1] == 3
    assert ledger.lookup.versions(SOURCE, "b", 2) == ([], 0)


def test_later_chunk_wins_among_equal_modification_times(ledger):
    ledger.sources.register(SOURCE, "s3://src")
    plan = plan_record()
    names = [f"src-{plan.name}-{number:05d}" for number in (1, 2)]
    claimed = chain(claims((1, "a"), version="v1"), claims((2, "a"), version="v2"))
    register_plan(ledger, plan, [planned(number, ["a"]) for number in (1, 2)], claimed)
    for name in reversed(names):
        bring_to(ledger, name, ChunkState.LOCATED)
    assert ledger.lookup.locate(SOURCE, "a").chunk == names[1]


def test_an_impossible_key_has_no_location(ledger):
    archive(ledger, ["a"])
    for key in ["", "a\0", "\ud800", "k" * 1025]:
        assert ledger.lookup.locate(SOURCE, key) is None


def test_many_keys_give_the_answers_of_single_keys(ledger):
    first, second = archive(ledger, ["a", "b", "gone"]), archive(ledger, ["c", *ODD_KEYS])
    end(ledger, archive(ledger, ["expired"]), ChunkState.EXPIRED)
    later = EARLY + timedelta(days=1)
    register_plan(ledger, plan_record(), [planned(1, ["b"])], claims((1, "b"), version="newer"))
    stated = [
        CurrentException(*row)
        for row in (("gone", later, None), ("b", later, "newer"), ("c", later, VERSION))
    ]
    ledger.content.record_planned(
        InventoryRecord(SOURCE, "src-20240102T000000000000Z", later), stated
    )
    keys = ["a", "b", "c", "gone", "expired", "never", "", "\ud800", "a", *ODD_KEYS]
    locations = ledger.lookup.locate_many(SOURCE, keys)
    assert locations == {
        key: ledger.lookup.locate(SOURCE, key) for key in keys if ledger.lookup.locate(SOURCE, key)
    }
    assert {key: row.chunk for key, row in locations.items()} == (
        dict.fromkeys(["a", "b", "gone"], first) | dict.fromkeys(["c", *ODD_KEYS], second)
    )
    assert {key for key, row in locations.items() if not row.currency.is_current} == {"b", "gone"}
    assert locations["b"].currency.state == "planned"
    assert locations["gone"].currency.gone_at == later
    assert ledger.lookup.locate_many("another", keys) == ledger.lookup.locate_many(SOURCE, []) == {}


@pytest.mark.parametrize(
    "states",
    [
        [ChunkState.EXPIRED],
        [ChunkState.DAMAGED, ChunkState.EXPIRED],
        [ChunkState.DAMAGED, ChunkState.WITHDRAWN],
    ],
)
def test_objects_of_a_lost_chunk_are_archived_again(ledger, states):
    old = archive(ledger, ["a", "b"])
    end(ledger, old, *states)
    assert ledger.lookup.locate(SOURCE, "a") is None
    new = archive(ledger, ["a", "c"])
    assert ledger.lookup.locate(SOURCE, "a").chunk == new
    assert ledger.lookup.locate(SOURCE, "b") is None
    assert ledger.chunks.account(SOURCE).located_objects == 2


def test_a_damaged_chunk_still_counts(ledger):
    chunk = archive(ledger, ["a"])
    end(ledger, chunk, ChunkState.DAMAGED)
    assert ledger.lookup.locate(SOURCE, "a").chunk == chunk
    assert settled(ledger, [("a", VERSION)]) == {("a", VERSION)}


def test_a_key_without_location_has_its_reason(ledger):
    lost = archive(ledger, ["lost", "again", "kept"])
    end(ledger, lost, ChunkState.EXPIRED)
    archive(ledger, ["again"])
    skips = [skip("skipped"), skip("a%FFb", SkipReason.UNSUPPORTED_KEY)]
    (chunk,) = register(ledger, ["claimed", "lost"], skips=skips)

    def reasons(key):
        return sorted(
            (row.chunk or "", str(row.state), row.detail)
            for row in ledger.lookup.not_archived(SOURCE, key)
        )

    assert reasons("claimed") == [(chunk, "planned", "")]
    assert reasons("lost") == sorted([(chunk, "planned", ""), (lost, "expired", "")])
    assert (reasons("kept"), reasons("again")) == ([(lost, "expired", "")], [])
    assert reasons("skipped") == [("", "cold_storage", "as S3 said")]
    assert reasons("a\udcffb") == [("", "unsupported_key", "as S3 said")]
    assert ledger.lookup.not_archived(SOURCE, "a\udcffb")[0].retry_at is None
    assert ledger.lookup.not_archived(SOURCE, "skipped")[0].retry_at > EARLY
    for key in ("never", "", "a\0", "\ud800"):
        assert reasons(key) == []
    assert ledger.lookup.not_archived("another", "lost") == []


def test_objects_located_claimed_or_skipped_are_known(ledger):
    archive(ledger, ["located"])
    register(ledger, ["claimed"], skips=[skip("skipped")])
    versions = [(key, VERSION) for key in ("located", "claimed", "skipped", "new")] + [
        ("located", "v2")
    ]
    assert {key for key, _ in settled(ledger, versions)} == {"located", "claimed", "skipped"}


def test_the_export_gives_each_standing_with_its_exact_key(ledger, tmp_path):
    odd = [f"1 {key}"[:250] for key in ODD_KEYS]
    archive(ledger, ODD_KEYS)
    register(ledger, odd, skips=[skip("a%FFb", SkipReason.UNSUPPORTED_KEY)])
    expected = {(key, "located", None, False) for key in ODD_KEYS} | {
        (key, "claimed", None, False) for key in odd
    }
    assert standing(ledger, tmp_path / "s") == expected | {
        ("a%FFb", "skipped", "unsupported_key", False)
    }


def test_exported_locations_equal_the_loaded_rows(ledger, tmp_path):
    chunk = archive(ledger, ODD_KEYS)
    archive(ledger, ["elsewhere"], source="other")
    rows = located(ledger, tmp_path / "l.parquet")
    expected = [location(key) for key in sorted(ODD_KEYS, key=str.encode)]
    assert [(row["key"].decode(), row["sha256"]) for row in rows] == [
        (row_of_key.key, row_of_key.sha256) for row_of_key in expected
    ]
    assert {(row["part"], row["part_count"]) for row in rows} == {(0, 0)}
    for name in ("object_version", "start_byte", "end_byte", "version_id", "etag"):
        assert [row[name] for row in rows] == [getattr(row_of_key, name) for row_of_key in expected]
    assert {row["caf_file_id"] for row in rows} == {ledger.chunks.get(chunk).caf_file_id}


def test_exported_locations_are_of_chunks_in_good_standing(ledger, tmp_path):
    chunks = [archive(ledger, [key]) for key in "abc"]
    end(ledger, chunks[1], ChunkState.DAMAGED)
    end(ledger, chunks[2], ChunkState.EXPIRED)
    assert [row["key"] for row in located(ledger, tmp_path / "l.parquet")] == [b"a", b"b"]
