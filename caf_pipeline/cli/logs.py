"""`caf logs search`: what archived logs that clp-s packed say, found by clp-s."""

import json as json_text
import sys
from typing import Annotated

import msgspec
import typer

from caf_pipeline.cli.listing import nothing_listed
from caf_pipeline.cli.opening import opened_lookup, opened_reader
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourceArgument,
    counted,
    note,
    parse_time,
    printable,
)
from caf_pipeline.errors import CafError, UsageError, one_line
from caf_pipeline.retrieval.log_search import LogSearch, Period, SearchedLog
from caf_pipeline.settings import load_settings

_SILENT_SECONDS = 600


def search(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    prefix: Annotated[
        str,
        typer.Argument(metavar="PREFIX", help="What the keys begin with, as in S3; '' for all."),
    ],
    query: Annotated[
        str,
        typer.Argument(
            metavar="QUERY", help="What clp-s searches for: 'level: ERROR AND msg: *timeout*'."
        ),
    ],
    begin: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Records from TIME on: 2026-11-21T10:00 (UTC), 2026-11-21T10:00:00+02:00.",
        ),
    ] = "",
    end: Annotated[
        str,
        typer.Option("--to", metavar="TIME", help="Records up to TIME, and of that millisecond."),
    ] = "",
    ignore_case: Annotated[
        bool, typer.Option("--ignore-case", "-i", help="Ignore the case of letters in values.")
    ] = False,
    timeout: Annotated[
        int,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=1,
            help="Give up an object in which clp-s finds nothing for so long.",
        ),
    ] = _SILENT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Search archived logs that clp-s packed, by clp-s itself.

    Below PREFIX, those are fetched that may have records of the time that is asked for: the packing
    of each chunk records which of its objects clp-s wrote, and their first and last time. A log
    that does not tell its times is always searched. Of objects that are split, or were planned
    before times were recorded, the header is read.

    An object is fetched to a folder in staging, compared with its SHA-256, searched, and removed;
    several at once. Each match is a line: the key, and the record as clp-s prints it, control
    characters escaped. Keys come in the order of their bytes. With --json a match is an object with
    key, version and record.

    clp-s compares times to the millisecond. A log without times is searched for records of any
    time.

    It needs clp-s, for Linux on x86-64: pip install yscope-clp-core==0.12.1b0, or the extra `logs`.

    \b
    Examples:
      caf logs search demo logs/ 'level: ERROR'
      caf logs search demo logs/2026-11 'msg: *timeout*' --from 2026-11-21T10:00 --json

    Exit status: 0, also where nothing matches; 1 an object could not be searched, which stderr
    names, and the others were; 2 QUERY is not a query, or TIME not a time; 3 a setting is wrong,
    there is no such source, or clp-s is not installed; 6 the database failed; 8 staging cannot be
    written; 11 no archived key begins with PREFIX.
    """
    moments = [parse_time(one) if one else None for one in (begin, end)]
    if moments[0] and moments[1] and moments[1] < moments[0]:
        raise UsageError("--to is before --from.", hint="Give the earlier time as --from.")
    settings = load_settings()
    searching = LogSearch(
        query,
        settings.staging_folder,
        period=Period.between(*moments),
        ignore_case=ignore_case,
        silent_seconds=timeout,
    )
    searched = failed = 0
    with (
        opened_lookup(settings) as lookup,
        opened_reader(settings, lookup, source) as store,
        searching,
    ):
        for log in searching.search(lookup, store, source, prefix):
            searched += 1
            failed += not _print_matches(log, json)
        if not searching.listed:
            raise nothing_listed(lookup, source, prefix, current=False)
    unknown = (
        f"; {counted(searching.not_recorded, 'header')} read, of objects with no record"
        if searching.not_recorded
        else ""
    )
    note(
        f"{source}: {counted(searched, 'log')} of {counted(searching.listed, 'object')} "
        f"searched{unknown}"
    )
    if failed:
        raise CafError(
            f"{counted(failed, 'log')} of {searched:,} could not be searched, or not to the end"
        )


def _print_matches(log: SearchedLog, json: bool) -> bool:
    """Print what was found in an object; return whether all of it could be searched."""
    row = log.location.row
    before = (
        _json_before(row.key, row.object_version)
        if json
        else f"{printable(row.key)}: ".encode(errors="backslashreplace")
    )
    try:
        for match in log.matches:
            shown = (
                _json_value(match) + b"}"
                if json
                else one_line(match.decode(errors="backslashreplace")).encode()
            )
            sys.stdout.buffer.write(before + shown + b"\n")
    except CafError as error:
        note(f"{row.key!r} could not be searched: {error}")
        return False
    finally:
        sys.stdout.buffer.flush()
    if log.has_no_times:
        note(f"{row.key!r} has no times: it was searched for records of any time")
    return True


def _json_before(key: str, version: str) -> bytes:
    return json_text.dumps({"key": key, "version": version})[:-1].encode() + b', "record": '


def _json_value(match: bytes) -> bytes:
    """Return a record as it is, where it is JSON: read and written again, its numbers might be
    others.
    """
    try:
        msgspec.json.decode(match)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return json_text.dumps(match.decode(errors="backslashreplace")).encode()
    return match
