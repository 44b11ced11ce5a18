"""`caf clps inspect`."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import typer

from caf_pipeline.cli.opening import opened_ranges
from caf_pipeline.cli.terminal import JsonOption, counted, note, print_json, printable, show_size
from caf_pipeline.errors import ArchiveLimitReached
from caf_pipeline.formats.clps import (
    EPOCH_MILLISECONDS,
    FIRST_READ_BYTES,
    MAX_METADATA_BYTES,
    ArchiveMetadata,
    count_records,
    read_metadata,
)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

LogArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE | SOURCE KEY",
        help="A path, an http(s):// URL or s3://bucket/key; or source and key of an archived "
        "object.",
    ),
]


def inspect(file: LogArgument, json: JsonOption = False) -> None:
    r"""Show the metadata of a clp-s single-file archive.

    Shows inputs, records, first and last time, sections and sizes, from at most three reads.
    Damaged records are not found; use `clp-s x` or `clp-s s` of CLP. An archived object of up to 8
    MiB is read completely and its SHA-256 compared.

    --json uses the format's names, and null for missing parts. Times are milliseconds since 1970 if
    encoding is 1; the unit of encoding 2 is unknown.

    \b
    Example:
      caf clps inspect demo logs/2026-11.clp --json | jq -r '.RangeIndex[].f._filename'

    \b
    Exit status: 0, 4, 5

    For an archived object, also the statuses of `caf get`.
    """
    with opened_ranges(file) as ranges:
        first, file_size = ranges.read_prefix(FIRST_READ_BYTES)
        archive = read_metadata(first, file_size, ranges.read, name=ranges.name)
        records = archive.records
        if records is None:
            table = archive.section("/table_metadata")
            if table.size > MAX_METADATA_BYTES:
                raise ArchiveLimitReached(
                    f"{ranges.name}: the table metadata have {table.size} bytes, more than "
                    f"{MAX_METADATA_BYTES}."
                )
            end = min(table.offset + table.size, file_size)
            records = count_records(ranges.read(table.offset, end), name=ranges.name)
    if archive.header.total_size > file_size:
        note(
            f"warning: {ranges.name} has {file_size} bytes, but its header says "
            f"{archive.header.total_size}: its end is missing, or its header is wrong"
        )
    if json:
        print_json(**_as_json(archive, file_size, records))
    else:
        print("\n".join(_lines(archive, records)))


def _as_json(archive: ArchiveMetadata, file_size: int, records: int) -> dict[str, object]:
    header, inputs, sections = archive.header, archive.inputs, archive.sections
    segments = archive.num_segments
    return {
        "version": ".".join(map(str, header.version)),
        "uncompressed_size": header.uncompressed_size,
        "total_size": header.total_size,
        "file_size": file_size,
        "metadata_size": header.metadata_size,
        "compression": header.compression,
        "ArchiveInfo": None if segments is None else {"num_segments": segments},
        "ArchiveFileInfo": {
            "files": [
                {"n": section.name, "o": section.offset - header.metadata_end}
                for section in sections
            ]
        },
        "TimestampDictionary": {
            "ranges": archive.time_ranges,
            "patterns": archive.patterns,
        },
        "RangeIndex": None
        if inputs is None
        else [{"s": entry.s, "e": entry.e, "f": entry.fields} for entry in inputs],
        "sections": sections,
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
    for times in archive.time_ranges:
        if times.begin is None and times.end is None:
            period = "the archive gives no times"
        elif times.encoding != EPOCH_MILLISECONDS:
            period = f"{times.begin} to {times.end}, in an unknown unit"
        else:
            period = f"{_show_time(times.begin)} to {_show_time(times.end)}"
        yield f"{printable(times.key)}: {period}"
    if archive.patterns:
        patterns = ", ".join(pattern.pattern for pattern in archive.patterns)
        yield f"timestamps as {printable(patterns)}"
    yield "sections, bytes and where they begin:"
    for section in archive.sections:
        yield f"{section.size:>14} {section.offset:>14} {printable(section.name)}"
    if inputs is None:
        yield "inputs have no names: clp-s did not record their order"
        return
    yield "inputs, records and name:"
    for entry in inputs:
        number = entry.fields.get("_file_split_number")
        part = f" (part {number})" if number else ""
        name = printable(str(entry.fields.get("_filename", "")))
        yield f"{entry.e - entry.s:>14} {name}{part}"


def _show_time(milliseconds: float | None) -> str:
    try:
        moment = _EPOCH + timedelta(milliseconds=milliseconds or 0)
    except OverflowError:  # no year from 1 to 9999
        return f"{milliseconds} ms since 1970"
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03} UTC"
