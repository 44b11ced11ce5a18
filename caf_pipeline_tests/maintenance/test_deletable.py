"""Decisions about the objects of a fresh inventory, and the files with these decisions."""

import csv
import hashlib
import io
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import IntegrityError, StagingError, UsageError
from caf_pipeline.inventory.filters import NO_FILTER, ObjectFilter
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.ledger_rows import LOCATED_SCHEMA
from caf_pipeline.inventory.manifest import MANIFEST_SCHEMA
from caf_pipeline.inventory.objects import S3Object, is_supported
from caf_pipeline.maintenance.deletion.deletable import (
    ChunkAssessment,
    Decisions,
    LocatedRows,
    Unsafe,
    tallied,
)
from caf_pipeline.maintenance.deletion.files import (
    REPORT_COLUMNS,
    BatchManifest,
    Report,
    require_manifest,
    require_report,
)
from caf_pipeline.maintenance.full_read import RangeCheck
from caf_pipeline.steps.compare_headers import REWRITTEN_SCHEMA
from caf_pipeline_tests.support.snapshots import (
    MOMENT,
    StandingRow,
    thing,
    use_small_windows,
    write_snapshot,
    write_standing,
)

GOOD, BAD = 1, 2
HEADERS_OF_ALL = ObjectHeaders("text/plain", user_metadata={"owner": "ü", "a": ""})
ASSESSMENTS = [
    ChunkAssessment(GOOD, "src-1", None),
    ChunkAssessment(BAD, "src-2", Unsafe.ONE_WINDOW, "proven in 1 of 2 proof windows"),
]

ODD_KEYS = [
    b"comma,quote\"semi;colon'",
    b"new\nline\r\n",
    b"100% sure %41 %2F",
    b"plus+and space",
    "é ∑ 🗄".encode(),
    "e\u0301".encode(),
    b"../a//b/./~tilde-_.",
    b"\x01\x1f\x7f",
    b"=cmd()",
    b"/",
    b" ",
]


def row(obj: S3Object, chunk: int = GOOD, **changes) -> dict:
    """Return a location of an object."""
    values = {
        "key": obj.key,
        "object_version": obj.object_version,
        "part": 0,
        "part_count": 0,
        "caf_file_id": chunk,
        "start_byte": 10,
        "end_byte": 10 + obj.size_bytes,
        "version_id": obj.version_id,
        "etag": obj.etag,
        "sha256": hashlib.sha256(obj.key).digest(),
        "last_modified": obj.last_modified,
        "header_set": HEADERS_OF_ALL.id,
    }
    return values | changes


def write_located(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=LOCATED_SCHEMA), path)
    return path


@dataclass
class Decided:
    """Return decisions by (key, version id)."""

    rows: list[dict]
    gone: int
    gone_examples: list[bytes]

    def reasons(self) -> list[str | None]:
        return [row["reason"] for row in self.rows]

    def details(self) -> list[str]:
        return [row["detail"] for row in self.rows]


def write_rewritten(path: Path, rows: Iterable[tuple[S3Object, str]]) -> Path:
    rows = [
        {"key": obj.key, "last_modified": obj.last_modified, "detail": detail}
        for obj, detail in rows
    ]
    pq.write_table(pa.Table.from_pylist(rows, REWRITTEN_SCHEMA), path)
    return path


def decide(
    folder: Path,
    objects: list[S3Object],
    rows=(),
    known=(),
    assessments=ASSESSMENTS,
    *,
    rewritten=(),
    filters=NO_FILTER,
) -> Decided:
    folder.mkdir(exist_ok=True)
    snapshot = write_snapshot(folder / "s.parquet", *[[item] for item in objects])
    located, standing = (
        write_located(folder / "l.parquet", list(rows)),
        write_standing(folder / "k.parquet", list(known)),
    )
    decisions = Decisions(
        snapshot.path,
        located,
        standing,
        write_rewritten(folder / "r.parquet", rewritten),
        assessments,
        filters=filters,
    )
    decided = [each for batch in decisions.batches() for each in batch.to_pylist()]
    assert len(decided) == snapshot.object_count
    return Decided(decided, decisions.gone_count, decisions.gone_examples)


# --- one object
# ------------------------------------------------------------------------------------------


def test_unchanged_object_in_a_good_chunk_is_safe(tmp_path):
    same = [thing(b"a", etag="e", size=3), thing(b"b", version="v1")]
    assert decide(tmp_path, same, map(row, same)).reasons() == [None, None]


def test_object_in_a_bad_chunk_has_the_chunks_reason(tmp_path):
    obj = thing(b"a")
    decided = decide(tmp_path, [obj], [row(obj, BAD)])
    assert (decided.reasons(), decided.details()) == (
        ["one_window"],
        ["proven in 1 of 2 proof windows"],
    )


def test_object_in_an_unchecked_chunk_is_not_safe(tmp_path):
    obj = thing(b"a")
    assert decide(tmp_path, [obj], [row(obj, 99)]).reasons() == ["not_looked_at"]


@pytest.mark.parametrize(
    ("now", "archived"),
    [
        (thing(b"a", etag="other"), thing(b"a")),
        (thing(b"a", size=2), thing(b"a")),
        (thing(b"a", version="v2"), thing(b"a")),
        (thing(b"a", version="v2"), thing(b"a", version="v1")),
        (thing(b"a", version="v1", etag="x"), thing(b"a", version="v1")),
        (thing(b"a", version="etag:e:1"), thing(b"a", etag="e", size=1)),
    ],
)
def test_another_object_under_the_key_is_changed(tmp_path, now, archived):
    assert decide(tmp_path, [now], [row(archived)]).reasons() == ["changed"]


def test_key_listed_twice_without_versions_is_not_safe(tmp_path):
    first, second = thing(b"a", etag="1"), thing(b"a", etag="2", minute=1)
    assert decide(
        tmp_path, [first, second, thing(b"b")], [row(first), row(second), row(thing(b"b"))]
    ).reasons() == [
        "changed",
        "changed",
        None,
    ]


def test_two_versions_of_a_key_are_two_objects(tmp_path):
    first, second = thing(b"a", version="1"), thing(b"a", version="2", minute=1)
    assert decide(tmp_path, [first, second], [row(first)]).reasons() == [None, "changed"]


def test_a_row_of_another_length_than_the_object_disagrees(tmp_path):
    obj = thing(b"a", size=5, version="v")
    assert decide(tmp_path, [obj], [row(obj, end_byte=14)]).reasons() == ["disagrees"]


def test_row_of_a_part_does_not_make_an_object_safe(tmp_path):
    obj = thing(b"a")
    assert decide(tmp_path, [obj], [row(obj, part=1, part_count=2)]).reasons() == ["changed"]


def in_parts(obj: S3Object, chunks=(GOOD, GOOD, GOOD)) -> list[dict]:
    """Return the locations of an object of 9 bytes in three parts."""
    return [
        row(obj, chunk, part=part, part_count=3, end_byte=13)
        for part, chunk in enumerate(chunks, 1)
    ]


def test_split_object_is_as_safe_as_its_worst_chunk(tmp_path):
    obj = thing(b"a", size=9)
    assert decide(tmp_path, [obj], in_parts(obj)).reasons() == [None]
    for chunks in ((BAD, GOOD, GOOD), (GOOD, BAD, GOOD), (GOOD, GOOD, BAD)):
        assert decide(tmp_path, [obj], in_parts(obj, chunks)).reasons() == ["one_window"]
    for chunks in ((99, GOOD, GOOD), (GOOD, GOOD, 99), (BAD, GOOD, 99)):
        assert decide(tmp_path, [obj], in_parts(obj, chunks)).reasons() == ["not_looked_at"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: rows.pop(0), "changed"),
        (lambda rows: rows.pop(), "changed"),
        (lambda rows: rows[1].update(part=1), "changed"),
        (lambda rows: rows[1].update(part_count=4), "changed"),
        (lambda rows: rows.append(rows[1] | {"part": 4}), "changed"),
        (lambda rows: rows[1].update(object_version="another"), "changed"),
        (lambda rows: rows[1].update(end_byte=14), "disagrees"),
        (lambda rows: [row.update(etag="other") for row in rows], "changed"),
    ],
)
def test_incomplete_parts_do_not_make_an_object_safe(tmp_path, change, reason):
    obj = thing(b"a", size=9)
    rows = in_parts(obj)
    change(rows)
    assert decide(tmp_path, [obj], rows).reasons() == [reason]


@pytest.mark.parametrize("version", ["a,b", 'a"b', "a b", "a\nb", "ä", "a%2Cb", "a+b"])
def test_a_version_id_that_would_need_encoding_is_not_expressible(tmp_path, version):
    obj = thing(b"a", version=version)
    assert decide(tmp_path, [obj], [row(obj)]).reasons() == ["not_expressible"]


@pytest.mark.parametrize("etag", ["", 'W/"abc"'])
def test_unreliable_etag_makes_nothing_safe(tmp_path, etag):
    bare, pinned = (replace(thing(b"a"), etag=etag, version_id=version) for version in (None, "v1"))
    assert decide(tmp_path, [bare], [row(bare)]).reasons() == ["not_told_apart"]
    assert decide(tmp_path, [pinned], [row(pinned)]).reasons() == [None]


def test_claimed_skipped_and_new_objects_are_distinguished(tmp_path):
    claimed, skipped, new, bad = thing(b"claimed"), thing(b"skipped"), thing(b"new"), thing(b"\xff")
    known = [
        StandingRow(b"claimed", claimed.object_version, "claimed"),
        StandingRow(b"claimed", claimed.object_version, "skipped", "changed", True),
        StandingRow(b"skipped", skipped.object_version, "skipped", "cold_storage"),
        StandingRow(b"%FF", bad.object_version, "skipped", "unsupported_key"),
    ]
    decided = decide(tmp_path, [claimed, new, skipped, bad], known=known)
    assert decided.reasons() == ["claimed", "not_planned", "skipped", "skipped"]
    assert decided.details() == ["", "", "cold_storage", "unsupported_key"]


def test_an_object_that_a_filter_leaves_out_has_this_reason(tmp_path):
    archived, changed, claimed, new, skipped, large, selected = (
        thing(key, size=size)
        for key, size in (
            (b"x/archived", 1),
            (b"x/changed", 1),
            (b"x/claimed", 1),
            (b"x/new", 1),
            (b"x/skipped", 1),
            (b"y/large", 9),
            (b"y/new", 1),
        )
    )
    decided = decide(
        tmp_path,
        [archived, replace(changed, etag="new"), claimed, new, skipped, large, selected],
        [row(archived), row(changed)],
        [
            StandingRow(claimed.key, claimed.object_version, "claimed"),
            StandingRow(skipped.key, skipped.object_version, "skipped", "cold_storage"),
        ],
        filters=ObjectFilter(exclude=("x/*",), max_size_bytes=8),
    )
    out = "left_out"
    assert decided.reasons() == [None, out, "claimed", out, "skipped", out, "not_planned"]
    assert decided.details()[3:] == ["by exclude", "cold_storage", "by max_size", ""]


def test_encoded_form_of_a_key_is_another_key(tmp_path):
    plain = thing(b"%FF")
    known = [StandingRow(b"%FF", plain.object_version, "skipped", "unsupported_key")]
    assert decide(tmp_path, [plain], [row(plain)], known).reasons() == [None]


def test_a_changed_object_that_is_claimed_again_is_claimed(tmp_path):
    now = thing(b"a", etag="new")
    decided = decide(
        tmp_path, [now], [row(thing(b"a"))], [StandingRow(b"a", now.object_version, "claimed")]
    )
    assert decided.reasons() == ["claimed"]


def test_located_keys_that_are_not_listed_are_gone(tmp_path):
    here = thing(b"here")
    rows = [
        row(here),
        row(thing(b"here", etag="old")),
        row(thing(b"x", etag="1")),
        row(thing(b"x", etag="2")),
        row(thing(b"y")),
    ]
    decided = decide(tmp_path, [here], rows)
    assert (decided.reasons(), decided.gone, decided.gone_examples) == ([None], 2, [b"x", b"y"])


def test_rewritten_object_is_decided_once(tmp_path):
    archived = thing(b"a")
    later = MOMENT + timedelta(days=1)
    again = replace(archived, last_modified=later, rewritten_at=later)
    decided = decide(
        tmp_path, [again], [row(archived)], rewritten=[(again, "no SHA-256"), (again, "no SHA-256")]
    )
    assert (decided.reasons(), decided.details()) == (["rewritten"], ["no SHA-256"])
    decided = decide(
        tmp_path, [again], [row(archived), row(again)], rewritten=[(again, "no SHA-256")]
    )
    assert (decided.reasons(), decided.details()) == ([None], [""])


def test_an_empty_source_has_nothing_to_decide(tmp_path):
    decided = decide(tmp_path, [], [row(thing(b"a"))])
    assert (decided.rows, decided.gone) == ([], 1)


def test_a_file_that_cannot_be_read_is_an_integrity_error(tmp_path):
    write_located(tmp_path / "l.parquet", [])
    (tmp_path / "l.parquet").write_bytes(b"nonsense")
    snapshot = write_snapshot(tmp_path / "s.parquet", [thing(b"a")])
    standing, rewritten = (
        write_standing(tmp_path / "k.parquet", []),
        write_rewritten(tmp_path / "r.parquet", []),
    )
    files = snapshot.path, tmp_path / "l.parquet", standing, rewritten
    with pytest.raises(IntegrityError):
        list(Decisions(*files, [], filters=NO_FILTER).batches())


def test_sums_are_kept_by_reason_and_by_skip(tmp_path):
    decided = decide(
        tmp_path,
        [thing(b"a", size=3), thing(b"b", size=4), thing(b"c", size=5)],
        [row(thing(b"c", size=5))],
        [
            StandingRow(b"a", "etag:e:3", "skipped", "changed"),
            StandingRow(b"b", "etag:e:4", "skipped", "access_denied"),
        ],
    )
    from caf_pipeline.maintenance.deletion.deletable import DECISION_SCHEMA

    sums = tallied([pa.RecordBatch.from_pylist(decided.rows, schema=DECISION_SCHEMA)])
    assert sorted(sums, key=str) == [
        ("skipped", "access_denied", 1, 4),
        ("skipped", "changed", 1, 3),
        (None, "", 1, 5),
    ]


# --- all objects: properties over random worlds
# ----------------------------------------------------------------------

keys = st.one_of(
    st.sampled_from([b"a", b"b"]),
    st.sampled_from([b"a/b", *ODD_KEYS]),
    st.text(min_size=1, max_size=4).map(
        # fmt: skip  # noqa: RUF028
        lambda text: text.encode("utf-8", "surrogatepass")
    ),
    st.binary(min_size=1, max_size=3),
)
objects = st.builds(
    lambda key, etag, size, version: thing(key, etag=etag, size=size, version=version),
    keys,
    st.sampled_from(["e", "f"]),
    st.integers(0, 2),
    st.sampled_from([None, None, "v1", "v2", "v,3"]),
)


@st.composite
def worlds(draw):
    """Draw listed objects, locations, claims, skips, and assessments of three chunks."""
    listed = draw(
        st.lists(objects, max_size=25, unique_by=lambda obj: (obj.key, obj.object_version))
    )
    if listed and draw(st.booleans()):  # a key that changed during the listing
        listed.append(replace(listed[0], etag="twin"))
        listed = list({(obj.key, obj.object_version): obj for obj in listed}.values())
    others = draw(st.lists(objects, max_size=10))
    archived = {
        (obj.key, obj.object_version): obj for obj in [*listed, *others] if is_supported(obj.key)
    }
    located, known = [], []
    for obj in archived.values():
        place = draw(st.sampled_from(["located", "located", "claimed", "skipped", "nowhere"]))
        if place == "located":
            located.append(row(obj, draw(st.integers(1, 4))))
        elif place != "nowhere":
            reason = "changed" if place == "skipped" else None
            known.append(StandingRow(obj.key, obj.object_version, place, reason))
    reasons = st.sampled_from([None, None, Unsafe.DAMAGED, Unsafe.NOT_READ_BACK])
    return (
        listed,
        located,
        known,
        [ChunkAssessment(number, f"src-{number}", draw(reasons)) for number in (1, 2, 3)],
    )


def expected_safe(listed, located, assessments) -> set[tuple[bytes, str | None]]:
    """The rules in plain Python."""
    good = {assessment.caf_file_id for assessment in assessments if assessment.reason is None}
    rows = {
        (location["key"], location["object_version"]): location
        for location in located
        if location["caf_file_id"] in good
    }
    without_id = [obj.key for obj in listed if obj.version_id is None]
    return {
        (obj.key, obj.version_id)
        for obj in listed
        if (found := rows.get((obj.key, obj.object_version)))
        and (found["version_id"], found["etag"], found["end_byte"] - found["start_byte"])
        == (obj.version_id, obj.etag, obj.size_bytes)
        and (obj.version_id is not None or without_id.count(obj.key) == 1)
        and "," not in (obj.version_id or "")
    }


@pytest.mark.thorough
@settings(max_examples=20)
@given(world=worlds())
def test_list_and_report_together_are_the_inventory(tmp_path_factory, world):
    listed, located, known, assessments = world
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        use_small_windows(patch)
        decided = decide(folder, listed, located, known, assessments)
    batch = as_batch(decided)
    with_versions = any(obj.version_id for obj in listed)
    listed_safe = written(folder, batch, with_versions=with_versions)
    reported = pq.read_table(folder / "r.parquet").to_pylist()
    safe = {
        (key, None if version in (None, "null") else version) for _, key, version in listed_safe
    }
    unsafe = {
        (each["key"], each["version_id"], each["etag"], each["size_bytes"]) for each in reported
    }
    assert safe == expected_safe(listed, located, assessments)
    assert len(listed_safe) + len(reported) == len(listed)
    assert unsafe == {
        (o.key, o.version_id, o.etag, o.size_bytes)
        for o in listed
        if (o.key, o.version_id) not in safe
    }
    assert all(each["reason"] for each in reported)


def as_batch(decided: Decided) -> pa.RecordBatch:
    from caf_pipeline.maintenance.deletion.deletable import DECISION_SCHEMA

    return pa.RecordBatch.from_pylist(decided.rows, schema=DECISION_SCHEMA)


def written(
    folder: Path, batch: pa.RecordBatch, *, with_versions: bool, bucket="bucket"
) -> list[tuple]:
    """Write both files, and read the list as another program does: (bucket, key, version id)."""
    import pyarrow.compute as pc

    manifest, report = (
        BatchManifest(folder / "m.csv", "t", bucket=bucket, with_versions=with_versions),
        None,
    )
    report = Report(folder / "r.parquet", "t")
    is_safe = pc.is_null(batch.column("reason"))
    manifest.add(batch.filter(is_safe))
    report.add(batch.filter(pc.invert(is_safe)))
    manifest.publish()
    report.publish()
    manifest.abort()
    report.abort()
    if not (folder / "m.csv").exists():
        return []
    lines = list(
        csv.reader(io.StringIO((folder / "m.csv").read_text(encoding="ascii"), newline=""))
    )
    assert {len(line) for line in lines} <= {3 if with_versions else 2}
    return [
        (line[0], unquote_to_bytes(line[1]), line[2] if with_versions else None) for line in lines
    ]


# --- the files
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, "3/L4kqtJlcpXroDTDmJ".replace("/", "-")])
def test_every_kind_of_key_round_trips_through_the_list(tmp_path, version):
    odd = [thing(key, version=version) for key in sorted(ODD_KEYS)]
    lines = written(
        tmp_path, as_batch(decide(tmp_path / "d", odd, map(row, odd))), with_versions=bool(version)
    )
    assert lines == [("bucket", key, version) for key in sorted(ODD_KEYS)]


def test_keys_are_encoded_as_everywhere_in_this_project(tmp_path):
    odd = [thing(key) for key in sorted([*ODD_KEYS, bytes(range(1, 128)), "ÿ€".encode()])]
    odd += [thing(b"\xfe\xff"), thing(b"a\0b"), thing(b"x" * 1025)]
    decided = decide(tmp_path, sorted(odd, key=lambda obj: obj.key))
    assert all(row["encoded_key"] == quote_from_bytes(row["key"]) for row in decided.rows)


def test_object_without_version_id_is_named_null(tmp_path):
    objects = [thing(b"a", version="v1"), thing(b"b")]
    lines = written(
        tmp_path, as_batch(decide(tmp_path / "d", objects, map(row, objects))), with_versions=True
    )
    assert lines == [("bucket", b"a", "v1"), ("bucket", b"b", "null")]


def test_a_list_has_neither_a_header_nor_carriage_returns(tmp_path):
    obj = thing(b"a b")
    written(tmp_path, as_batch(decide(tmp_path / "d", [obj], [row(obj)])), with_versions=False)
    assert (tmp_path / "m.csv").read_bytes() == b"bucket,a%20b\n"


def test_list_is_renamed_only_when_complete(tmp_path):
    obj = thing(b"a")
    manifest = BatchManifest(tmp_path / "m.csv", "t", bucket="bucket", with_versions=False)
    manifest.add(as_batch(decide(tmp_path / "d", [obj], [row(obj)])))
    assert not (tmp_path / "m.csv").exists()
    manifest.abort()
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_list_of_nothing_removes_the_old_one(tmp_path):
    (tmp_path / "m.csv").write_text("bucket,old\n")
    manifest = BatchManifest(tmp_path / "m.csv", "t", bucket="bucket", with_versions=False)
    manifest.remove_older()
    manifest.publish()
    manifest.abort()
    assert list(tmp_path.iterdir()) == []


def test_foreign_file_is_not_replaced_by_a_list(tmp_path):
    file = tmp_path / "f.csv"
    require_manifest(file, "bucket")
    for text in ("", "bucket,a\n", "bucket,a,v\n"):
        file.write_text(text)
        require_manifest(file, "bucket")
    for text in ("name,age\n", "\n", "other,a\n", "bucket\n", "bucket,a,b,c\n"):
        file.write_text(text)
        with pytest.raises(UsageError, match=r"f\.csv"):
            require_manifest(file, "bucket")
    with pytest.raises(UsageError, match="cannot be replaced"):
        require_manifest(tmp_path, "bucket")


def test_report_replaces_only_a_report(tmp_path):
    for name in ("r.parquet", "r.csv"):
        for _ in range(2):
            require_report(tmp_path / name)
            report = Report(tmp_path / name, "t")
            report.publish()
            report.abort()
    with pytest.raises(UsageError, match="Parquet or CSV"):
        require_report(tmp_path / "r.txt")
    for name in ("x.parquet", "x.csv"):
        (tmp_path / name).write_bytes(b"theirs\n")
        with pytest.raises(UsageError, match="is not a report"):
            require_report(tmp_path / name)


def test_a_csv_report_holds_every_kind_of_key_and_detail(tmp_path):
    odd = sorted([thing(key) for key in [*ODD_KEYS, b"\xff"]], key=lambda obj: obj.key)
    detail = 'with "quotes", commas\nand lines'
    assessments = [ChunkAssessment(GOOD, "src-1", Unsafe.DAMAGED, detail)]
    batch = as_batch(
        decide(
            tmp_path,
            odd,
            [row(obj) for obj in odd if is_supported(obj.key)],
            assessments=assessments,
        )
    )
    report = Report(tmp_path / "r.csv", "t")
    report.add(batch)
    report.publish()
    with (tmp_path / "r.csv").open(encoding="utf-8", newline="") as file:
        header, *lines = csv.reader(file)
    assert tuple(header) == REPORT_COLUMNS
    assert [unquote_to_bytes(line[0]) for line in lines] == [obj.key for obj in odd]
    assert {line[7] for line in lines} == {detail, "unsupported_key"}


def test_missing_folder_is_refused_first(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        BatchManifest(tmp_path / "no" / "m.csv", "t", bucket="b", with_versions=False)


@pytest.mark.thorough
def test_full_disk_keeps_the_old_files(small_disk, tmp_path):
    target = small_disk / "m.csv"
    target.write_text("bucket,old\n")
    many = [thing(b"%07d" % number + b"x" * 500) for number in range(3000)]
    batch = as_batch(decide(tmp_path, many, map(row, many)))
    manifest = BatchManifest(target, "t", bucket="bucket", with_versions=False)
    with pytest.raises(StagingError, match=r"m\.csv"):  # noqa: PT012 - whichever write meets the full disk
        for _ in range(10):
            manifest.add(batch)
        manifest.publish()
    manifest.abort()
    assert target.read_text() == "bucket,old\n"
    assert list(small_disk.iterdir()) == [target]


# --- rows against manifests and bytes
# --------------------------------------------------------------------------------


def manifest_row(obj: S3Object, **changes) -> dict:
    located = row(obj)
    values = {
        "member": obj.key.decode(),
        "key": obj.key.decode(),
        "version_id": obj.version_id,
        "etag": obj.etag,
        "size_bytes": obj.size_bytes,
        "start_byte": located["start_byte"],
        "end_byte": located["end_byte"],
        "sha256": located["sha256"],
        "last_modified": MOMENT,
        "storage_class": "STANDARD",
        "inventory_time": MOMENT,
        "content_type": "text/plain",
        "cache_control": "",
        "user_metadata": sorted(HEADERS_OF_ALL.user_metadata.items()),
    }
    return values | changes


def differing(folder: Path, rows: list[dict], manifest: list[dict], chunk: int = GOOD) -> int:
    pq.write_table(
        pa.Table.from_pylist(manifest, schema=MANIFEST_SCHEMA), folder / "manifest.parquet"
    )
    return LocatedRows(write_located(folder / "l.parquet", rows)).differing(
        chunk, folder / "manifest.parquet"
    )


def test_rows_that_are_in_the_manifest_agree_with_it(tmp_path):
    objects = [*(thing(key, size=7) for key in ODD_KEYS), thing(b"v", version="v1")]
    rows = [*map(row, objects), row(thing(b"of another chunk"), BAD)]
    assert (
        differing(
            tmp_path, rows, [*map(manifest_row, objects), manifest_row(thing(b"not located here"))]
        )
        == 0
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": b"x" * 32},
        {"start_byte": 11, "end_byte": 12},
        {"end_byte": 12},
        {"etag": "other"},
        {"version_id": "v2"},
        {"key": b"b"},
        {"part": 1},
        {"sha256": b"short"},
        {"crc64nvme": b"\0" * 8},
        {"s3_checksum": "crc32:00000000"},
        {"header_set": None},
        {"header_set": ObjectHeaders("text/plain").id},
    ],
)
def test_row_missing_from_the_manifest_differs(tmp_path, changes):
    obj = thing(b"a")
    assert differing(tmp_path, [row(obj, **changes)], [manifest_row(obj)]) == 1


@pytest.mark.parametrize("changes", [{"crc64nvme": b"\1" * 8}, {"s3_checksum": "crc32:00000001"}])
def test_a_row_with_other_checksums_than_the_manifest_differs(tmp_path, changes):
    obj, recorded = thing(b"a"), {"crc64nvme": b"\0" * 8, "s3_checksum": "crc32:00000000"}
    manifest = [manifest_row(obj, **recorded)]
    assert differing(tmp_path, [row(obj, **recorded)], manifest) == 0
    assert differing(tmp_path, [row(obj, **recorded | changes)], manifest) == 1


def test_row_skipped_in_the_manifest_differs(tmp_path):
    assert (
        differing(tmp_path, [row(thing(b"a"))], [manifest_row(thing(b"a"), skip_reason="changed")])
        == 1
    )


def test_a_manifest_without_the_columns_is_an_integrity_error(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "m.parquet")
    with pytest.raises(IntegrityError):
        LocatedRows(write_located(tmp_path / "l.parquet", [])).differing(1, tmp_path / "m.parquet")


def test_a_digest_covers_all_values_of_rows_in_any_order(tmp_path):
    objects = [thing(b"a", version="v"), thing(b"b"), thing(b"c")]
    unset = {"crc64nvme": None, "s3_checksum": None}
    rows = [row(obj, 1 + number // 2, **unset) for number, obj in enumerate(objects)]

    def digests(rows):
        located = LocatedRows(write_located(tmp_path / "l.parquet", rows))
        return located.digest(1), located.digest(2)

    first, second = digests(rows)
    assert first != second
    assert digests(rows[::-1]) == digests([rows[0], rows[2], rows[1]]) == (first, second)
    assert digests(rows[1:])[0] != first
    changed = {
        field.name: {
            pa.int32(): 7,
            pa.int64(): 7,
            pa.string(): "other",
            pa.binary(): b"other",
            pa.timestamp("us", tz="UTC"): MOMENT + timedelta(days=9),
        }[field.type]
        for field in LOCATED_SCHEMA
    }
    others = [{**rows[0], name: value} for name, value in changed.items()]
    others += [
        {**rows[0], name: value}
        for name in ("version_id", "crc64nvme", "s3_checksum")
        for value in (None, type(changed[name])())
    ]
    others = [other for other in others if other != rows[0]]
    assert all(digests([other, *rows[1:]])[0] != first for other in others)
    assert len({digests([other, *rows[1:]])[0] for other in others}) == len(others)


BODY = bytes(range(256)) * 4


def a_range(start: int, end: int, sha256: bytes | None = None) -> tuple[int, int, bytes]:
    return start, end, sha256 or hashlib.sha256(BODY[start:end]).digest()


@pytest.mark.parametrize("piece", [1, 7, 100, 2000])
@pytest.mark.parametrize(
    ("ranges", "wrong"),
    [
        ([], 0),
        ([a_range(0, 1024)], 0),
        ([a_range(0, 10), a_range(10, 11), a_range(11, 11), a_range(500, 1024)], 0),
        ([a_range(3, 3, b"x" * 32)], 1),
        ([a_range(0, 10), a_range(10, 20, b"x" * 32), a_range(20, 30)], 1),
        ([a_range(0, 10), a_range(5, 20), a_range(20, 30)], 1),  # inside of the range before
        ([a_range(1000, 1025), a_range(2000, 2001)], 2),  # past the end
        ([(20, 10, b"x" * 32), a_range(20, 30)], 1),
    ],
)
def test_ranges_are_compared_in_one_pass_whatever_the_pieces(piece, ranges, wrong):
    check = RangeCheck(ranges)
    for start in range(0, len(BODY), piece):
        check.update(BODY[start : start + piece])
    assert check.finish() == wrong


def test_a_chunks_ranges_come_in_order(tmp_path):
    objects = [thing(b"%03d" % number) for number in range(20)]
    rows = [
        row(obj, 1 + number % 2, start_byte=1000 - number, end_byte=1000)
        for number, obj in enumerate(objects)
    ]
    ranges = list(LocatedRows(write_located(tmp_path / "l.parquet", rows)).ranges(1))
    assert ranges == sorted(
        (each["start_byte"], 1000, each["sha256"]) for each in rows if each["caf_file_id"] == 1
    )
