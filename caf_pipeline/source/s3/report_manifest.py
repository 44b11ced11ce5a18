"""The manifest of an S3 Inventory report. Columns have their ORC and Parquet names.

Source: "Locating your inventory list" in the Amazon S3 User Guide.
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
    """The values of `fileFormat`."""

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
"""Names in ORC and Parquet, and in CSV."""

ALWAYS_NEEDED: Final = ("bucket", "key", "size", "last_modified_date", "e_tag")
VERSION_COLUMNS: Final = ("version_id", "is_latest", "is_delete_marker")

_FIELDS_OF_SCHEMA: Final = {
    # Bucket, Key, Size
    ReportFormat.CSV: re.compile(r"([^,\s]+)\s*(?:,|$)"),
    # struct<bucket:string,key:string,size:bigint>
    ReportFormat.ORC: re.compile(r"[<,]\s*(\w+)\s*:"),
    # required binary bucket (UTF8);
    ReportFormat.PARQUET: re.compile(r"(\w+)\s*(?:\((?:[^()]|\([^()]*\))*\)\s*)?;"),
}
_MD5: Final = re.compile(r"[0-9a-f]{32}")

OTHER_REPORT_HINT: Final = (
    "wait for the next report, choose another by its date, or list the bucket"
)


@dataclass(frozen=True, slots=True)
class ReportFile:
    """One file of a report. The MD5 is in lower-case hex."""

    key: str
    size_bytes: int
    md5: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A report's manifest. `schema` has all columns of the files, in order."""

    url: str
    source_bucket: str
    taken_at: datetime
    format: ReportFormat
    schema: Sequence[str]
    files: Sequence[ReportFile]

    @property
    def columns(self) -> Sequence[str]:
        return [name for name in COLUMNS if self.name_of(name) in self.schema]

    def name_of(self, column: str) -> str:
        return COLUMNS[column] if self.format is ReportFormat.CSV else column

    def require(self, bucket: str, *, keeps_versions: bool, needs_storage_class: bool) -> None:
        """Raises ReportRefused."""
        if self.source_bucket != bucket:
            raise ReportRefused(
                f"the inventory report {self.url} is of bucket '{self.source_bucket}', not of the "
                f"source's bucket '{bucket}'",
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
        version_fields = [COLUMNS[column] for column in VERSION_COLUMNS]
        fields = [name for name in missing if name not in version_fields]
        hints = [f"add {', '.join(fields)} to the inventory's fields"] if fields else []
        if len(fields) < len(missing):
            hints.append("let the inventory list all versions, since the bucket keeps versions")
        raise ReportRefused(
            f"the inventory report {self.url} has no column {', '.join(missing)}",
            hint=f"{'; '.join(hints)}; the next report has them. Until then, list the bucket",
        )


def read_manifest(url: str, raw: bytes, checksum: bytes) -> Manifest:
    """Parse manifest.json; raises ReportRefused if it or its MD5 is wrong."""
    md5 = hashlib.md5(raw, usedforsecurity=False).hexdigest().encode()
    if md5 != checksum.strip().lower():
        raise ReportRefused(
            f"the manifest of the inventory report {url} does not have the MD5 in its "
            "manifest.checksum",
            hint=OTHER_REPORT_HINT,
        )
    try:
        described = json.loads(raw)
        format_name, schema = _text(described, "fileFormat"), _text(described, "fileSchema")
        taken_at = datetime.fromtimestamp(int(described["creationTimestamp"]) / 1000, UTC)
        files = [
            ReportFile(_text(entry, "key"), int(entry["size"]), _text(entry, "MD5checksum").lower())
            for entry in described["files"]
        ]
        for file in files:
            if not file.key or file.size_bytes < 0 or not _MD5.fullmatch(file.md5):
                raise ValueError(f"it has a file without key, size or MD5: {file.key!r}")
        source_bucket = _text(described, "sourceBucket")
    except KeyError as error:
        raise _malformed(url, f"it has no {error.args[0]}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, OSError, RecursionError) as error:
        raise _malformed(url, str(error)) from error
    if format_name not in list(ReportFormat):
        raise ReportRefused(
            f"the inventory report {url} has the format '{format_name}'; CSV, ORC and Parquet can "
            "be read",
            hint="choose one of these in the inventory's configuration",
        )
    file_format = ReportFormat(format_name)
    names = _FIELDS_OF_SCHEMA[file_format].findall(schema)
    if len(names) != len(set(names)):
        raise _malformed(url, "its fileSchema names a column twice")
    # A repeated file must not count twice.
    distinct = list(dict.fromkeys(files))
    return Manifest(url, source_bucket, taken_at, file_format, names, distinct)


def _malformed(url: str, why: str) -> ReportRefused:
    return ReportRefused(
        f"the manifest of the inventory report {url} is malformed: {why}", hint=OTHER_REPORT_HINT
    )


def _text(described: Mapping[str, Any], name: str) -> str:
    value = described[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is not text")
    return value
