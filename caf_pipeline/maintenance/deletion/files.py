"""The files that `safe_to_delete` writes: a manifest for S3 Batch Operations, and a report.

An existing file is replaced only if it is of the same kind. The manifest has no header, and a line
`bucket,key[,version id]` for each object, with a percent-encoded key.

Source: "Creating an S3 Batch Operations job" in the Amazon S3 User Guide. Either all objects have
version ids or none; `null` is a version id, an empty string is not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from caf_pipeline.errors import StagingError, UsageError
from caf_pipeline.maintenance.deletion.deletable import DECISION_SCHEMA
from caf_pipeline.system.atomic_files import WholeFile, sync_folder

REPORT_COLUMNS: Final = (
    "key",
    "version_id",
    "etag",
    "size_bytes",
    "last_modified",
    "chunk",
    "reason",
    "detail",
)
_REPORT_SCHEMA: Final = pa.schema([DECISION_SCHEMA.field(name) for name in REPORT_COLUMNS])
_CSV_SCHEMA: Final = _REPORT_SCHEMA.set(
    0, pa.field("key", pa.string(), nullable=False)
)  # percent-encoded
_CSV_HEADER: Final = ",".join(f'"{name}"' for name in REPORT_COLUMNS)
_REPORT_MARK: Final = b"caf.not-safe-to-delete"
_KIND_BYTES: Final = 4096


class OutputFile(WholeFile):
    """A file that the user named. `tag` distinguishes temporary names."""

    def __init__(self, path: Path, tag: str) -> None:
        try:
            super().__init__(path, path.with_name(f".{path.name}.{tag}.part"))
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written: {error.strerror}",
                hint="choose a file in a folder that you may write to",
            ) from error

    def write(self, data: bytes) -> None:
        self.guard(lambda: self.file.write(data))

    def guard(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            reason = error.strerror or str(error)
            raise StagingError(
                f"{self.path} cannot be written: {reason}",
                hint="make room there, or correct its permissions",
            ) from error

    def publish(self) -> None:
        self.guard(super().publish)


# --- the manifest


class BatchManifest:
    """A manifest of objects (DECISION_SCHEMA)."""

    def __init__(self, path: Path, tag: str, *, bucket: str, with_versions: bool) -> None:
        self._bucket = bucket
        self._with_versions = with_versions
        self._file = OutputFile(path, tag)
        self.line_count = 0

    def add(self, safe: pa.RecordBatch) -> None:
        if not safe.num_rows:
            return
        columns = [pa.scalar(self._bucket), safe.column("encoded_key")]
        if self._with_versions:
            columns.append(pc.fill_null(safe.column("version_id"), "null"))
        lines = pc.binary_join_element_wise(*columns, ",")
        self._file.write("\n".join([*lines.to_pylist(), ""]).encode())
        self.line_count += safe.num_rows

    def remove_older(self) -> None:
        """Remove a manifest of an earlier run, durably. The new one gets its permissions."""

        def remove() -> None:
            self._file.seal()
            self._file.path.unlink(missing_ok=True)
            sync_folder(self._file.path.parent)

        self._file.guard(remove)

    def publish(self) -> None:
        """A manifest without lines is not kept."""
        if self.line_count:
            self._file.publish()

    def abort(self) -> None:
        self._file.abort()


def require_manifest(path: Path, bucket: str) -> None:
    """Raise UsageError if another kind of file exists."""
    first = _first_line(path)
    if first and (first.count(",") not in (1, 2) or not first.startswith(f"{bucket},")):
        raise _not_ours(path, f"a list of objects of bucket '{bucket}'", "--output")


# --- the report


class Report:
    """A report of objects: Parquet, or CSV with a header and percent-encoded keys."""

    def __init__(self, path: Path, tag: str) -> None:
        self._file = OutputFile(path, tag)
        self._writer: pq.ParquetWriter | pyarrow.csv.CSVWriter
        if path.suffix == ".csv":
            self._writer = pyarrow.csv.CSVWriter(self._file.file, _CSV_SCHEMA)
        else:
            schema = _REPORT_SCHEMA.with_metadata({_REPORT_MARK: b"1"})
            self._writer = pq.ParquetWriter(self._file.file, schema, compression="zstd")
        self._as_text = path.suffix == ".csv"

    def add(self, unsafe: pa.RecordBatch) -> None:
        columns = unsafe.select(REPORT_COLUMNS)
        if self._as_text:
            columns = columns.set_column(0, _CSV_SCHEMA.field(0), unsafe.column("encoded_key"))
        self._file.guard(lambda: self._writer.write_batch(columns))

    def publish(self) -> None:
        self._file.guard(self._writer.close)
        self._file.publish()

    def abort(self) -> None:
        try:
            self._writer.close()
        except (OSError, ValueError):
            pass  # it is closed already, or the disk is full; the file is removed anyway
        finally:
            self._file.abort()


def require_report(path: Path) -> None:
    """Raise UsageError if the suffix is unknown, or if another kind of file exists."""
    if path.suffix not in (".csv", ".parquet"):
        raise UsageError(f"{path}: a report is Parquet or CSV", hint="name it .parquet or .csv")
    first = _first_line(path)
    if first and first != _CSV_HEADER:
        try:
            is_report = _REPORT_MARK in (pq.read_schema(path).metadata or {})
        except (pa.ArrowException, OSError):
            is_report = False
        if not is_report:
            raise _not_ours(path, "a report of this command", "--report")


def _first_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            line = file.readline(_KIND_BYTES)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(
            f"{path} cannot be replaced: {error.strerror}", hint="name another file"
        ) from error
    return line.decode(errors="replace").rstrip("\r\n") or " "[: len(line)]


def _not_ours(path: Path, kind: str, option: str) -> UsageError:
    return UsageError(
        f"{path} exists and is not {kind}",
        hint=f"choose another file with {option}, or move this file away",
    )
