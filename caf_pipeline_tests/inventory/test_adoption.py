"""Matching members of another program's CAF file with objects, also in several windows."""

import hashlib
from datetime import timedelta

import pyarrow as pa
import pytest

from caf_pipeline.inventory.adoption import MEMBER_SCHEMA, RejectReason, decide
from caf_pipeline.inventory.ledger_rows import STANDING_SCHEMA
from caf_pipeline.inventory.manifest import row_identity
from caf_pipeline.inventory.objects import S3Object
from caf_pipeline.inventory.snapshot import SNAPSHOT_SCHEMA, snapshot_batch
from caf_pipeline.system.parquet import write_whole
from caf_pipeline_tests.support.plans import MOMENT


def md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def decided(folder, members, objects, standing=(), **options):
    """Decide about (key, body) members.

    Returns the version, or the reason, by key, and the decisions.
    """
    rows, end = [], 0
    for number, (key, body) in enumerate(members):
        start, end = end, end + len(body)
        rows.append(
            (
                f"{number}/{key}",
                key.encode(),
                start,
                end,
                md5(body),
                hashlib.sha256(body).digest(),
                None,
            )
        )
    batch = pa.RecordBatch.from_pylist(
        [dict(zip(MEMBER_SCHEMA.names, row, strict=True)) for row in rows], MEMBER_SCHEMA
    )
    write_whole([batch], folder / "members", MEMBER_SCHEMA)
    write_whole([snapshot_batch(objects)], folder / "snapshot", SNAPSHOT_SCHEMA)
    standing_rows = [
        {"key": key.encode(), "object_version": version, "standing": outcome, "due": False}
        for key, version, outcome in standing
    ]
    write_whole(
        [pa.RecordBatch.from_pylist(standing_rows, STANDING_SCHEMA)],
        folder / "standing",
        STANDING_SCHEMA,
    )
    adoption = decide(
        *(folder / name for name in ("members", "snapshot", "standing", "decided")), **options
    )
    rows = (row for batch in adoption.locations() for row in batch.to_pylist())
    versions = {
        row["key"]: row_identity(row | {"size_bytes": row["end_byte"] - row["start_byte"]})
        for row in rows
    }
    return {
        **versions,
        **{member.partition("/")[2]: reason for member, reason in adoption.rejected_members()},
    }, adoption


def test_a_member_matches_the_newest_version_with_its_bytes(
    tmp_path,
):
    def version(key, name, body, hours, **more):
        return S3Object(
            key.encode(), name, md5(body), len(body), MOMENT + timedelta(hours=hours), **more
        )

    objects = [
        version("a", "1", b"x", 1, is_latest=False),
        version("a", "2", b"x", 2, is_latest=False),
        version("a", "3", b"other", 3),
        version("b", "4", b"y", 4, is_latest=False),
        S3Object(b"b", "5", "", 0, MOMENT + timedelta(hours=5), is_delete_marker=True),
        version("c", "6", b"z", 6),
    ]
    standing = [("c", "6", "claimed"), ("b", "4", "skipped")]
    outcomes, adoption = decided(
        tmp_path, [("a", b"x"), ("b", b"y"), ("c", b"z")], objects, standing
    )
    assert outcomes == {"a": "2", "b": "4", "c": RejectReason.CLAIMED}
    assert (adoption.objects, adoption.object_bytes, adoption.left_out) == (
        2,
        2,
        {RejectReason.CLAIMED: 1},
    )


def test_an_object_that_was_written_again_keeps_its_identity(tmp_path):
    rewritten = S3Object(b"a", None, md5(b"x"), 1, MOMENT, rewritten_at=MOMENT)
    outcomes, _ = decided(tmp_path, [("a", b"x")], [rewritten])
    assert outcomes == {"a": rewritten.object_version}
    assert rewritten.object_version.endswith("Z")


@pytest.mark.thorough
def test_windows_of_members_do_not_change_decisions(tmp_path):
    members = [(f"key-{number % 400:03d}", b"%d" % (number % 400)) for number in range(500)]
    objects = [
        S3Object(f"key-{n:03d}".encode(), None, md5(b"%d" % n), len(b"%d" % n), MOMENT)
        for n in range(0, 400, 2)
    ]
    expected, all_at_once = decided(tmp_path, members, objects)
    outcomes, windowed = decided(tmp_path, members, objects, window=7)
    assert outcomes == expected
    assert (windowed.objects, windowed.object_bytes, windowed.left_out) == (
        all_at_once.objects,
        all_at_once.object_bytes,
        all_at_once.left_out,
    )
    assert all_at_once.objects == 200
    assert all_at_once.left_out == {RejectReason.NOT_LISTED: 250, RejectReason.REPEATED: 50}
