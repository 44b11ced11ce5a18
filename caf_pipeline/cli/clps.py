"""`caf clps inspect`: what the metadata of a clp-s archive tell."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import typer

from caf_pipeline.cli.files import opened_ranges
from caf_pipeline.cli.terminal import JsonOption, counted, note, print_json, printable, show_size
from caf_pipeline.errors import ArchiveLimitReached
from caf_pipeline.formats.clps import (
    EPOCH_MILLISECONDS,
    FIRST_READ_BYTES,
    MAX_METADATA_BYTES,
    ArchiveMetadata,
    TimeRange,
    count_records,
    read_metadata,
)
from caf_pipeline.system.ranges import FileRanges

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

LogArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE | SOURCE KEY",
        help="A path, an http(s):// URL or s3://bucket/key; or an archived object by source and "
        "key.",
    ),
]


def inspect(file: LogArgument, json: JsonOption = False) -> None:
    r"""Show what a clp-s single-file archive says of itself.

    Inputs, records, first and last time, sections, sizes.

    Two ranges are read, or one where the metadata lie in the first 64 KiB; one more where they do
    not tell the number of records. Records are not read: nothing here finds damage in them. `clp-s
    x` and `clp-s s` of CLP read them.

    An archived object of up to 8 MiB is read as a whole, and its SHA-256 compared first; of a
    larger one only the length of a range is certain.

    With --json the object has the names of the format: version, uncompressed_size, total_size,
    metadata_size, compression and file_size; ArchiveInfo, ArchiveFileInfo, TimestampDictionary and
    RangeIndex, null where the archive has none; sections, inputs and records. Times are
    milliseconds since 1970 where encoding is 1; where it is 2 their unit is not known.

    \b
    Examples:
      caf clps inspect logs.clp
      caf clps inspect demo logs/2026-11.clp --json | jq -r '.RangeIndex[].f._filename'

    Exit statuses: 0 the metadata are whole; 2 wrong arguments; 4 the file is missing, is no clp-s
    archive, or is damaged; 5 the server refuses or cannot be reached. Of an archived object also: 3
    a setting is wrong or there is no such source; 6 the database or 7 the store failed; 9 what is
    to be had has other bytes, or no provider has it; 11 the object is not archived.
    """
    with opened_ranges(file) as ranges:
        first, file_size = ranges.read_prefix(FIRST_READ_BYTES)
        archive = read_metadata(first, file_size, ranges.read, name=ranges.name)
        records = archive.records
        if records is None:
            records = _count_records(archive, ranges, file_size)
    if archive.header.total_size > file_size:
        note(
            f"warning: {ranges.name} has {file_size} bytes, and its header says "
            f"{archive.header.total_size}: its end is missing,"
            " or its header is wrong"
        )
    if json:
        print_json(_as_json(archive, file_size, records))
        return
    print("\n".join(_lines(archive, records)))


def _count_records(archive: ArchiveMetadata, ranges: FileRanges, file_size: int) -> int:
    table = archive.section("/table_metadata")
    if table.size > MAX_METADATA_BYTES:
        raise ArchiveLimitReached(
            f"{ranges.name}: the table metadata have {table.size} bytes, more than "
            f"{MAX_METADATA_BYTES}."
        )
    return count_records(
        ranges.read(table.offset, min(table.offset + table.size, file_size)), name=ranges.name
    )


def _as_json(archive: ArchiveMetadata, file_size: int, records: int) -> dict[str, object]:
    header, inputs = archive.header, archive.inputs
    return {
        "version": ".".join(map(str, header.version)),
        "uncompressed_size": header.uncompressed_size,
        "total_size": header.total_size,
        "file_size": file_size,
        "metadata_size": header.metadata_size,
        "compression": header.compression,
        "ArchiveInfo": None
        if archive.num_segments is None
        else {"num_segments": archive.num_segments},
        "ArchiveFileInfo": {
            "files": [
                {"n": one.name, "o": one.offset - header.metadata_end} for one in archive.sections
            ]
        },
        "TimestampDictionary": {
            "ranges": [
                {
                    "key": one.key,
                    "column_ids": one.column_ids,
                    "encoding": one.encoding,
                    "begin": one.begin,
                    "end": one.end,
                }
                for one in archive.time_ranges
            ],
            "patterns": [{"id": one.id, "pattern": one.pattern} for one in archive.patterns],
        },
        "RangeIndex": None
        if inputs is None
        else [{"s": one.s, "e": one.e, "f": one.fields} for one in inputs],
        "sections": [
            {"name": one.name, "offset": one.offset, "size": one.size} for one in archive.sections
        ],
        "inputs": None if inputs is None else len(inputs),
        "records": records,
    }


def _lines(archive: ArchiveMetadata, records: int) -> Iterator[str]:
    header, inputs = archive.header, archive.inputs
    of_inputs = "" if inputs is None else f" of {counted(len(inputs), 'input')}"
    yield (
        f"clp-s archive, format {'.'.join(map(str, header.version))}: "
        f"{counted(records, 'record')}{of_inputs}"
    )
    yield f"{show_size(header.uncompressed_size)} of logs in {show_size(header.total_size)}"
    for one in archive.time_ranges:
        yield f"{printable(one.key)}: {_show_range(one)}"
    if archive.patterns:
        yield f"timestamps as {printable(', '.join(one.pattern for one in archive.patterns))}"
    yield "sections, bytes and where they begin:"
    for section in archive.sections:
        yield f"{section.size:>14} {section.offset:>14} {printable(section.name)}"
    if inputs is None:
        yield "inputs are not named: clp-s was told to keep no order"
        return
    yield "inputs, records and name:"
    for each in inputs:
        fields = each.fields
        part = f" (part {number})" if (number := fields.get("_file_split_number")) else ""
        yield f"{each.e - each.s:>14} {printable(str(fields.get('_filename', '')))}{part}"


def _show_range(one: TimeRange) -> str:
    if one.begin is None and one.end is None:
        return "the archive gives no times"
    if one.encoding != EPOCH_MILLISECONDS:
        return f"{one.begin} to {one.end}, in a unit that the archive does not name"
    return f"{_show_time(one.begin)} to {_show_time(one.end)}"


def _show_time(milliseconds: float | None) -> str:
    try:
        moment = _EPOCH + timedelta(milliseconds=milliseconds or 0)
    except OverflowError:  # no year from 1 to 9999
        return f"{milliseconds} ms since 1970"
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03} UTC"
