"""The ledger's rows as Arrow batches: as lines of COPY's text form on the way in, as Parquet on the way out.

What only looks something up loads none of this: pyarrow takes as long to load as all the rest of the ledger.
Source: COPY in the PostgreSQL 18 manual.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.errors import StagingError
from caf_pipeline.inventory.snapshot import EXCEPTION_SCHEMA, LOCATED_SCHEMA, STANDING_SCHEMA

CLAIM: Final = ("caf_file_id", "file_path", "object_version", "last_modified")

_ESCAPED: Final = (("\\", r"\\"), ("\t", r"\t"), ("\n", r"\n"), ("\r", r"\r"))
"""What COPY's text form does not take as it is, the backslash first."""

_EXPORTS: Final = {
    "standing": (STANDING_SCHEMA, ["standing", "reason"]),
    "exceptions": (EXCEPTION_SCHEMA, ["object_version"]),
    "located": (LOCATED_SCHEMA, ["object_version"]),
}
"""What is exported: its schema, and the columns that are written by a dictionary."""


def as_text(same: Sequence[object], batch: pa.RecordBatch) -> bytes:
    """Return rows of these values and a batch's as lines of COPY's text form."""
    columns = [*(pa.scalar(str(value)) for value in same), *map(_as_texts, batch.columns)]
    lines = pc.binary_join_element_wise(*columns, "\t", null_handling="replace", null_replacement=r"\N")
    whole = pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "\n")
    text_form: bytes = whole[0].as_buffer().to_pybytes()
    return text_form + b"\n"


def _as_texts(values: pa.Array) -> pa.Array:
    """Return a column as COPY's text form has it; null stays null."""
    if pa.types.is_fixed_size_binary(values.type):
        digits = pa.py_buffer(b"".join(values.to_pylist()).hex().encode())
        texts = pa.Array.from_buffers(pa.binary(2 * values.type.byte_width), len(values), [None, digits])
        return pc.binary_join_element_wise(r"\\x", texts.cast(pa.binary()).cast(pa.string()), "")
    if not pa.types.is_string(values.type):
        return values.cast(pa.string())
    for character, escaped in _ESCAPED:
        values = pc.replace_substring(values, character, escaped)
    return values


def claim_batches(chunks: Mapping[int, int], identities: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows of `CLAIM` for batches as of `plan.read_identities`; `chunks` has the `caf_file_id` of each chunk number."""
    numbers, ids = pa.array(list(chunks), pa.int32()), pa.array(list(chunks.values()), pa.int64())
    for batch in identities:
        yield pa.record_batch(
            [
                ids.take(pc.index_in(batch["chunk_number"], numbers)),
                batch["key"].cast(pa.string()),
                batch["object_version"],
                batch["last_modified"],
            ],
            names=CLAIM,
        )


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
        raise StagingError(f"{path} cannot be written: {error.strerror or error}", hint="make room on that disk") from error
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
