"""`caf get`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from caf_pipeline.cli.opening import opened_lookup, opened_reader
from caf_pipeline.cli.terminal import (
    AsOfOption,
    SourceArgument,
    a_path,
    note,
    parse_time,
    printable,
    show_time,
    write_bytes,
)
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.reader import fetch, save, write_whole
from caf_pipeline.settings import load_settings


def get(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="The object's key in S3, prefix included.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            parser=a_path,
            metavar="FILE",
            help="Write to FILE instead of standard output.",
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(
            "--object-version", metavar="V", help="A version id, instead of the current one."
        ),
    ] = None,
    as_of: AsOfOption = None,
    member: Annotated[
        str | None,
        typer.Option(
            "--member", metavar="NAME", help="One file of the object, which is a .tar.co."
        ),
    ] = None,
) -> None:
    r"""Fetch one archived object.

    It takes one look-up and one range read, and its SHA-256 is compared. Nothing is given out
    before the whole object was read and verified: neither FILE nor a byte on standard output. A
    provider that gives wrong bytes is left for the next one that has the object; where one breaks
    off, the next goes on at the same byte. A FILE that is there is replaced; where it is a link,
    what it leads to. A pipe or a device is written to, as standard output is.

    What is given is what S3 had at the last inventory. Where that is gone, under way or skipped,
    the content archived last is given, and a line on standard error says so. Of a key that is not
    archived it says why: a chunk under way has it, it was skipped, or its chunk is lost.

    With --as-of it is what is archived of the key that was last modified latest up to TIME, or that
    an inventory up to TIME found current; a line on standard error says where it is known that S3
    had something else then, or nothing.

    With --member the object is a tar archive with its cotar index, and one file of it is given. Of
    an object of more than 8 MiB only the index and that file are read, and compared with the tar's
    own header; such a part has no SHA-256.

    \b
    Examples:
      caf get demo packages/rich/py.typed -o py.typed
      caf get demo python/python3.11/this.py | python3
      caf get demo report.csv --as-of 2026-11-21T10:00 -o report.csv
      caf get demo tiles.tar.co --member 12/4038/2564.pbf > tile.pbf

    Exit status: 0 verified; 2 FILE cannot be written, or TIME is not a time; 3 a setting is wrong
    or there is no such source; 4 the object has no cotar index or no such file; 6 the database or 7
    the store failed; 9 all that is to be had has other bytes, or no provider has the object; 11 the
    object, or this version of it, is not archived.
    """
    moment = None if as_of is None else parse_time(as_of)
    settings = load_settings()
    with opened_lookup(settings) as lookup, opened_reader(settings, lookup, source) as store:
        found = fetch(lookup, store, source, key, version, as_of=moment)
        if said := _not_current(key, found.location):
            note(said)
        if member is not None:
            from caf_pipeline.cli.object_files import opened_tar  # noqa: PLC0415  only an object that is a .tar.co needs it

            with opened_tar(found) as tar:
                pieces = tar.pieces(os.fsencode(member))
                if output:
                    write_whole(output, lambda file: file.writelines(pieces))
                    return
                write_bytes(pieces)
        elif output:
            save(found, output)
        else:
            write_bytes(found.pieces)


def _not_current(key: str, location: Location) -> str:
    """Return a warning where the object is known not to be what S3 has, or had at the time that was
    asked for; "" else.
    """
    known = location.currency
    if known is None or known.is_current:
        return ""
    written = f"this is its content of {show_time(location.row.last_modified)}"
    if known.gone_at:
        seen = (
            f", an inventory last listed it on {show_time(known.last_seen)}"
            if known.last_seen
            else ""
        )
        gone = f"was gone from S3 at {show_time(known.as_of)}" if known.as_of else "is gone from S3"
        return f"'{printable(key)}' {gone}{seen}; {written}"
    other = (
        f"had other content in S3 at {show_time(known.as_of)}"
        if known.as_of
        else "has other content in S3 now"
    )
    if known.chunk:
        return (
            f"'{printable(key)}' {other}, which chunk {known.chunk} ({known.state}) archives; "
            f"{written}"
        )
    why = f"was skipped ({known.state})" if known.state else "is not archived"
    if known.state == SkipReason.WAITING:
        why = "waits to be planned"
    return f"'{printable(key)}' {other}, which {why}; {written}"
