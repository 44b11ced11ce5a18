"""What the manifest of an S3 Inventory report says: of which bucket and time it is, its files, and
which columns they have.

Only text and bytes: `reports` fetches them. Columns have the names of ORC and Parquet here, in CSV
reports too. Source: "Locating your inventory list" in the Amazon S3 User Guide.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from caf_pipeline.errors import ReportRefused


class ReportFormat(StrEnum):
    """How the files of a report are written, as `fileFormat` names it."""

    CSV = "CSV"
    ORC = "ORC"
    PARQUET = "Parquet"


COLUMNS: Final[Mapping[str, str]] = {
    "bucket": "Bucket",
    "key": "Key",
    "version_id": "VersionId",
    "is_latest": "IsLatest",
    "is_delete_marker": "IsDeleteMarker",
    "size": "Size",
    "last_modified_date": "LastModifiedDate",
    "e_tag": "ETag",
    "storage_class": "StorageClass",
    "is_multipart_uploaded": "IsMultipartUploaded",
    "encryption_status": "EncryptionStatus",
    "checksum_algorithm": "ChecksumAlgorithm",
}
"""The columns that are read, by their names in ORC and Parquet; their names in CSV."""

ALWAYS_NEEDED: Final = ("bucket", "key", "size", "last_modified_date", "e_tag")
VERSION_COLUMNS: Final = ("version_id", "is_latest", "is_delete_marker")
"""Only reports of all versions have these."""

_FIELDS_OF_SCHEMA: Final = {
    ReportFormat.CSV: re.compile(r"([^,\s]+)\s*(?:,|$)"),  # Bucket, Key, Size
    ReportFormat.ORC: re.compile(
        r"[<,]\s*(\w+)\s*:"
    ),  # struct<bucket:string,key:string,size:bigint>
    ReportFormat.PARQUET: re.compile(
        r"(\w+)\s*(?:\((?:[^()]|\([^()]*\))*\)\s*)?;"
    ),  # required binary bucket (UTF8);
}
_MD5: Final = re.compile(r"[0-9a-f]{32}")

AGAIN: Final = "wait for the next report, take another one by its date, or list the bucket"


@dataclass(frozen=True, slots=True)
class ReportFile:
    """One file of a report: its key in the bucket of the report, its length, and its MD5 in
    lower-case hex.
    """

    key: str
    size_bytes: int
    md5: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A report as its manifest describes it.

    Attributes:
        url: of the report's dated folder, for messages.
        taken_at: when S3 began to read the bucket for it (creationTimestamp).
        schema: the names of all columns as the files have them, in order.
        columns: those of COLUMNS that the files have.
    """

    url: str
    source_bucket: str
    taken_at: datetime
    format: ReportFormat
    schema: Sequence[str]
    files: Sequence[ReportFile]

    @property
    def columns(self) -> Sequence[str]:
        """Return which of COLUMNS the files have, by their names in ORC and Parquet."""
        return [name for name in COLUMNS if self.name_of(name) in self.schema]

    def name_of(self, column: str) -> str:
        """Return how this report's format writes the name of a column."""
        return COLUMNS[column] if self.format is ReportFormat.CSV else column

    def require(self, bucket: str, *, keeps_versions: bool, needs_storage_class: bool) -> None:
        """Refuse a report of another bucket, and one without a column that is needed.

        Raises:
            ReportRefused: naming what is missing.
        """
        if self.source_bucket != bucket:
            raise ReportRefused(
                f"the inventory report {self.url} is of bucket '{self.source_bucket}', and the "
                f"source's is '{bucket}'",
                hint="correct the source's setting 'inventory'",
            )
        needed = [
            *ALWAYS_NEEDED,
            *(VERSION_COLUMNS if keeps_versions else ()),
            *(["storage_class"] if needs_storage_class else ()),
        ]
        missing = [COLUMNS[name] for name in needed if name not in self.columns]
        if not missing:
            return
        fields = [
            name for name in missing if name not in {COLUMNS[column] for column in VERSION_COLUMNS}
        ]
        hints = [f"add {', '.join(fields)} to the inventory's fields"] if fields else []
        if len(fields) < len(missing):
            hints.append("let the inventory list all versions, since the bucket keeps versions")
        raise ReportRefused(
            f"the inventory report {self.url} has no column {', '.join(missing)}",
            hint=f"{'; '.join(hints)}; the next report has them. Until then, list the bucket",
        )


def read_manifest(url: str, raw: bytes, checksum: bytes) -> Manifest:
    """Return what a manifest says.

    Args:
        url: of the report's folder.
        raw: the content of manifest.json.
        checksum: that of manifest.checksum, the MD5 of `raw`.

    Raises:
        ReportRefused: the checksum is another one, or the manifest is malformed.
    """
    said = checksum.strip().lower()
    if hashlib.md5(raw, usedforsecurity=False).hexdigest().encode() != said:
        raise ReportRefused(
            f"the manifest of the inventory report {url} does not have the MD5 that its "
            "manifest.checksum says",
            hint=AGAIN,
        )
    try:
        described = json.loads(raw)
        format_name, schema = _text(described, "fileFormat"), _text(described, "fileSchema")
        moment = datetime.fromtimestamp(int(described["creationTimestamp"]) / 1000, UTC)
        files = list(
            dict.fromkeys(map(_file, described["files"]))
        )  # what is counted of a file counts once
        source_bucket = _text(described, "sourceBucket")
    except KeyError as error:
        raise _malformed(url, f"it has no {error.args[0]}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, OSError, RecursionError) as error:
        raise _malformed(url, str(error)) from error
    if format_name not in [str(each) for each in ReportFormat]:
        raise ReportRefused(
            f"the inventory report {url} has the format '{format_name}'; CSV, ORC and Parquet can "
            "be read",
            hint="choose one of these in the inventory's configuration",
        )
    file_format = ReportFormat(format_name)
    names = _FIELDS_OF_SCHEMA[file_format].findall(schema)
    if len(names) != len(set(names)):
        raise _malformed(url, "its fileSchema names a column twice")
    return Manifest(url, source_bucket, moment, file_format, names, files)


def _malformed(url: str, why: str) -> ReportRefused:
    return ReportRefused(
        f"the manifest of the inventory report {url} is malformed: {why}", hint=AGAIN
    )


def _text(described: Mapping[str, Any], name: str) -> str:
    value = described[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is not text")
    return value


def _file(entry: Mapping[str, Any]) -> ReportFile:
    file = ReportFile(_text(entry, "key"), int(entry["size"]), _text(entry, "MD5checksum").lower())
    if not file.key or file.size_bytes < 0 or not _MD5.fullmatch(file.md5):
        raise ValueError(f"it has a file without key, size or MD5: {file.key!r}")
    return file
