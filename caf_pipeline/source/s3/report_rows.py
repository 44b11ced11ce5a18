"""The rows of one file of an S3 Inventory report, in any of its formats, as rows of a snapshot.

Read by pyarrow in batches: of a CSV file some MiB are in memory, of Parquet a part of a row group,
of ORC a stripe. Only CSV reports encode keys. What a row must have is what a listing's entry must
have. Source: "Amazon S3 Inventory list" in the Amazon S3 User Guide.
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
    AGAIN,
    COLUMNS,
    Manifest,
    ReportFile,
    ReportFormat,
)

BLOCK_BYTES: Final = 4 << 20
"""Of unpacked CSV, which pyarrow reads at once.

A row must fit; one with an encoded key of 1,024 bytes has some KiB.
"""

ROWS: Final = 65_536  # of a batch: as a row group of a snapshot

UNKNOWN: Final = "unknown"
"""How objects are encrypted, where the report does not tell."""

_MOMENT: Final = SNAPSHOT_SCHEMA.field("last_modified").type
_FIRST_MOMENT: Final = pa.scalar(datetime.min.replace(tzinfo=UTC), _MOMENT)
_LAST_MOMENT: Final = pa.scalar(datetime.max.replace(tzinfo=UTC), _MOMENT)
_HEX: Final = np.full(256, 16, np.uint8)
for _digit in b"0123456789abcdefABCDEF":
    _HEX[_digit] = int(chr(_digit), 16)


@dataclass(frozen=True, slots=True)
class ReportRows:
    """How the rows of a report become those of a snapshot.

    Attributes: prefix: only keys that begin so are taken. keeps_versions: whether the bucket keeps
        versions, as a listing asks it. Where not, version ids are left out. all_versions: whether
        older versions and delete markers are taken, or only counted. needs_storage_class: whether
        an object without a storage class is refused; else it counts as STANDARD.
    """

    manifest: Manifest
    prefix: bytes
    keeps_versions: bool
    all_versions: bool
    needs_storage_class: bool

    def read(self, file: ReportFile, path: Path, counts: ReportCounts) -> Iterator[pa.RecordBatch]:
        """Yield a file's objects in batches of SNAPSHOT_SCHEMA, in the order of the file, and add
        to `counts`.

        Args:
            file: as the manifest has it, for messages.
            path: where it is on this machine.
            counts: gets what was left out and what was taken.

        Raises: ReportRefused: it is damaged, has other columns than the manifest says, or a row
            that no object can have.
        """
        batches = self._batches(path)
        while True:
            try:
                batch = next(batches, None)
                if batch is None:
                    return
                taken = self._objects(batch, counts)
            except _Wrong as error:
                raise self._refused(file, str(error)) from error
            except (pa.ArrowException, OSError, ValueError) as error:
                raise self._refused(file, f"cannot be read: {first_line(error)}") from error
            yield taken

    def _refused(self, file: ReportFile, why: str) -> ReportRefused:
        return ReportRefused(
            f"the file {file.key} of the inventory report {self.manifest.url} {why}", hint=AGAIN
        )

    # --- reading
    # --------------------------------------------------------------------------------

    def _batches(self, path: Path) -> Iterator[pa.RecordBatch]:
        """Yield batches of the columns that are read, by their names in ORC and Parquet."""
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
            raise _Wrong("is empty")
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
                if str(error) == "Empty CSV file":  # pyarrow's words for a file without a row
                    return
                raise
            for batch in reader:
                yield batch.rename_columns([names[name] for name in batch.schema.names])

    def _require_columns(self, schema: pa.Schema) -> None:
        """Refuse a file that has other columns, of those that are read, than the manifest says, or
        of another type.
        """
        there = [name for name in COLUMNS if name in schema.names]
        if there != list(self.manifest.columns):
            differing = sorted(set(there) ^ set(self.manifest.columns))
            raise _Wrong(f"has other columns than its manifest says: {', '.join(differing)}")
        for name in there:
            kind = schema.field(name).type
            if not _FITS.get(name, _is_text)(kind):
                raise _Wrong(f"has a column {name} of type {kind}")

    # --- objects
    # --------------------------------------------------------------------------------

    def _objects(self, batch: pa.RecordBatch, counts: ReportCounts) -> pa.RecordBatch:
        """Return what a batch has under the prefix: current objects, or all versions and delete
        markers.
        """
        batch.drop_columns(["key"]).validate(full=True)  # text is UTF-8, but for keys
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
                each.filter(kept) for each in (keys, batch, latest, markers)
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
        moments, version_ids = (
            _converted(batch, "last_modified_date", _MOMENT),
            self._version_ids(batch),
        )
        among = pc.and_(
            pc.greater_equal(moments, _FIRST_MOMENT), pc.less_equal(moments, _LAST_MOMENT)
        )
        _require(among, batch, "with an impossible LastModifiedDate")
        _require(
            _is_sendable(objects["e_tag"].cast(pa.string())), objects, "with an impossible ETag"
        )
        _require(_is_sendable(version_ids), batch, "with an impossible VersionId")
        storage_classes = _text_or(objects, "storage_class", "STANDARD")
        self._count(objects, storage_classes, counts)
        columns = {
            "key": keys,
            "version_id": version_ids,
            "etag": _beside(markers, pc.utf8_trim(objects["e_tag"].cast(pa.string()), '"'), ""),
            "size_bytes": _beside(markers, sizes, 0),
            "last_modified": moments,
            "storage_class": _beside(markers, storage_classes, ""),
            "checksum": _beside(markers, _text_or(objects, "checksum_algorithm", ""), ""),
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
            there = (
                pc.greater(pc.binary_length(column), 0)
                if _is_text(column.type)
                else column.is_valid()
            )
            _require(there, batch, f"without its {COLUMNS[name]}")

    def _version_ids(self, batch: pa.RecordBatch) -> pa.Array:
        if not self.keeps_versions:
            return pa.nulls(batch.num_rows, pa.string())
        ids = batch["version_id"].cast(pa.string())
        # "null" is no version: a PUT without versioning overwrites it.
        return pc.if_else(pc.is_in(ids, pa.array(["", "null"])), pa.scalar(None, pa.string()), ids)

    def _count(
        self, batch: pa.RecordBatch, storage_classes: pa.Array, counts: ReportCounts
    ) -> None:
        counts.storage_classes.update(_frequencies(storage_classes))
        counts.encryption.update(_frequencies(_text_or(batch, "encryption_status", UNKNOWN)))
        if "is_multipart_uploaded" in batch.schema.names:
            counts.multipart += (
                pc.sum(pc.equal(batch["is_multipart_uploaded"].cast(pa.string()), "true")).as_py()
                or 0
            )


class _Wrong(ValueError):
    """What is wrong with a file: a clause whose subject is the file."""


def _is_text(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_binary,
            pa.types.is_large_string,
            pa.types.is_large_binary,
        )
    )


_FITS: Final = {
    "size": pa.types.is_integer,
    "last_modified_date": pa.types.is_timestamp,
    "is_latest": pa.types.is_boolean,
    "is_delete_marker": pa.types.is_boolean,
    "is_multipart_uploaded": pa.types.is_boolean,
}
"""Types in ORC and Parquet of the columns that are not text."""


def _require(holds: pa.Array, batch: pa.RecordBatch, what: str) -> None:
    """Refuse the first row of a batch of which `holds` is false or null."""
    at = pc.index(pc.fill_null(holds, False), False).as_py()
    if at >= 0:
        key = batch["key"][at].as_py()
        shown = key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else key
        raise _Wrong(f"has a row {what}: key {shown!r}")


def _converted(batch: pa.RecordBatch, name: str, kind: pa.DataType) -> pa.Array:
    """Return a column as this type."""
    column = batch[name]
    if (
        pa.types.is_timestamp(column.type) and column.type.tz is None
    ):  # ORC has times without a zone; S3's are in UTC
        column = pc.assume_timezone(column, "UTC")
    try:
        return column.cast(kind)
    except pa.ArrowInvalid as error:
        raise _Wrong(f"has a {COLUMNS[name]} that cannot be read: {first_line(error)}") from error


def _flags(batch: pa.RecordBatch, name: str, *, otherwise: bool) -> pa.Array:
    """Return a column of flags; `otherwise` where the report has none."""
    if name not in batch.schema.names:
        return pa.repeat(otherwise, batch.num_rows)
    flags = _converted(batch, name, pa.bool_())
    _require(flags.is_valid(), batch, f"without its {COLUMNS[name]}")
    return flags


def _is_sendable(values: pa.Array) -> pa.Array:
    """Tell of each value whether a request may have it, as a header or in its address; true also
    where there is none.
    """
    short = pc.less_equal(pc.binary_length(values), MAX_IDENTITY_BYTES)
    printable = pc.ascii_is_printable(values)
    if not pc.all(printable).as_py():  # servers of others may have any text
        printable = pc.invert(pc.match_substring_regex(values, CONTROLS))
    return pc.fill_null(pc.and_(short, printable), True)


def _beside(markers: pa.Array, values: pa.Array, otherwise: str | int) -> pa.Array:
    """Return the values of objects in their rows, and `otherwise` in those of delete markers."""
    return pc.replace_with_mask(
        pa.repeat(pa.scalar(otherwise, values.type), len(markers)), pc.invert(markers), values
    )


def _frequencies(values: pa.Array) -> dict[str, int]:
    return {each["values"]: each["counts"] for each in pc.value_counts(values).to_pylist()}


def _text_or(batch: pa.RecordBatch, name: str, otherwise: str) -> pa.Array:
    """Return a column of text; `otherwise` where a value, or the column, is missing."""
    if name not in batch.schema.names:
        return pa.array([otherwise] * batch.num_rows, pa.string())
    texts = pc.fill_null(batch[name].cast(pa.string()), "")
    return pc.if_else(pc.equal(texts, ""), otherwise, texts)


def decode_keys(keys: pa.BinaryArray) -> pa.BinaryArray:
    """Return the bytes of keys as CSV reports encode them, like `listing.decode_key` does one:
    `%XX` is a byte, `+` a space.

    Raises:
        ValueError: a `%` that two hexadecimal digits of the same key do not follow.
    """
    _, ends, content = keys.buffers()
    offsets = np.frombuffer(ends, np.int32)[keys.offset : keys.offset + len(keys) + 1]
    encoded = np.frombuffer(content or b"", np.uint8)[offsets[0] : offsets[-1]]
    offsets = offsets - offsets[0]
    decoded = np.where(encoded == ord("+"), np.uint8(ord(" ")), encoded)
    escapes = np.flatnonzero(encoded == ord("%"))
    if escapes.size:
        owners = np.searchsorted(offsets, escapes, side="right") - 1
        digits = np.append(
            _HEX[encoded], np.full(2, 16, np.uint8)
        )  # the last key may end in a percent sign
        high, low = digits[escapes + 1], digits[escapes + 2]
        wrong = np.flatnonzero((escapes + 2 >= offsets[owners + 1]) | (high > 15) | (low > 15))
        if wrong.size:
            raise _Wrong(
                f"has a key that is not percent-encoded: {keys[int(owners[wrong[0]])].as_py()!r}"
            )
        decoded[escapes] = high << 4 | low
        keep = np.ones(len(encoded), bool)
        keep[escapes + 1] = keep[escapes + 2] = False
        decoded = decoded[keep]
        offsets = offsets - 2 * np.searchsorted(escapes, offsets)
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(decoded)]
    return pa.Array.from_buffers(pa.binary(), len(keys), buffers)
