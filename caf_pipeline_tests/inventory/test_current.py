"""Settled keys: exactly those with one listed object, located, and nothing else known."""

import tempfile
from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import IntegrityError
from caf_pipeline.inventory.accounting import account_for_files
from caf_pipeline.inventory.current import identify
from caf_pipeline.inventory.ledger_rows import EXCEPTION_SCHEMA, STANDING_SCHEMA
from caf_pipeline.inventory.objects import S3Object, is_supported, rewritten_version
from caf_pipeline.inventory.remaining import ended_skips, not_yet_archived
from caf_pipeline.inventory.snapshot import (
    SNAPSHOT_SCHEMA,
    Snapshot,
    SnapshotWriter,
    has_rows,
    read_objects,
)
from caf_pipeline_tests.support.snapshots import damage_page, use_small_windows, write_exceptions

MOMENT = datetime(2026, 11, 1, tzinfo=UTC)
EARLIER = MOMENT - timedelta(days=1)
LISTED = S3Object(b"key", None, "e" * 32, 7, EARLIER)
VERSIONED = replace(LISTED, version_id="v2")
LOCATED = {
    "key": b"key",
    "object_version": LISTED.object_version,
    "standing": "located",
    "reason": None,
    "due": False,
    "last_modified": EARLIER,
}


def write_files(
    folder, listed, recorded, stated=(), **bounds
) -> tuple[Snapshot, tuple[Path, Path, Path]]:
    """Write the inputs of `identify`, with a thousand settled keys beside the given rows.

    `bounds` are those of the snapshot; all keys by default.
    """
    others = [replace(LISTED, key=f"other/{number:04}".encode()) for number in range(1000)]
    with SnapshotWriter(
        folder / "snapshot.parquet", source="src", listed_at=MOMENT, all_versions=True, **bounds
    ) as writer:
        writer.add([*listed, *others])
        snapshot = writer.finish()
    standing = [*recorded, *(LOCATED | {"key": other.key} for other in others)]
    pq.write_table(
        pa.Table.from_pylist(standing, schema=STANDING_SCHEMA), folder / "standing.parquet"
    )
    pq.write_table(
        pa.Table.from_pylist([*stated], schema=EXCEPTION_SCHEMA), folder / "exceptions.parquet"
    )
    return snapshot, (
        folder / "standing.parquet",
        folder / "exceptions.parquet",
        folder / "identified.parquet",
    )


def unsettled(folder, listed, recorded, stated=(), **bounds) -> list[bytes]:
    """Return the unsettled keys, with a thousand settled ones beside the given rows."""
    snapshot, files = write_files(folder, listed, recorded, stated, **bounds)
    return pq.read_table(identify(snapshot, *files).unsettled_keys)["key"].to_pylist()


def test_a_key_whose_listed_content_is_located_is_settled(tmp_path):
    assert unsettled(tmp_path, [LISTED], [LOCATED]) == []


GONE = {"key": b"key", "stated_at": MOMENT, "object_version": None, "last_modified": None}


@pytest.mark.parametrize(
    ("listed", "recorded", "stated"),
    [
        pytest.param([LISTED], [], [], id="listed and not recorded"),
        pytest.param([], [LOCATED], [], id="located and not listed"),
        pytest.param([LISTED], [LOCATED | {"standing": "claimed"}], [], id="claimed"),
        pytest.param(
            [LISTED], [LOCATED | {"standing": "skipped", "reason": "denied"}], [], id="skipped"
        ),
        pytest.param(
            [LISTED],
            [LOCATED | {"object_version": "etag:other:7"}],
            [],
            id="located with another content",
        ),
        pytest.param(
            [LISTED], [LOCATED | {"last_modified": MOMENT}], [], id="located with another time"
        ),
        pytest.param(
            [LISTED], [LOCATED, LOCATED | {"standing": "claimed"}], [], id="located and claimed"
        ),
        pytest.param(
            [LISTED],
            [LOCATED, LOCATED | {"object_version": "etag:old:7"}],
            [],
            id="an older content is located too",
        ),
        pytest.param([LISTED], [LOCATED], [GONE], id="something was stated of it"),
        pytest.param(
            [], [], [GONE], id="something was stated of a key that is neither listed nor recorded"
        ),
        pytest.param(
            [VERSIONED, replace(VERSIONED, version_id="v1", is_latest=False)],
            [LOCATED | {"object_version": "v2"}],
            [],
            id="an older version is listed",
        ),
        pytest.param(
            [replace(VERSIONED, is_latest=False)],
            [LOCATED | {"object_version": "v2"}],
            [],
            id="only an older version is listed",
        ),
        pytest.param(
            [replace(VERSIONED, is_delete_marker=True)],
            [LOCATED | {"object_version": "v2"}],
            [],
            id="a delete marker is listed",
        ),
    ],
)
def test_any_other_key_is_not_settled(tmp_path, listed, recorded, stated):
    assert unsettled(tmp_path, listed, recorded, stated) == [b"key"]
    assert unsettled(tmp_path, [*listed, replace(LISTED, key=b"new")], recorded, stated) == [
        b"key",
        b"new",
    ]


@pytest.mark.parametrize("length", [1024, 4096, 4097, 9000])
def test_an_overlong_key_does_not_hide_other_keys(tmp_path, length):
    long, new = replace(LISTED, key=b"l" * length), replace(LISTED, key=b"new")
    assert unsettled(tmp_path, [long, new], [LOCATED | {"key": long.key}]) == [new.key]
    assert unsettled(tmp_path, [long, new], []) == ([long.key] if length <= 1024 else []) + [
        new.key
    ]


def test_keys_outside_of_the_snapshot_are_ignored(tmp_path):
    names = (b"k", b"key", b"key!", b"other/0999", b"other/0999!", b"z")
    located = [LOCATED | {"key": key, "object_version": "etag:gone:7"} for key in names]
    stated = [GONE | {"key": key} for key in names]
    names = unsettled(tmp_path, [], located, stated, after=b"key", until=b"other/0999")
    assert sorted(names) == [b"key!", b"other/0999"]


NEW = replace(LISTED, key=b"new")


@pytest.mark.parametrize("column", SNAPSHOT_SCHEMA.names)
def test_a_damaged_inventory_is_refused_before_use(tmp_path, column):
    for number, (listed, recorded) in enumerate([([LISTED, NEW], [LOCATED]), ([NEW], [])]):
        folder = tmp_path / str(number)
        folder.mkdir()
        snapshot, files = write_files(folder, listed, recorded)
        damage_page(snapshot.path, column)
        with pytest.raises(IntegrityError):
            identify(snapshot, *files)


@pytest.mark.parametrize("column", ["key", "object_version", "last_modified"])
def test_damage_in_compared_columns_is_refused(tmp_path, column):
    snapshot, files = write_files(tmp_path, [LISTED], [LOCATED])
    damage_page(snapshot.path, column)
    with pytest.raises(IntegrityError):
        identify(snapshot, *files)


def test_lost_rows_and_locations_do_not_seem_settled(
    tmp_path,
):
    snapshot, files = write_files(tmp_path, [LISTED], [LOCATED])
    for path in (snapshot.path, files[0]):
        rows = pq.read_table(path)
        pq.write_table(rows.filter(pc.not_equal(rows["key"], b"key")), path)
    with pytest.raises(IntegrityError, match="declares 1001 rows, and has 1000"):
        identify(snapshot, *files)


def test_a_settled_inventory_is_read_in_few_columns(tmp_path):
    snapshot, files = write_files(tmp_path, [LISTED], [LOCATED])
    damage_page(snapshot.path, "storage_class")
    assert not has_rows(identify(snapshot, *files).unsettled)


KEYS = [b"a", b"b", b"b\xff", b"c", b"d", b"e\0", "\u00e9".encode()]
some_objects = st.builds(
    S3Object,
    key=st.sampled_from(KEYS),
    version_id=st.none(),
    etag=st.sampled_from("ef"),
    size_bytes=st.just(1),
    last_modified=st.sampled_from([EARLIER, MOMENT]),
    is_latest=st.integers(0, 4).map(bool),
)
some_known_keys = st.sampled_from([key for key in KEYS if is_supported(key)])
some_versions = st.sampled_from(
    ["etag:e:1", "etag:f:1", rewritten_version("etag:e:1", EARLIER), "etag:e:12"]
)
some_known = st.fixed_dictionaries(
    {
        "key": some_known_keys,
        "object_version": some_versions,
        "standing": st.sampled_from(["located", "located", "located", "claimed", "skipped"]),
        "reason": st.none(),
        "due": st.booleans(),
        "last_modified": st.sampled_from([EARLIER, MOMENT, None]),
    }
)
some_stated = st.fixed_dictionaries(
    {
        "key": some_known_keys,
        "stated_at": st.just(MOMENT),
        "object_version": some_versions,
        "last_modified": st.sampled_from([EARLIER, MOMENT]),
    }
)


@pytest.mark.thorough
@given(
    st.lists(some_objects, max_size=12),
    st.lists(st.lists(some_known, max_size=6), min_size=1, max_size=2),
    st.lists(some_stated, max_size=3, unique_by=lambda row: (row["key"], row["last_modified"])),
    st.booleans(),
)
@settings(max_examples=20)
def test_settled_keys_do_not_change_the_result(objects, recorded, stated, all_located):
    """The accounting finds the same identities. `recorded` are files of a standing in any order.

    `all_located` adds a file with every listed object.
    """
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        use_small_windows(patched)
        folder = Path(name)
        with SnapshotWriter(
            folder / "s.parquet", source="src", listed_at=MOMENT, all_versions=True
        ) as writer:
            writer.add(objects)
            snapshot = writer.finish()
        listed = list(read_objects(snapshot.path))
        as_listed = (
            {
                "key": obj.key,
                "object_version": obj.object_version,
                "last_modified": obj.last_modified,
            }
            for obj in listed
        )
        files = [*recorded]
        if all_located:
            files.append([LOCATED | row for row in as_listed if is_supported(row["key"])])
        located: dict[tuple[bytes, str], object] = {}
        files = [
            [
                row
                for row in rows
                if row["standing"] != "located"
                or located.setdefault((row["key"], row["object_version"]), row) is row
            ]
            for rows in files
        ]
        standing, exceptions = folder / "standing", folder / "exceptions.parquet"
        standing.mkdir()
        for number, rows in enumerate(files):
            pq.write_table(
                pa.Table.from_pylist(rows, schema=STANDING_SCHEMA),
                standing / f"{number}.parquet",
                row_group_size=2,
            )
        write_exceptions(exceptions, *stated)
        identified = identify(snapshot, standing, exceptions, folder / "identified.parquet")
        facts = defaultdict(list)
        for obj in listed:
            facts[obj.key].append((obj.object_version, obj.last_modified, obj.is_latest))
        for row in (row for rows in files for row in rows):
            facts[row["key"]].append(
                (row["object_version"], row["last_modified"], row["standing"] == "located")
            )
        for row in stated:
            facts[row["key"]].append((None, None, False))
        settled = {
            key for key, (obj, *rest) in facts.items() if rest == [obj] and obj[2] and obj[1]
        }
        settled &= {obj.key for obj in listed}
        if identified.unsettled_keys:
            keys = pq.read_table(identified.unsettled_keys)["key"].to_pylist()
            assert sorted(keys) == sorted(
                key for key in facts.keys() - settled if is_supported(key)
            )
            expected = [obj for obj in read_objects(identified.path) if obj.key not in settled]
            assert list(read_objects(identified.unsettled)) == expected
        taken, of_all = (
            not_yet_archived(path, standing, folder / "out.parquet")
            for path in (identified.unsettled, identified.path)
        )
        assert (taken.object_count, taken.unsupported_count) == (
            of_all.object_count,
            of_all.unsupported_count,
        )
        account = account_for_files(snapshot.path, standing, exceptions, silent_from=MOMENT)
        claimed = {
            (row["key"], row["object_version"])
            for rows in files
            for row in rows
            if row["standing"] == "claimed"
        }
        identities = {(obj.key, obj.object_version) for obj in read_objects(identified.path)}
        assert (account.objects, account.located, account.claimed) == (
            len(listed),
            len(identities & located.keys()),
            len(identities & claimed - located.keys()),
        )
        assert account.older >= 0
        assert ended_skips(identified.unsettled, standing) == ended_skips(identified.path, standing)
