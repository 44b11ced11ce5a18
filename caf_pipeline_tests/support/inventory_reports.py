"""Writes inventory reports of a bucket in S3's three formats; the demo uses it, too.

moto stores the configuration of an inventory, but writes no report. Source: "Amazon S3 Inventory
list" and "Locating your inventory list" in the Amazon S3 User Guide.
"""

import gzip
import hashlib
import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote_plus

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.orc as pa_orc
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    {
        "bucket": pa.string(),
        "key": pa.string(),
        "version_id": pa.string(),
        "is_latest": pa.bool_(),
        "is_delete_marker": pa.bool_(),
        "size": pa.int64(),
        "last_modified_date": pa.timestamp("ms", tz="UTC"),
        "e_tag": pa.string(),
        "storage_class": pa.string(),
        "is_multipart_uploaded": pa.bool_(),
        "replication_status": pa.string(),
        "encryption_status": pa.string(),
        "checksum_algorithm": pa.string(),
    }
)
"""The columns of a report of all versions, in S3's order."""

# Such as LastModifiedDate and ETag.
CSV_NAMES = {name: "".join(map(str.capitalize, name.split("_"))) for name in SCHEMA.names}
OF_VERSIONS = ("version_id", "is_latest", "is_delete_marker")
FORMATS = ("CSV", "ORC", "Parquet")
SUFFIXES = {"CSV": "csv.gz", "ORC": "orc", "Parquet": "parquet"}
_ORC_TYPES = {"bool": "boolean", "int64": "bigint", "string": "string"}

Row = dict[str, Any]


def listed_rows(client: Any, bucket: str) -> list[Row]:
    """Return the rows of a report of all versions of a bucket, in random order."""
    keeps_versions = "Status" in client.get_bucket_versioning(Bucket=bucket)
    rows = []
    for page in client.get_paginator(
        "list_object_versions" if keeps_versions else "list_objects_v2"
    ).paginate(Bucket=bucket):
        objects = page.get("Versions" if keeps_versions else "Contents", ())
        rows += [_row(bucket, entry) | _object_of(entry) for entry in objects]
        rows += [
            _row(bucket, entry) | {"is_delete_marker": True}
            for entry in page.get("DeleteMarkers", ())
        ]
    random.Random(len(rows)).shuffle(rows)
    return rows


def _row(bucket: str, entry: dict[str, Any]) -> Row:
    return dict.fromkeys(SCHEMA.names) | {
        "bucket": bucket,
        "key": entry["Key"],
        "version_id": None if entry.get("VersionId") == "null" else entry.get("VersionId"),
        "is_latest": entry.get("IsLatest", True),
        "is_delete_marker": False,
        "last_modified_date": entry["LastModified"],
    }


def _object_of(entry: dict[str, Any]) -> Row:
    return {
        "size": entry["Size"],
        "e_tag": entry["ETag"].strip('"'),
        "storage_class": entry["StorageClass"],
        "is_multipart_uploaded": "-" in entry["ETag"],
        "replication_status": "",
        "encryption_status": "SSE-S3",
        "checksum_algorithm": (entry.get("ChecksumAlgorithm") or [None])[0],
    }


def csv_key(key: str) -> str:
    """Return a key in the encoding of CSV reports."""
    return quote_plus(key, safe="/")


def _table(rows: Sequence[Row], columns: Sequence[str]) -> pa.Table:
    return pa.table(
        {name: pa.array([row[name] for row in rows], SCHEMA.field(name).type) for name in columns}
    )


def _as_csv(rows: Sequence[Row], columns: Sequence[str]) -> bytes:
    table = _table([row | {"key": csv_key(row["key"])} for row in rows], columns)
    at = table.schema.get_field_index("last_modified_date")
    if at >= 0:
        times = pc.strftime(table["last_modified_date"], "%Y-%m-%dT%H:%M:%SZ")
        table = table.set_column(at, "last_modified_date", times)
    texts = pa.table(
        [pc.fill_null(column.cast(pa.string()), "") for column in table.columns], table.schema.names
    )
    plain = io.BytesIO()
    pa_csv.write_csv(
        texts, plain, pa_csv.WriteOptions(include_header=False, quoting_style="all_valid")
    )
    return gzip.compress(plain.getvalue())


def _as_orc(rows: Sequence[Row], columns: Sequence[str]) -> bytes:
    table = _table(rows, columns)
    at = table.schema.get_field_index("last_modified_date")
    if at >= 0:  # S3's ORC files have `timestamp`, which has no zone
        table = table.set_column(
            at, "last_modified_date", table["last_modified_date"].cast(pa.timestamp("ms"))
        )
    sink = io.BytesIO()
    pa_orc.write_table(table, sink)
    return sink.getvalue()


def _as_parquet(rows: Sequence[Row], columns: Sequence[str]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(_table(rows, columns), sink)
    return sink.getvalue()


WRITERS: dict[str, Callable[[Sequence[Row], Sequence[str]], bytes]] = {
    "CSV": _as_csv,
    "ORC": _as_orc,
    "Parquet": _as_parquet,
}


def file_schema(file_format: str, columns: Sequence[str]) -> str:
    """Return the columns in the form of a manifest."""
    if file_format == "CSV":
        return ", ".join(CSV_NAMES[name] for name in columns)
    if file_format == "ORC":
        kinds = (_ORC_TYPES.get(str(SCHEMA.field(name).type), "timestamp") for name in columns)
        pairs = (f"{name}:{kind}" for name, kind in zip(columns, kinds, strict=True))
        return f"struct<{','.join(pairs)}>"
    fields = []
    for name in columns:
        kind = {"bool": "boolean {}", "int64": "int64 {}", "string": "binary {} (STRING)"}.get(
            str(SCHEMA.field(name).type), "int64 {} (TIMESTAMP(MILLIS,true))"
        )
        fields.append(
            f"  {'required' if name in ('bucket', 'key') else 'optional'} {kind.format(name)};"
        )
    return f"message s3.inventory {{{''.join(fields)}}}"


@dataclass
class ReportWriter:
    """Writes reports of a bucket into another one.

    Attributes:
        client: may write to both.
        name: the bucket that the reports describe.
        file_format: one of FORMATS.
        columns: the files' columns; without those of versions, reports have current objects only.
        files: the number of files in a report.
    """

    client: Any
    name: str
    destination: str
    file_format: str = "Parquet"
    columns: Sequence[str] = tuple(SCHEMA.names)
    files: int = 3
    folder_prefix: str = "reports/of all"
    config: str = "daily"
    written: list[str] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        return f"{self.folder_prefix}/{self.name}/{self.config}/"

    @property
    def folder(self) -> str:
        """The value of the setting `inventory`."""
        return f"s3://{self.destination}/{self.prefix}"

    def put(self, key: str, body: bytes) -> None:
        """Store an object in the bucket of the reports."""
        self.client.put_object(Bucket=self.destination, Key=key, Body=body)

    def write(
        self, moment: datetime | None = None, rows: Sequence[Row] | None = None, **manifest: Any
    ) -> str:
        """Write a report, and return its folder's name.

        `moment` is the report's time, by default now. `rows` replace those of the bucket, by the
        names of SCHEMA. `manifest` replaces fields of the manifest.
        """
        rows = listed_rows(self.client, self.name) if rows is None else rows
        if not set(OF_VERSIONS) & set(self.columns):
            rows = [row for row in rows if row["is_latest"] and not row["is_delete_marker"]]
        write = WRITERS[self.file_format]
        return self.write_files(
            [write(rows[at :: self.files], self.columns) for at in range(self.files)],
            moment,
            **manifest,
        )

    def write_files(
        self, bodies: Sequence[bytes], moment: datetime | None = None, **manifest: Any
    ) -> str:
        """Write a report with these files."""
        moment = moment or datetime.now(UTC).replace(microsecond=0)
        entries = []
        for number, body in enumerate(bodies):
            md5 = hashlib.md5(body, usedforsecurity=False).hexdigest()
            key = f"{self.prefix}data/{md5[:8]}-{number}.{SUFFIXES[self.file_format]}"
            self.put(key, body)
            self.written.append(key)
            entries.append({"key": key, "size": len(body), "MD5checksum": md5})
        described = {
            "sourceBucket": self.name,
            "destinationBucket": f"arn:aws:s3:::{self.destination}",
            "version": "2016-11-30",
            "creationTimestamp": str(int(moment.timestamp() * 1000)),
            "fileFormat": self.file_format,
            "fileSchema": file_schema(self.file_format, self.columns),
            "files": entries,
        }
        dated = f"{moment:%Y-%m-%dT%H-%MZ}"
        self.write_manifest(dated, json.dumps(described | manifest).encode())
        return dated

    def write_manifest(self, dated: str, raw: bytes, checksum: str | None = None) -> None:
        """Write a manifest and its checksum."""
        self.put(f"{self.prefix}{dated}/manifest.json", raw)
        md5 = checksum or hashlib.md5(raw, usedforsecurity=False).hexdigest()
        self.put(f"{self.prefix}{dated}/manifest.checksum", f"{md5}\n".encode())
