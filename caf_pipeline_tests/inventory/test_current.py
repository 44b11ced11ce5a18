"""Of which keys an inventory may tell anything new: all but those that are located as they are listed, and nothing else."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from caf_pipeline.inventory.current import identify
from caf_pipeline.inventory.objects import S3Object
from caf_pipeline.inventory.snapshot import EXCEPTION_SCHEMA, STANDING_SCHEMA, SnapshotWriter

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


def unsettled(folder, listed, known, stated=(), **bounds) -> list[bytes]:
    """Return the keys of which more has to be found out, beside those of a thousand settled ones.

    `bounds`: of the snapshot; all keys by default.
    """
    others = [replace(LISTED, key=f"other/{number:04}".encode()) for number in range(1000)]
    with SnapshotWriter(folder / "snapshot.parquet", source="src", listed_at=MOMENT, all_versions=True, **bounds) as writer:
        writer.add([*listed, *others])
        snapshot = writer.finish()
    standing = [*known, *(LOCATED | {"key": other.key} for other in others)]
    pq.write_table(pa.Table.from_pylist(standing, schema=STANDING_SCHEMA), folder / "standing.parquet")
    pq.write_table(pa.Table.from_pylist([*stated], schema=EXCEPTION_SCHEMA), folder / "exceptions.parquet")
    files = (folder / f"{name}.parquet" for name in ("standing", "exceptions", "identified"))
    return pq.read_table(identify(snapshot, *files).unsettled)["key"].to_pylist()


def test_a_key_that_is_located_as_it_is_listed_is_settled(tmp_path):
    assert unsettled(tmp_path, [LISTED], [LOCATED]) == []


GONE = {"key": b"key", "stated_at": MOMENT, "object_version": None, "last_modified": None}


@pytest.mark.parametrize(
    ("listed", "known", "stated"),
    [
        pytest.param([LISTED], [], [], id="listed and not known"),
        pytest.param([], [LOCATED], [], id="located and not listed"),
        pytest.param([LISTED], [LOCATED | {"standing": "claimed"}], [], id="claimed"),
        pytest.param([LISTED], [LOCATED | {"standing": "skipped", "reason": "denied"}], [], id="skipped"),
        pytest.param([LISTED], [LOCATED | {"object_version": "etag:other:7"}], [], id="located with another content"),
        pytest.param([LISTED], [LOCATED | {"last_modified": MOMENT}], [], id="located with another time"),
        pytest.param([LISTED], [LOCATED | {"last_modified": None}], [], id="located before times were kept"),
        pytest.param([LISTED], [LOCATED, LOCATED | {"standing": "claimed"}], [], id="located and claimed"),
        pytest.param([LISTED], [LOCATED, LOCATED | {"object_version": "etag:old:7"}], [], id="an older content is located too"),
        pytest.param([LISTED], [LOCATED], [GONE], id="something was stated of it"),
        pytest.param([], [], [GONE], id="something was stated of a key that is neither listed nor known"),
        pytest.param(
            [VERSIONED, replace(VERSIONED, version_id="v1", is_latest=False)],
            [LOCATED | {"object_version": "v2"}],
            [],
            id="an older version is listed",
        ),
        pytest.param(
            [replace(VERSIONED, is_latest=False)], [LOCATED | {"object_version": "v2"}], [], id="only an older version is listed"
        ),
        pytest.param(
            [replace(VERSIONED, is_delete_marker=True)], [LOCATED | {"object_version": "v2"}], [], id="a delete marker is listed"
        ),
    ],
)
def test_any_other_key_is_not_settled(tmp_path, listed, known, stated):
    assert unsettled(tmp_path, listed, known, stated) == [b"key"]


def test_a_key_outside_the_bounds_of_a_snapshot_is_not_looked_at(tmp_path):
    keys = (b"k", b"key", b"key!", b"other/0999", b"other/0999!", b"z")
    located = [LOCATED | {"key": key, "object_version": "etag:gone:7"} for key in keys]
    stated = [GONE | {"key": key} for key in keys]
    found = unsettled(tmp_path, [], located, stated, after=b"key", until=b"other/0999")
    assert sorted(found) == [b"key!", b"other/0999"]
