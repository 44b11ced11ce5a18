"""The ledger's rows as Arrow batches: in COPY's binary form on the way in, as Parquet on the way out.

What only looks something up loads none of this: pyarrow takes as long to load as all the rest of the ledger.
Source: COPY in the PostgreSQL 18 manual.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.errors import LedgerError, StagingError
from caf_pipeline.inventory.ledger_rows import EXCEPTION_SCHEMA, LOCATED_SCHEMA, STANDING_SCHEMA
from caf_pipeline.ledger.kept import KEPT_SCHEMA

CLAIM: Final = ("caf_file_id", "file_path", "object_version", "last_modified")

_UNCHANGED: Final = ("start_byte", "last_modified", "sha256", "crc64nvme", "s3_checksum")
"""The columns of LOCATION_SCHEMA that `locations` has unchanged."""

LOCATION: Final = ("file_path", "identity", "content", *_UNCHANGED)
"""The columns of `locations` that `location_batches` gives, in its order."""

SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""What COPY's binary form begins with: the signature, no flags, no extension."""

TRAILER: Final = b"\xff\xff"
"""What it ends with."""

_NULL: Final = b"\xff" * 4
_POSTGRES_EPOCH_MICROSECONDS: Final = 946_684_800_000_000  # 2000-01-01 UTC, since 1970

# The forms of an identity and the content beside it, as sql/0002.views.sql has them.
_TEXT: Final = b"\x01"
_WITH_VERSION_ID: Final = 16
_ONE_UPLOAD: Final = r"^etag:[0-9a-f]{32}:(0|[1-9][0-9]{0,17})$"
_IN_PARTS: Final = r"^etag:(?P<etag>[0-9a-f]{32})-(?P<parts>[1-9][0-9]{0,5}):(?P<size>0|[1-9][0-9]{0,17})$"

_GATHERED_BYTES: Final = 4 << 20
"""Of batches that are made rows together: batches of 4,000 rows took a tenth longer to load, larger ones than this no less."""

_EXPORTS: Final = {
    "standing": (STANDING_SCHEMA, ["standing", "reason"]),
    "kept": (KEPT_SCHEMA, ["standing", "caf_file_id"]),
    "exceptions": (EXCEPTION_SCHEMA, ["object_version"]),
    "located": (LOCATED_SCHEMA, ["object_version"]),
}
"""What is exported: its schema, and the columns that are written by a dictionary."""


def as_rows(same: Sequence[bytes], batch: pa.RecordBatch) -> pa.Buffer:
    """Return rows of these values, in Postgres' binary form, and a batch's as COPY's binary form has them.

    Texts and binaries become `text` and `bytea`, integers `int8`, timestamps in microseconds `timestamptz`.
    """
    count = (len(same) + batch.num_columns).to_bytes(2, "big")
    begin = count + b"".join(len(value).to_bytes(4, "big") + value for value in same)
    fields = [piece for column in batch.columns for piece in _as_fields(column)]
    rows = pc.binary_join_element_wise(pa.scalar(begin), *fields, b"", null_handling="replace", null_replacement=_NULL)
    return pc.binary_join(pa.ListArray.from_arrays([0, len(rows)], rows), b"")[0].as_buffer()


def _as_fields(values: pa.Array) -> Iterator[pa.Array]:
    """Yield the arrays that a column's COPY fields are joined from. Of a null value one has null, the other has no bytes."""
    if pa.types.is_integer(values.type) or pa.types.is_timestamp(values.type):
        begins = _POSTGRES_EPOCH_MICROSECONDS if pa.types.is_timestamp(values.type) else 0
        field = np.empty(len(values), [("length", ">i4"), ("value", ">i8")])
        field["length"] = field["value"].itemsize
        field["value"] = values.cast(pa.int64()).fill_null(0).to_numpy() - begins
        yield _null_as_in(values, field)
    else:
        texts = values.cast(pa.binary())
        yield _null_as_in(values, pc.binary_length(texts).fill_null(0).to_numpy().astype(">i4"))
        yield texts.fill_null(b"")


def _null_as_in(values: pa.Array, fields: "np.ndarray[Any, Any]") -> pa.Array:
    """Return items of one width as binaries, those null whose value is null."""
    ends = np.arange(len(fields) + 1, dtype=np.int32) * np.int32(fields.itemsize)
    whole = pa.Array.from_buffers(pa.binary(), len(fields), [None, pa.py_buffer(ends), pa.py_buffer(fields)])
    return pc.if_else(values.is_valid(), whole, None) if values.null_count else whole


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    some: list[pa.RecordBatch] = []
    size_bytes = 0
    for batch in batches:
        some.append(batch)
        size_bytes += batch.nbytes
        if size_bytes >= _GATHERED_BYTES:
            yield pa.concat_batches(some)
            some, size_bytes = [], 0
    if some:
        yield pa.concat_batches(some)


def claim_batches(chunks: Mapping[int, int], identities: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows of `CLAIM` for batches as of `plan.read_identities`; `chunks` has the `caf_file_id` of each chunk number."""
    numbers, ids = pa.array(list(chunks), pa.int32()), pa.array(list(chunks.values()), pa.int64())
    for batch in _gathered(identities):
        yield pa.record_batch(
            [
                ids.take(pc.index_in(batch["chunk_number"], numbers)),
                batch["key"].cast(pa.string()),
                batch["object_version"],
                batch["last_modified"],
            ],
            names=CLAIM,
        )


def location_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows of `LOCATION` for batches of LOCATION_SCHEMA, none of which is a part of an object.

    Raises:
        LedgerError: a version id is another than the object version, which the table cannot hold.
    """
    for batch in _gathered(batches):
        versions = batch["object_version"]
        identity = location_identities(versions)
        content = _contents(versions, batch["version_id"], batch["etag"], pc.subtract(batch["end_byte"], batch["start_byte"]))
        columns = [batch["key"], identity, content, *(batch[name] for name in _UNCHANGED)]
        yield pa.record_batch(columns, names=LOCATION)


def location_identities(versions: pa.Array) -> pa.Array:
    """Return what the database's function location_identity (sql/0002.views.sql) returns for these object versions and part 0."""
    texts = versions.cast(pa.binary())
    is_one_upload = pc.match_substring_regex(versions, _ONE_UPLOAD)
    uploads = texts if pc.all(is_one_upload).as_py() else pc.if_else(is_one_upload, texts, None)
    packed = _packed(b"02", pc.binary_slice(uploads, 5, 37), b"", pc.binary_slice(uploads, 38, 56))
    if not packed.null_count:  # of all rows, as of most sources
        return packed
    etags, parts, sizes = pc.extract_regex(texts, _IN_PARTS).flatten()
    in_parts = _packed(b"03", etags, pc.ascii_lpad(parts.cast(pa.string()), 6, "0").cast(pa.binary()), sizes)
    return pc.coalesce(packed, in_parts, pc.binary_join_element_wise(_TEXT, texts, b""))


def _packed(form: bytes, etags: pa.Array, parts: pa.Array | bytes, sizes: pa.Array) -> pa.Array:
    """Return identities of a form, null where the digits are of which they are made."""
    is_odd = pc.equal(pc.bit_wise_and(pc.binary_length(sizes), 1), 1)
    digits = pc.binary_join_element_wise(form, etags, parts, pc.if_else(is_odd, b"0", b""), sizes, b"")
    validity, ends, characters = digits.buffers()
    codes = np.frombuffer(characters or b"", np.uint8)
    nibbles = (codes & 15) + 9 * (codes >> 6)  # '0' is 0x30, 'a' is 0x61
    values = nibbles[0::2] << 4 | nibbles[1::2]
    halves = np.frombuffer(ends, np.int32)[: len(digits) + 1] // 2
    return pa.Array.from_buffers(pa.binary(), len(digits), [validity, pa.py_buffer(halves), pa.py_buffer(values)])


def _contents(versions: pa.Array, version_ids: pa.Array, etags: pa.Array, sizes: pa.Array) -> pa.Array:
    """Return what the database's function location_content (sql/0002.views.sql) returns for these and part 0."""
    told = pc.binary_join_element_wise("etag", etags, sizes.cast(pa.string()), ":")
    has_none = version_ids.is_null()
    is_told = pc.and_(has_none, pc.equal(told, versions))
    if pc.all(is_told).as_py() is not False:
        return pa.nulls(len(versions), pa.binary())
    if pc.any(pc.not_equal(version_ids, versions)).as_py():
        raise LedgerError("an object's version_id differs from its object_version", hint="another program wrote the manifest")
    packed = location_identities(told)
    values = np.frombuffer(packed.buffers()[2], np.uint8).copy()
    firsts = np.frombuffer(packed.buffers()[1], np.int32)[:-1]
    values[firsts[version_ids.is_valid().to_numpy(zero_copy_only=False)]] += _WITH_VERSION_ID
    flagged = pa.Array.from_buffers(pa.binary(), len(packed), [None, packed.buffers()[1], pa.py_buffer(values)])
    return pc.if_else(is_told, None, flagged)


def write_export(what: str, path: Path, fetched: Iterable[tuple[Mapping[str, Any], Sequence[tuple[Any, ...]]]]) -> int:
    """Write what is exported as Parquet, in place of an older file; return the rows.

    Args:
        what: of `_EXPORTS`.
        path: where to.
        fetched: some rows at once, and the values of the columns that they lack, the same in all of them.

    Raises:
        StagingError: the file cannot be written.
    """
    schema, dictionaries = _EXPORTS[what]
    # No `WholeFile`: the run that asked reads it and no later one, so that nothing waits until gigabytes are on the disk.
    part = path.with_name(path.name + ".part")
    count = 0
    try:
        with closing(pq.ParquetWriter(part, schema, use_dictionary=dictionaries)) as writer:
            for same, rows in fetched:
                writer.write_batch(_batch(schema, same, rows))
                count += len(rows)
        part.replace(path)
    except OSError as error:
        raise StagingError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="see that its folder is there and may be written, and that its disk has room",
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return count


def _batch(schema: pa.Schema, same: Mapping[str, Any], rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    given = zip(*rows, strict=True)
    columns = [
        pa.repeat(pa.scalar(same[field.name], field.type), len(rows)) if field.name in same else pa.array(next(given), field.type)
        for field in schema
    ]
    return pa.record_batch(columns, schema=schema)
