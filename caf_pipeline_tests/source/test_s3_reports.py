"""S3 Inventory's reports on a real server: what is taken of them, and which are refused.

Written by pyarrow, in each format.
"""

import gzip
import hashlib
import json
import re
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, quote_plus

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caf_pipeline.errors import (
    BucketMissing,
    CafError,
    ReportRefused,
    SettingsError,
    SourceDenied,
    SourceUnreachable,
    UsageError,
)
from caf_pipeline.inventory.objects import VersionCounts
from caf_pipeline.inventory.snapshot import SnapshotWriter, read_objects
from caf_pipeline.source.protocol import ReportCounts
from caf_pipeline.source.s3.listing import decode_key
from caf_pipeline.source.s3.report_rows import decode_keys
from caf_pipeline.source.s3.reports import FILES_AT_ONCE
from caf_pipeline_tests.contracts.object_source import KEYS, listed
from caf_pipeline_tests.support.inventory_reports import (
    CSV_NAMES,
    FORMATS,
    OF_VERSIONS,
    SCHEMA,
    WRITERS,
    ReportWriter,
    csv_key,
    file_schema,
    listed_rows,
)
from caf_pipeline_tests.support.s3_server import ScriptedAnswer, make_bucket, s3_error

CURRENT_ONLY = tuple(name for name in SCHEMA.names if name not in OF_VERSIONS)
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def destination(s3_server):
    return make_bucket(s3_server)


def writer(bucket, destination, **options) -> ReportWriter:
    return ReportWriter(bucket.client, bucket.name, destination.name, **options)


def taken(source, folder, name=""):
    """Return the objects of a report, as a snapshot has them, and the counts."""
    report = source.open_report(name)
    files, counts = [], ReportCounts()
    folder.mkdir(exist_ok=True)
    with SnapshotWriter(
        folder / "snapshot.parquet", source="demo", listed_at=report.taken_at, report=report.url
    ) as snapshot:
        for file, file_counts in report.fetch(folder):
            files.append(file)
            counts.add(file_counts)
        snapshot.add_files(files)
        path = snapshot.finish().path
    return list(read_objects(path)), counts


def keys_taken(source, folder, name="") -> list[bytes]:
    return [obj.key for obj in taken(source, folder, name)[0]]


def fields(obj):
    """Return the fields of an object that reports and listings share."""
    return (
        obj.key,
        obj.object_version,
        obj.version_id,
        obj.size_bytes,
        obj.last_modified,
        obj.storage_class,
    )


# Reports equal listings.


@pytest.fixture(scope="module")
def every_key(s3_server):
    """A bucket with keys of every kind."""
    bucket = make_bucket(s3_server)
    for number, key in enumerate(KEYS):
        bucket.put(key, b"." * number, **({"ChecksumAlgorithm": "SHA256"} if number % 3 else {}))
    return bucket


@pytest.mark.thorough
@pytest.mark.parametrize(
    "columns", [tuple(SCHEMA.names), CURRENT_ONLY], ids=["all versions", "current only"]
)
@pytest.mark.parametrize("file_format", FORMATS)
def test_a_report_gives_the_same_snapshot_as_a_listing(
    every_key, destination, tmp_path, file_format, columns
):
    reports = writer(
        every_key, destination, file_format=file_format, columns=columns, files=FILES_AT_ONCE + 2
    )
    reports.write()
    objects, _ = taken(every_key.source(inventory=reports.folder), tmp_path)
    there = listed(every_key.source())
    assert [fields(obj) for obj in objects] == [fields(obj) for obj in there]
    assert [obj.checksum for obj in objects] == [obj.checksum.partition("/")[0] for obj in there]
    assert {obj.checksum for obj in objects} == {"", "SHA256"}


@pytest.mark.thorough
@pytest.mark.parametrize("status", ["Enabled", "Suspended"])
@pytest.mark.parametrize("file_format", FORMATS)
def test_current_objects_of_a_version_report_equal_a_listing(
    new_bucket, destination, tmp_path, file_format, status
):
    new_bucket.put("of before", b"0")
    new_bucket.keep_versions()
    for key, body in (("a", b"1"), ("a", b"22"), ("gone", b"3"), ("of before", b"44"), ("b", b"5")):
        new_bucket.put(key, body)
    new_bucket.delete("gone")
    new_bucket.keep_versions(status)
    new_bucket.put("b", b"666")
    reports = writer(new_bucket, destination, file_format=file_format)
    reports.write()
    objects, counts = taken(new_bucket.source(inventory=reports.folder), tmp_path)
    assert [fields(obj) for obj in objects] == [fields(obj) for obj in listed(new_bucket.source())]
    assert [obj.version_id is None for obj in objects] == [False, status == "Suspended", False]
    rows = listed_rows(new_bucket.client, new_bucket.name)
    older = sum(not row["is_latest"] for row in rows if not row["is_delete_marker"])
    assert counts.left_out == VersionCounts(older=older, markers=1, deleted_keys=1)
    assert older >= 3


@pytest.mark.parametrize("file_format", FORMATS)
def test_only_keys_under_the_prefix_are_taken(every_key, destination, tmp_path, file_format):
    reports = writer(every_key, destination, file_format=file_format)
    reports.write()
    source = every_key.source("a/", inventory=reports.folder)
    objects, counts = taken(source, tmp_path)
    assert [obj.key for obj in objects] == [obj.key for obj in listed(every_key.source("a/"))]
    assert 0 < counts.outside_prefix == len(KEYS) - len(objects)


def test_storage_classes_encryption_and_uploads_in_parts_are_counted(
    new_bucket, destination, tmp_path
):
    new_bucket.put("a")
    (row,) = listed_rows(new_bucket.client, new_bucket.name)
    rows = [
        row,
        row
        | {
            "key": "b",
            "storage_class": "GLACIER",
            "encryption_status": "SSE-C",
            "is_multipart_uploaded": True,
        },
    ]
    reports = writer(new_bucket, destination)
    reports.write(rows=rows)
    objects, counts = taken(new_bucket.source(inventory=reports.folder), tmp_path)
    assert [obj.storage_class for obj in objects] == ["STANDARD", "GLACIER"]
    assert (counts.storage_classes, counts.encryption) == (
        {"STANDARD": 1, "GLACIER": 1},
        {"SSE-S3": 1, "SSE-C": 1},
    )
    assert counts.multipart == 1


def test_a_file_that_a_manifest_names_twice_counts_once(new_bucket, destination, tmp_path):
    new_bucket.keep_versions()
    for body in (b"1", b"22"):
        new_bucket.put("a", body)
    reports = writer(new_bucket, destination)
    body = WRITERS["Parquet"](listed_rows(new_bucket.client, new_bucket.name), SCHEMA.names)
    key, md5 = (
        f"{reports.prefix}data/1.parquet",
        hashlib.md5(body, usedforsecurity=False).hexdigest(),
    )
    reports.put(key, body)
    reports.write_files([], files=[{"key": key, "size": len(body), "MD5checksum": md5}] * 2)
    source = new_bucket.source(inventory=reports.folder)
    objects, counts = taken(source, tmp_path)
    assert (len(objects), counts.storage_classes, counts.left_out.older) == (1, {"STANDARD": 1}, 1)
    assert (source.open_report().file_count, source.open_report().size_bytes) == (1, len(body))


def test_a_repeated_row_is_one_object_and_counts_twice(new_bucket, destination, tmp_path):
    new_bucket.keep_versions()
    for body in (b"1", b"22"):
        new_bucket.put("a", body)
    reports = writer(new_bucket, destination, files=2)
    rows = listed_rows(new_bucket.client, new_bucket.name)
    reports.write(rows=[row for row in rows for _ in range(2)])
    objects, counts = taken(new_bucket.source(inventory=reports.folder), tmp_path)
    assert (len(objects), counts.storage_classes, counts.left_out.older) == (1, {"STANDARD": 2}, 2)


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_report_of_an_empty_bucket_has_no_object(new_bucket, destination, tmp_path, file_format):
    reports = writer(new_bucket, destination, file_format=file_format)
    reports.write()
    assert keys_taken(new_bucket.source(inventory=reports.folder), tmp_path) == []


@pytest.mark.parametrize("file_format", FORMATS)
def test_columns_that_are_not_needed_may_be_missing(new_bucket, destination, tmp_path, file_format):
    new_bucket.put("a", b"12")
    needed = ("bucket", "key", "size", "last_modified_date", "e_tag")
    reports = writer(new_bucket, destination, file_format=file_format, columns=needed)
    reports.write()
    objects, counts = taken(new_bucket.source(inventory=reports.folder), tmp_path)
    assert [fields(obj) for obj in objects] == [fields(obj) for obj in listed(new_bucket.source())]
    assert (counts.encryption, counts.multipart) == ({"unknown": 1}, 0)


# Keys.


def as_array(texts: list[str]) -> pa.Array:
    return pa.array([text.encode() for text in texts], pa.binary())


@given(st.lists(st.binary(), min_size=1), st.integers(0, 3))
def test_report_keys_accept_both_forms_of_a_space(keys, first):
    for encode in (quote, quote_plus):
        encoded = as_array([encode(key, safe="/") for key in keys])
        assert decode_keys(encoded.slice(first)).to_pylist() == keys[first:]


@given(st.lists(st.text("%+/aF2é0 g", max_size=12), min_size=1))
def test_report_keys_decode_like_listed_keys(texts):
    try:
        expected = [decode_key(text, "url") for text in texts]
    except ValueError:
        with pytest.raises(ValueError, match="not percent-encoded"):
            decode_keys(as_array(texts))
    else:
        assert decode_keys(as_array(texts)).to_pylist() == expected


@pytest.mark.parametrize(
    ("written", "key"),
    [("bad%FF", b"bad\xff"), ("%00", b"\0"), ("a+b%2Bc", b"a b+c"), ("%0A%0D%22%2C", b'\n\r",')],
)
def test_csv_keys_may_encode_any_bytes(new_bucket, destination, tmp_path, written, key):
    reports = writer(new_bucket, destination, file_format="CSV", columns=CURRENT_ONLY)
    reports.write_files([csv_file(new_bucket.name, Key=written)])
    assert keys_taken(new_bucket.source(inventory=reports.folder), tmp_path) == [key]


# Which report.

NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture
def three_days(new_bucket, destination):
    """Reports of three days, each with a key named after it."""
    reports = writer(new_bucket, destination)
    names = {}
    for days in (2, 0, 1):
        (row,) = [
            {
                **dict.fromkeys(SCHEMA.names),
                **one_object(new_bucket.name),
                "key": f"{days} days ago",
            }
        ]
        names[days] = reports.write(NOW - days * DAY, rows=[row])
    return reports, names


def one_object(bucket: str) -> dict:
    return {
        "bucket": bucket,
        "key": "k",
        "is_latest": True,
        "is_delete_marker": False,
        "size": 1,
        "last_modified_date": NOW - 9 * DAY,
        "e_tag": "e1",
    }


def test_the_newest_report_has_its_manifests_time(new_bucket, tmp_path, three_days):
    source = new_bucket.source(inventory=three_days[0].folder)
    assert source.open_report().taken_at == NOW
    assert keys_taken(source, tmp_path) == [b"0 days ago"]


def test_a_report_opens_by_day_or_full_name(new_bucket, tmp_path, three_days):
    reports, names = three_days
    source = new_bucket.source(inventory=reports.folder)
    assert keys_taken(source, tmp_path, f"{NOW - DAY:%Y-%m-%d}") == [b"1 days ago"]
    assert keys_taken(source, tmp_path, names[2]) == [b"2 days ago"]


def test_a_reports_name_is_at_least_a_day(new_bucket, three_days):
    reports, names = three_days
    source = new_bucket.source(inventory=reports.folder)
    for end in range(10, len(names[1]) + 1):
        assert source.open_report(names[1][:end]).url.endswith(f"{names[1]}/")
    for name in (
        *(names[1][:end] for end in range(1, 10)),
        f"{names[1]}/",
        f"{names[1][:9]}x",
        " ",
        "today",
    ):
        with pytest.raises(UsageError, match=re.escape(repr(name))) as caught:
            source.open_report(name)
        assert "YYYY-MM-DD" in caught.value.hint


@pytest.mark.parametrize("missing", ["manifest.json", "manifest.checksum"])
def test_an_incomplete_report_is_passed_over(new_bucket, tmp_path, three_days, missing):
    reports, names = three_days
    new_bucket.client.delete_object(
        Bucket=reports.destination, Key=f"{reports.prefix}{names[0]}/{missing}"
    )
    source = new_bucket.source(inventory=reports.folder)
    assert keys_taken(source, tmp_path) == [b"1 days ago"]
    with pytest.raises(ReportRefused, match=f"of {names[0]}"):
        source.open_report(names[0])


def test_a_folder_without_reports_is_refused(new_bucket, destination):
    reports = writer(new_bucket, destination)
    reports.put(f"{reports.prefix}hive/dt=2026-11-20-01-00/symlink.txt", b"s3://x")
    reports.put(f"{reports.prefix}data/x.parquet", b"")
    with pytest.raises(ReportRefused, match=re.escape(reports.folder)) as caught:
        new_bucket.source(inventory=reports.folder).open_report()
    assert "48 hours" in caught.value.hint
    assert "sources.demo.inventory" in caught.value.hint


def test_a_source_without_the_setting_has_no_reports(new_bucket):
    with pytest.raises(SettingsError, match=r"sources\.demo\.inventory"):
        new_bucket.source().open_report()


# Refused reports.


def csv_file(bucket: str, columns=CURRENT_ONLY, **values: str) -> bytes:
    """Return a CSV file of one row, with some values replaced."""
    row = {
        "Bucket": bucket,
        "Key": "k",
        "VersionId": "",
        "IsLatest": "true",
        "IsDeleteMarker": "false",
        "Size": "1",
        "LastModifiedDate": "2026-11-01T12:30:15.000Z",
        "ETag": "e1",
        "StorageClass": "STANDARD",
        "IsMultipartUploaded": "false",
        "ReplicationStatus": "",
        "EncryptionStatus": "SSE-S3",
        "ChecksumAlgorithm": "",
    } | values
    return gzip.compress(
        (",".join(f'"{row[CSV_NAMES[name]]}"' for name in columns) + "\n").encode()
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"Key": "a%zz"}, "not percent-encoded: b'a%zz'"),
        ({"Key": "a%4"}, "not percent-encoded"),
        ({"Key": "%"}, "not percent-encoded"),
        ({"Key": ""}, "has a row without its Key"),
        ({"Key": 'a","b'}, "cannot be read"),
        ({"Size": str((1 << 53) + 1)}, "has a row with an impossible Size: key 'k'"),
        ({"Size": "-1"}, "has a row with an impossible Size"),
        ({"Size": "9" * 20}, "has a Size that cannot be read"),
        ({"Size": "1.5"}, "has a Size that cannot be read"),
        ({"Size": ""}, "has a row without its Size"),
        ({"ETag": ""}, "has a row without its ETag"),
        ({"ETag": "e\0"}, "has a row with an impossible ETag: key 'k'"),
        ({"ETag": "e\t1"}, "has a row with an impossible ETag"),
        ({"ETag": "e" * 1025}, "has a row with an impossible ETag"),
        ({"LastModifiedDate": "yesterday"}, "has a LastModifiedDate that cannot be read"),
        ({"LastModifiedDate": ""}, "has a row without its LastModifiedDate"),
        ({"Bucket": "another"}, "has a row of another bucket"),
        ({"StorageClass": "\udcff"}, "cannot be read"),
    ],
)
def test_an_impossible_row_is_refused(new_bucket, destination, tmp_path, values, words):
    reports = writer(new_bucket, destination, file_format="CSV", columns=CURRENT_ONLY)
    good = csv_file(new_bucket.name)
    raw = (",".join(f'"{value}"' for value in _row_of(new_bucket.name, values)) + "\n").encode(
        "utf-8", "surrogateescape"
    )
    reports.write_files([good, gzip.compress(raw)])
    refused(new_bucket.source(inventory=reports.folder), tmp_path, words)


def _row_of(bucket: str, values: dict[str, str]) -> list[str]:
    plain = (
        gzip.decompress(csv_file(bucket))
        .decode()
        .strip()
        .removeprefix('"')
        .removesuffix('"')
        .split('","')
    )
    return [
        values.get(CSV_NAMES[name], value) for name, value in zip(CURRENT_ONLY, plain, strict=True)
    ]


@pytest.mark.parametrize("size", [-1, (1 << 53) + 1])
@pytest.mark.parametrize("file_format", ["ORC", "Parquet"])
def test_an_impossible_size_is_refused_in_every_format(
    new_bucket, destination, tmp_path, file_format, size
):
    reports = writer(new_bucket, destination, file_format=file_format)
    reports.write(rows=[dict.fromkeys(SCHEMA.names) | one_object(new_bucket.name) | {"size": size}])
    refused(new_bucket.source(inventory=reports.folder), tmp_path, "impossible Size")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"version_id": "v\n1"}, "an impossible VersionId"),
        ({"version_id": "v" * 1025}, "an impossible VersionId"),
        ({"e_tag": "\0"}, "an impossible ETag"),
        ({"last_modified_date": 1 << 48}, "an impossible LastModifiedDate"),
        ({"last_modified_date": -(1 << 48)}, "an impossible LastModifiedDate"),
    ],
)
def test_unsendable_identities_and_impossible_dates_are_refused(
    new_bucket, destination, tmp_path, values, words
):
    new_bucket.keep_versions()
    reports = writer(new_bucket, destination)
    reports.write(
        rows=[
            dict.fromkeys(SCHEMA.names)
            | one_object(new_bucket.name)
            | {"version_id": "v1"}
            | values
        ]
    )
    refused(new_bucket.source(inventory=reports.folder), tmp_path, words)


@pytest.mark.parametrize(
    "column", ["version_id", "e_tag", "storage_class", "checksum_algorithm", "encryption_status"]
)
def test_text_that_is_not_utf8_is_refused(new_bucket, destination, tmp_path, column):
    new_bucket.keep_versions()
    reports = writer(new_bucket, destination)
    row = dict.fromkeys(SCHEMA.names) | one_object(new_bucket.name)
    table = pa.table(
        {name: pa.array([row[name]], SCHEMA.field(name).type) for name in SCHEMA.names}
    )
    text = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    sink = pa.BufferOutputStream()
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, text), sink)
    reports.write_files([sink.getvalue().to_pybytes()])
    refused(new_bucket.source(inventory=reports.folder), tmp_path, "cannot be read: ")


def test_the_largest_possible_size_is_accepted(new_bucket, destination, tmp_path):
    reports = writer(new_bucket, destination)
    reports.write(
        rows=[dict.fromkeys(SCHEMA.names) | one_object(new_bucket.name) | {"size": 1 << 53}]
    )
    ((obj,), _) = taken(new_bucket.source(inventory=reports.folder), tmp_path)
    assert obj.size_bytes == 1 << 53


def refused(source, folder, words, name="") -> CafError:
    """Read a report that is refused, and leaves no snapshot."""
    with pytest.raises(ReportRefused, match=re.escape(words)) as caught:
        taken(source, folder, name)
    assert caught.value.hint
    assert not (folder / "snapshot.parquet").exists()
    return caught.value


BAD_FILES = {
    "a truncated gzip": (
        "CSV",
        lambda body: body[:-9],
        "cannot be read: Truncated compressed stream",
    ),
    "no gzip at all": ("CSV", gzip.decompress, "cannot be read"),
    "a damaged gzip": ("CSV", lambda body: body[:30] + b"\0\0\0" + body[33:], "cannot be read"),
    "nothing": ("CSV", lambda body: b"", "is empty"),
    "a truncated ORC file": ("ORC", lambda body: body[: len(body) // 2], "cannot be read"),
    "a truncated Parquet file": ("Parquet", lambda body: body[:-9], "cannot be read"),
    "a web page": ("Parquet", lambda body: b"<html>", "cannot be read"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", BAD_FILES)
def test_a_damaged_file_with_a_right_checksum_is_refused(new_bucket, destination, tmp_path, case):
    file_format, damage, words = BAD_FILES[case]
    rows = [
        dict.fromkeys(SCHEMA.names) | one_object(new_bucket.name) | {"key": f"k{number}"}
        for number in range(2000)
    ]
    body = WRITERS[file_format](rows, SCHEMA.names)
    reports = writer(new_bucket, destination, file_format=file_format)
    reports.write_files([body, damage(body)])
    refused(new_bucket.source(inventory=reports.folder), tmp_path, words)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"x" * 9, "has 9 bytes"),
        (None, "another MD5"),
        (b"", "has 0 bytes"),
    ],
)
def test_a_file_that_differs_from_its_manifest_is_refused(
    every_key, destination, tmp_path, body, words
):
    reports = writer(every_key, destination, config="damaged")
    reports.write()
    if body is None:
        original = every_key.client.get_object(Bucket=destination.name, Key=reports.written[1])[
            "Body"
        ].read()
        body = original[:-1] + bytes([original[-1] ^ 1])
    reports.put(reports.written[1], body)
    refused(every_key.source(inventory=reports.folder), tmp_path, words)


def test_a_missing_file_is_named(every_key, destination, tmp_path):
    reports = writer(every_key, destination, config="missing")
    reports.write()
    every_key.client.delete_object(Bucket=destination.name, Key=reports.written[-1])
    refused(
        every_key.source(inventory=reports.folder),
        tmp_path,
        f"the file s3://{destination.name}/{reports.written[-1]}",
    )


@pytest.mark.thorough
@pytest.mark.parametrize("left_out", ["size", "storage_class", "is_latest"])
@pytest.mark.parametrize("file_format", FORMATS)
def test_a_schema_that_changes_between_files_is_refused(
    new_bucket, destination, tmp_path, file_format, left_out
):
    row = dict.fromkeys(SCHEMA.names) | one_object(new_bucket.name)
    reports = writer(new_bucket, destination, file_format=file_format)
    write = WRITERS[file_format]
    fewer = [name for name in SCHEMA.names if name != left_out]
    reports.write_files([write([row], SCHEMA.names), write([row], fewer)])
    words = "CSV parse error" if file_format == "CSV" else f"columns: {left_out}"
    refused(new_bucket.source(inventory=reports.folder), tmp_path, words)


def test_a_column_missing_in_the_manifest_is_refused(new_bucket, destination, tmp_path):
    row = dict.fromkeys(SCHEMA.names) | one_object(new_bucket.name)
    reports = writer(new_bucket, destination)
    files = [WRITERS["Parquet"]([row], SCHEMA.names)]
    reports.write_files(files, fileSchema=file_schema("Parquet", CURRENT_ONLY))
    refused(
        new_bucket.source(inventory=reports.folder),
        tmp_path,
        "is_delete_marker, is_latest, version_id",
    )


def test_a_column_of_another_type_is_refused(new_bucket, destination, tmp_path, monkeypatch):
    row = dict.fromkeys(SCHEMA.names) | one_object(new_bucket.name) | {"size": "1"}
    reports = writer(new_bucket, destination)
    at = SCHEMA.get_field_index("size")
    monkeypatch.setattr(
        "caf_pipeline_tests.support.inventory_reports.SCHEMA",
        SCHEMA.set(at, pa.field("size", pa.string())),
    )
    reports.write_files([WRITERS["Parquet"]([row], SCHEMA.names)])
    refused(
        new_bucket.source(inventory=reports.folder), tmp_path, "has a column size of type string"
    )


@pytest.mark.parametrize("file_format", FORMATS)
def test_missing_columns_are_named_before_a_file_is_fetched(
    new_bucket, destination, tmp_path, file_format
):
    columns = [name for name in SCHEMA.names if name not in ("size", "e_tag")]
    reports = writer(new_bucket, destination, file_format=file_format, columns=columns)
    reports.write_files([])
    error = refused(
        new_bucket.source(inventory=reports.folder), tmp_path, "has no column Size, ETag"
    )
    assert "Size, ETag" in error.hint


def test_a_storage_class_filter_needs_the_reports_column(new_bucket, destination, tmp_path):
    source = new_bucket.source(
        inventory=writer(new_bucket, destination).folder, needs_storage_class=True
    )
    without = [name for name in SCHEMA.names if name != "storage_class"]
    writer(new_bucket, destination, columns=without).write_files([], datetime.now(UTC) - 2 * DAY)
    error = refused(source, tmp_path, "has no column StorageClass")
    assert "StorageClass" in error.hint
    new_bucket.put("deleted", b"1")
    (row,) = listed_rows(new_bucket.client, new_bucket.name)
    marker = row | {"is_delete_marker": True, "size": None, "e_tag": None, "storage_class": None}
    writer(new_bucket, destination).write(datetime.now(UTC) - DAY, rows=[marker])
    assert taken(source, tmp_path)[0] == []
    writer(new_bucket, destination).write(rows=[row | {"storage_class": None}])
    refused(source, tmp_path / "later", "has a row without its StorageClass: key 'deleted'")


def test_a_versioned_bucket_needs_a_report_of_all_versions(new_bucket, destination, tmp_path):
    new_bucket.keep_versions()
    reports = writer(new_bucket, destination, columns=CURRENT_ONLY)
    reports.write()
    words = "has no column VersionId, IsLatest, IsDeleteMarker"
    assert (
        "list all versions"
        in refused(new_bucket.source(inventory=reports.folder), tmp_path, words).hint
    )


MANIFEST = {
    "sourceBucket": "b",
    "creationTimestamp": "1514944800000",
    "fileFormat": "CSV",
    "fileSchema": file_schema("CSV", SCHEMA.names),
    "files": [{"key": "k", "size": 1, "MD5checksum": "0" * 32}],
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is malformed"),
        (b"{", "is malformed"),
        (b"[]", "is malformed"),
        (b"null", "is malformed"),
        (b"[" * 100_000, "is malformed"),
        (b"\xff", "is malformed"),
        *[
            (
                {name: value for name, value in MANIFEST.items() if name != missing},
                f"is malformed: it has no {missing}",
            )
            for missing in MANIFEST
        ],
        ({"creationTimestamp": "today"}, "is malformed"),
        ({"creationTimestamp": "9" * 30}, "is malformed"),
        ({"fileFormat": "Avro"}, "format 'Avro'"),
        ({"fileFormat": 3}, "is malformed: fileFormat is not text"),
        ({"fileSchema": "Bucket, Key, Key"}, "names a column twice"),
        ({"fileSchema": ""}, "has no column Bucket, Key, Size, LastModifiedDate, ETag"),
        ({"files": 3}, "is malformed"),
        ({"files": ["k"]}, "is malformed"),
        ({"files": [{"key": "k", "size": -1, "MD5checksum": "0" * 32}]}, "is malformed"),
        ({"files": [{"key": "k", "size": 1, "MD5checksum": "0"}]}, "is malformed"),
        ({"files": [{"key": "", "size": 1, "MD5checksum": "0" * 32}]}, "is malformed"),
        ({"files": [{"key": "k", "size": 1}]}, "is malformed: it has no MD5checksum"),
    ],
)
def test_a_manifest_that_is_malformed_is_refused(new_bucket, destination, tmp_path, raw, words):
    if isinstance(raw, dict):
        whole = raw if len(raw) == len(MANIFEST) - 1 else MANIFEST | raw
        raw = json.dumps(
            {**whole, **({"sourceBucket": new_bucket.name} if "sourceBucket" in whole else {})}
        ).encode()
    reports = writer(new_bucket, destination)
    reports.write_manifest("2026-11-01T01-00Z", raw)
    refused(new_bucket.source(inventory=reports.folder), tmp_path, words)


def test_a_manifest_with_another_checksum_is_refused(new_bucket, tmp_path, three_days):
    reports, names = three_days
    reports.put(f"{reports.prefix}{names[0]}/manifest.checksum", b"0" * 32)
    refused(
        new_bucket.source(inventory=reports.folder),
        tmp_path,
        "MD5 in its manifest.checksum",
    )


def test_a_report_of_another_bucket_is_refused(new_bucket, destination, tmp_path):
    reports = writer(new_bucket, destination)
    reports.write(sourceBucket="another")
    error = refused(new_bucket.source(inventory=reports.folder), tmp_path, "bucket 'another'")
    assert new_bucket.name in str(error)


def test_a_report_from_the_future_is_refused(new_bucket, destination, tmp_path):
    reports = writer(new_bucket, destination)
    reports.write(NOW + DAY)
    refused(new_bucket.source(inventory=reports.folder), tmp_path, "still to come")


@pytest.mark.parametrize(
    ("only", "prefix", "refuses"),
    [("a/", "", True), ("a/", "a", True), ("a/", "a/b", False), ("", "", False)],
)
def test_an_inventory_with_a_filter_is_refused(new_bucket, tmp_path, only, prefix, refuses):
    reports = writer(new_bucket, new_bucket)
    reports.write(rows=[])
    described = {
        "Id": reports.config,
        "IsEnabled": True,
        "IncludedObjectVersions": "All",
        "Schedule": {"Frequency": "Daily"},
        "Destination": {
            "S3BucketDestination": {
                "Bucket": f"arn:aws:s3:::{new_bucket.name}",
                "Format": "Parquet",
            }
        },
        **({"Filter": {"Prefix": only}} if only else {}),
    }
    new_bucket.client.put_bucket_inventory_configuration(
        Bucket=new_bucket.name, Id=reports.config, InventoryConfiguration=described
    )
    source = new_bucket.source(prefix, inventory=reports.folder)
    if refuses:
        refused(source, tmp_path, "begin with 'a/'")
    else:
        assert keys_taken(source, tmp_path) == []


# Failures of S3.

FOLDER = "s3://dest/reports/bucket-of-script/daily/"


@pytest.mark.parametrize(
    ("answer", "error", "words", "hint"),
    [
        (
            s3_error(403, "AccessDenied"),
            SourceDenied,
            "source 'demo'",
            "kms:Decrypt",
        ),
        (
            s3_error(400, "KMS.DisabledException"),
            SourceDenied,
            "of source 'demo': KMS.DisabledException",
            "kms:Decrypt",
        ),
        (
            s3_error(403, "InvalidObjectState"),
            ReportRefused,
            "is in cold storage",
            "restore it there",
        ),
        (
            s3_error(404, "NoSuchBucket"),
            BucketMissing,
            "bucket 'dest'",
            "sources.demo.inventory",
        ),
        (
            s3_error(403, "InvalidAccessKeyId"),
            SourceDenied,
            "access key",
            "CAF_SOURCES__DEMO__ACCESS_KEY_ID",
        ),
        (s3_error(503, "SlowDown"), SourceUnreachable, "SlowDown", "try again"),
    ],
)
def test_causes_of_unreadable_reports_are_distinct(scripted_s3, answer, error, words, hint):
    scripted_s3.answer = lambda request: (
        s3_error(404, "NoSuchConfiguration") if "inventory" in request.query else answer
    )
    with pytest.raises(error, match=re.escape(words)) as caught:
        scripted_s3.source(inventory=FOLDER).open_report()
    assert hint in caught.value.hint


def test_a_report_opens_without_its_configuration(scripted_s3):
    scripted_s3.answer = lambda request: (
        s3_error(403, "AccessDenied")
        if "inventory" in request.query
        else ScriptedAnswer(200, b"<ListBucketResult/>")
    )
    with pytest.raises(ReportRefused, match=FOLDER):
        scripted_s3.source(inventory=FOLDER).open_report()


class RecordingClient:
    """A client that stores objects in a dict."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}

    def put_object(self, *, Bucket: str, Key: str, Body: bytes) -> None:
        self.bodies[f"/{Bucket}/{Key}"] = Body


@pytest.mark.parametrize(
    "broken",
    [
        lambda body: ScriptedAnswer(200, body[:9], length=len(body)),
        lambda body: s3_error(503, "SlowDown"),
    ],
)
def test_a_file_whose_body_breaks_off_is_fetched_again(scripted_s3, tmp_path, broken):
    reports = ReportWriter(
        client := RecordingClient(), "bucket-of-script", "dest", files=FILES_AT_ONCE
    )
    dated = reports.write(
        NOW - DAY,
        rows=[dict.fromkeys(SCHEMA.names) | one_object("bucket-of-script")] * FILES_AT_ONCE,
    )
    failed = set()

    def answer(request):
        if "inventory" in request.query:
            return s3_error(404, "NoSuchConfiguration")
        if "versioning" in request.query:
            return ScriptedAnswer(200, b"<VersioningConfiguration/>")
        if "list-type" in request.query:
            prefixes = f"<CommonPrefixes><Prefix>{reports.prefix}{dated}/</Prefix></CommonPrefixes>"
            return ScriptedAnswer(
                200,
                f"<ListBucketResult><IsTruncated>false</IsTruncated>{prefixes}</ListBucketResult>".encode(),
            )
        body = client.bodies[request.path]
        if "/data/" in request.path and request.path not in failed:
            failed.add(request.path)
            return broken(body)
        return ScriptedAnswer(200, body)

    scripted_s3.answer = answer
    assert keys_taken(scripted_s3.source(inventory=reports.folder), tmp_path) == [b"k"]
    assert len(failed) == FILES_AT_ONCE


def test_csv_keys_are_written_as_s3_writes_them():
    assert csv_key("a b/c+d=é") == "a+b/c%2Bd%3D%C3%A9"
