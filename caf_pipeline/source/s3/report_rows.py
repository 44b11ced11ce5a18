"""Converts a file of an S3 Inventory report, in any format, to rows of a snapshot.

Memory is some MiB of CSV, a part of a row group of Parquet, or a stripe of ORC. Only CSV reports
encode keys. Source: "Amazon S3 Inventory list" in the Amazon S3 User Guide.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.orc as pa_orc
import pyarrow.parquet as pq

from caf_pipeline.errors import ReportRefused, first_line
from caf_pipeline.inventory.objects import CONTROLS, MAX_IDENTITY_BYTES, MAX_SIZE_BYTES
from caf_pipeline.inventory.snapshot import SNAPSHOT_SCHEMA, object_versions, versions_beside
from caf_pipeline.source.protocol import ReportCounts
from caf_pipeline.source.s3.report_manifest import (
    COLUMNS,
    OTHER_REPORT_HINT,
    Manifest,
    ReportFile,
    ReportFormat,
)

BLOCK_BYTES: Final = 4 << 20
"""A block of CSV must hold a row; an encoded key of 1,024 bytes takes some KiB."""

ROWS: Final = 65_536  # in a batch, like a row group of a snapshot

UNKNOWN: Final = "unknown"

_TIME: Final = SNAPSHOT_SCHEMA.field("last_modified").type
_MIN_TIME: Final = pa.scalar(datetime.min.replace(tzinfo=UTC), _TIME)
_MAX_TIME: Final = pa.scalar(datetime.max.replace(tzinfo=UTC), _TIME)
_HEX: Final = np.full(256, 16, np.uint8)
for _digit in b"0123456789abcdefABCDEF":
    _HEX[_digit] = int(chr(_digit), 16)


@dataclass(frozen=True, slots=True)
class ReportRows:
    """Converts the rows of a report to those of a snapshot.

    `needs_storage_class` refuses an object without one, which is otherwise STANDARD.
    """

    manifest: Manifest
    prefix: bytes
    keeps_versions: bool
    all_versions: bool
    needs_storage_class: bool

    def read(self, file: ReportFile, path: Path, counts: ReportCounts) -> Iterator[pa.RecordBatch]:
        """Yield a file's objects in batches of SNAPSHOT_SCHEMA, and add to `counts`.

        Raises ReportRefused.
        """
        batches = self._batches(path)
        while True:
            try:
                batch = next(batches, None)
                if batch is None:
                    return
                taken = self._objects(batch, counts)
            except _InvalidFile as error:
                raise self._refused(file, str(error)) from error
            except (pa.ArrowException, OSError, ValueError) as error:
                raise self._refused(file, f"cannot be read: {first_line(error)}") from error
            yield taken

    def _refused(self, file: ReportFile, why: str) -> ReportRefused:
        return ReportRefused(
            f"the file {file.key} of the inventory report {self.manifest.url} {why}",
            hint=OTHER_REPORT_HINT,
        )

    def _batches(self, path: Path) -> Iterator[pa.RecordBatch]:
        if self.manifest.format is ReportFormat.CSV:
            yield from self._csv(path)
            return
        if self.manifest.format is ReportFormat.ORC:
            orc = pa_orc.ORCFile(path)
            self._require_columns(orc.schema)
            for number in range(orc.nstripes):
                stripe = orc.read_stripe(number, columns=list(self.manifest.columns))
                yield from (stripe.slice(first, ROWS) for first in range(0, stripe.num_rows, ROWS))
            return
        with pq.ParquetFile(path) as parquet:
            self._require_columns(parquet.schema_arrow)
            yield from parquet.iter_batches(ROWS, columns=list(self.manifest.columns))

    def _csv(self, path: Path) -> Iterator[pa.RecordBatch]:
        names = {self.manifest.name_of(column): column for column in self.manifest.columns}
        if not path.stat().st_size:
            raise _InvalidFile("is empty")
        with pa.OSFile(str(path)) as packed, pa.CompressedInputStream(packed, "gzip") as unpacked:
            try:
                reader = pa_csv.open_csv(
                    unpacked,
                    read_options=pa_csv.ReadOptions(
                        column_names=list(self.manifest.schema), block_size=BLOCK_BYTES
                    ),
                    convert_options=pa_csv.ConvertOptions(
                        column_types={
                            name: pa.binary() if names[name] == "key" else pa.string()
                            for name in names
                        },
                        include_columns=list(names),
                        strings_can_be_null=False,
                    ),
                )
            except pa.ArrowInvalid as error:
                if str(error) == "Empty CSV file":  # pyarrow's message for a file without rows
                    return
                raise
            for batch in reader:
                yield batch.rename_columns([names[name] for name in batch.schema.names])

    def _require_columns(self, schema: pa.Schema) -> None:
        columns = [name for name in COLUMNS if name in schema.names]
        if columns != list(self.manifest.columns):
            differing = sorted(set(columns) ^ set(self.manifest.columns))
            raise _InvalidFile(f"differs from its manifest in columns: {', '.join(differing)}")
        for name in columns:
            kind = schema.field(name).type
            if not _FITS.get(name, _is_text)(kind):
                raise _InvalidFile(f"has a column {name} of type {kind}")

    def _objects(self, batch: pa.RecordBatch, counts: ReportCounts) -> pa.RecordBatch:
        batch.drop_columns(["key"]).validate(full=True)  # all text except keys must be UTF-8
        _require(
            pc.equal(batch["bucket"].cast(pa.string()), self.manifest.source_bucket),
            batch,
            "of another bucket",
        )
        self._require_values(batch, "key")
        keys = batch["key"].cast(pa.binary())
        if self.manifest.format is ReportFormat.CSV:
            keys = decode_keys(keys)
        if self.prefix:
            under = pc.starts_with(keys, self.prefix)
            keys, batch = keys.filter(under), batch.filter(under)
            counts.outside_prefix += len(under) - len(keys)
        latest, markers = (
            _flags(batch, "is_latest", otherwise=True),
            _flags(batch, "is_delete_marker", otherwise=False),
        )
        if not self.all_versions:
            kept = pc.and_not(latest, markers)
            counts.left_out += versions_beside(latest, markers)
            keys, batch, latest, markers = (
                column.filter(kept) for column in (keys, batch, latest, markers)
            )
        objects = batch.filter(pc.invert(markers))
        self._require_values(
            objects,
            "size",
            "last_modified_date",
            "e_tag",
            *(["storage_class"] if self.needs_storage_class else ()),
        )
        self._require_values(batch, "last_modified_date")
        sizes = _converted(objects, "size", pa.int64())
        _require(
            pc.and_(pc.greater_equal(sizes, 0), pc.less_equal(sizes, MAX_SIZE_BYTES)),
            objects,
            "with an impossible Size",
        )
        times = _converted(batch, "last_modified_date", _TIME)
        possible = pc.and_(pc.greater_equal(times, _MIN_TIME), pc.less_equal(times, _MAX_TIME))
        _require(possible, batch, "with an impossible LastModifiedDate")
        version_ids = pa.nulls(batch.num_rows, pa.string())
        if self.keeps_versions:
            # "null" is not a version id: a PUT without versioning overwrites that version.
            ids = batch["version_id"].cast(pa.string())
            is_none = pc.is_in(ids, pa.array(["", "null"]))
            version_ids = pc.if_else(is_none, pa.scalar(None, pa.string()), ids)
        _require(
            _is_sendable(objects["e_tag"].cast(pa.string())), objects, "with an impossible ETag"
        )
        _require(_is_sendable(version_ids), batch, "with an impossible VersionId")
        storage_classes = _text_or(objects, "storage_class", "STANDARD")
        counts.storage_classes.update(_frequencies(storage_classes))
        counts.encryption.update(_frequencies(_text_or(objects, "encryption_status", UNKNOWN)))
        if "is_multipart_uploaded" in objects.schema.names:
            multipart = pc.equal(objects["is_multipart_uploaded"].cast(pa.string()), "true")
            counts.multipart += pc.sum(multipart).as_py() or 0
        columns = {
            "key": keys,
            "version_id": version_ids,
            "etag": _with_markers(
                markers, pc.utf8_trim(objects["e_tag"].cast(pa.string()), '"'), ""
            ),
            "size_bytes": _with_markers(markers, sizes, 0),
            "last_modified": times,
            "storage_class": _with_markers(markers, storage_classes, ""),
            "checksum": _with_markers(markers, _text_or(objects, "checksum_algorithm", ""), ""),
        }
        taken = pa.RecordBatch.from_pydict(columns)
        taken = taken.append_column("object_version", object_versions(taken))
        return (
            taken.append_column("is_latest", latest)
            .append_column("is_delete_marker", markers)
            .cast(SNAPSHOT_SCHEMA)
        )

    def _require_values(self, batch: pa.RecordBatch, *names: str) -> None:
        for name in names:
            column = batch[name]
            if _is_text(column.type):
                is_set = pc.greater(pc.binary_length(column), 0)
            else:
                is_set = column.is_valid()
            _require(is_set, batch, f"without its {COLUMNS[name]}")


class _InvalidFile(ValueError):
    """The message is a clause whose subject is the file."""


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())


_FITS: Final = {
    "size": pa.types.is_integer,
    "last_modified_date": pa.types.is_timestamp,
    "is_latest": pa.types.is_boolean,
    "is_delete_marker": pa.types.is_boolean,
    "is_multipart_uploaded": pa.types.is_boolean,
}


def _require(holds: pa.Array, batch: pa.RecordBatch, what: str) -> None:
    row = pc.index(pc.fill_null(holds, False), False).as_py()
    if row >= 0:
        key = batch["key"][row].as_py()
        shown = key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else key
        raise _InvalidFile(f"has a row {what}: key {shown!r}")


def _converted(batch: pa.RecordBatch, name: str, kind: pa.DataType) -> pa.Array:
    column = batch[name]
    if pa.types.is_timestamp(column.type) and column.type.tz is None:
        column = pc.assume_timezone(column, "UTC")  # ORC has no time zones; S3's times are UTC
    try:
        return column.cast(kind)
    except pa.ArrowInvalid as error:
        raise _InvalidFile(
            f"has a {COLUMNS[name]} that cannot be read: {first_line(error)}"
        ) from error


def _flags(batch: pa.RecordBatch, name: str, *, otherwise: bool) -> pa.Array:
    if name not in batch.schema.names:
        return pa.repeat(otherwise, batch.num_rows)
    flags = _converted(batch, name, pa.bool_())
    _require(flags.is_valid(), batch, f"without its {COLUMNS[name]}")
    return flags


def _is_sendable(values: pa.Array) -> pa.Array:
    short = pc.less_equal(pc.binary_length(values), MAX_IDENTITY_BYTES)
    printable = pc.ascii_is_printable(values)
    if not pc.all(printable).as_py():  # servers other than AWS may have any text
        printable = pc.invert(pc.match_substring_regex(values, CONTROLS))
    return pc.fill_null(pc.and_(short, printable), True)


def _with_markers(markers: pa.Array, values: pa.Array, otherwise: str | int) -> pa.Array:
    return pc.replace_with_mask(
        pa.repeat(pa.scalar(otherwise, values.type), len(markers)), pc.invert(markers), values
    )


def _frequencies(values: pa.Array) -> dict[str, int]:
    return {row["values"]: row["counts"] for row in pc.value_counts(values).to_pylist()}


def _text_or(batch: pa.RecordBatch, name: str, otherwise: str) -> pa.Array:
    if name not in batch.schema.names:
        return pa.array([otherwise] * batch.num_rows, pa.string())
    texts = pc.fill_null(batch[name].cast(pa.string()), "")
    return pc.if_else(pc.equal(texts, ""), otherwise, texts)


def decode_keys(keys: pa.BinaryArray) -> pa.BinaryArray:
    """Return a column of keys decoded like `listing.decode_key`; raises ValueError."""
    _, ends, content = keys.buffers()
    offsets = np.frombuffer(ends, np.int32)[keys.offset : keys.offset + len(keys) + 1]
    encoded = np.frombuffer(content or b"", np.uint8)[offsets[0] : offsets[-1]]
    offsets = offsets - offsets[0]
    decoded = np.where(encoded == ord("+"), np.uint8(ord(" ")), encoded)
    escapes = np.flatnonzero(encoded == ord("%"))
    if escapes.size:
        owners = np.searchsorted(offsets, escapes, side="right") - 1
        # The last key may end in a percent sign.
        digits = np.append(_HEX[encoded], np.full(2, 16, np.uint8))
        high, low = digits[escapes + 1], digits[escapes + 2]
        wrong = np.flatnonzero((escapes + 2 >= offsets[owners + 1]) | (high > 15) | (low > 15))
        if wrong.size:
            raise _InvalidFile(
                f"has a key that is not percent-encoded: {keys[int(owners[wrong[0]])].as_py()!r}"
            )
        decoded[escapes] = high << 4 | low
        keep = np.ones(len(encoded), bool)
        keep[escapes + 1] = keep[escapes + 2] = False
        decoded = decoded[keep]
        offsets = offsets - 2 * np.searchsorted(escapes, offsets)
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(decoded)]
    return pa.Array.from_buffers(pa.binary(), len(keys), buffers)
