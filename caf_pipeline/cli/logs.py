"""`caf logs search`."""

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
        typer.Argument(metavar="PREFIX", help="Beginning of the keys, as in S3; '' for all."),
    ],
    query: Annotated[
        str,
        typer.Argument(
            metavar="QUERY", help="A query of clp-s: 'level: ERROR AND msg: *timeout*'."
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
        typer.Option("--to", metavar="TIME", help="Records up to TIME, including its millisecond."),
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
            help="Give up an object if clp-s finds nothing for so long.",
        ),
    ] = _SILENT_SECONDS,
    json: JsonOption = False,
) -> None:
    r"""Search archived logs that clp-s packed, with clp-s itself.

    Fetches only the logs below PREFIX that may have records of the period, by their first and last
    time; logs without times are always searched.

    Objects are fetched to staging, several at a time, and verified by SHA-256.
    Prints each match's key and record, control characters escaped; keys are sorted by their bytes.
    --json prints `key`, `version` and `record`.

    clp-s compares times to the millisecond. It runs on Linux x86-64: pip install
    yscope-clp-core==0.12.1b0, or the extra `logs`.

    \b
    Example:
      caf logs search demo logs/2026-11 'msg: *timeout*' --from 2026-11-21T10:00 --json

    \b
    Exit status: 6, 8
      0   The search is complete, even without a match.
      1   Some objects could not be searched; standard error names them.
      2   QUERY is not a query, or TIME is not a time.
      3   Wrong settings, no such source, or clp-s is not installed.
      11  No archived key begins with PREFIX.
    """
    moments = [parse_time(text) if text else None for text in (begin, end)]
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
    headers = (
        f"; {counted(searching.not_recorded, 'header')} read of objects without a record"
        if searching.not_recorded
        else ""
    )
    objects = counted(searching.listed, "object")
    note(f"{source}: {counted(searched, 'log')} of {objects} searched{headers}")
    if failed:
        raise CafError(f"{counted(failed, 'log')} of {searched:,} could not be searched completely")


def _print_matches(log: SearchedLog, json: bool) -> bool:
    row = log.location.row
    if json:
        before = json_text.dumps({"key": row.key, "version": row.object_version})[:-1].encode()
        before += b', "record": '
    else:
        before = f"{printable(row.key)}: ".encode(errors="backslashreplace")
    try:
        for match in log.matches:
            text = match.decode(errors="backslashreplace")
            if not json:
                line = one_line(text).encode()
            else:
                try:
                    msgspec.json.decode(match)
                    line = match + b"}"  # unchanged: parsing and dumping may change its numbers
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    line = json_text.dumps(text).encode() + b"}"
            sys.stdout.buffer.write(before + line + b"\n")
    except CafError as error:
        note(f"{row.key!r} could not be searched: {error}")
        return False
    finally:
        sys.stdout.buffer.flush()
    if log.has_no_times:
        note(f"{row.key!r} has no times: records of any time were searched")
    return True
