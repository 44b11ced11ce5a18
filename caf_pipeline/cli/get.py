"""`caf get`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from caf_pipeline.cli.completing import complete_key
from caf_pipeline.cli.opening import opened_lookup, opened_reader
from caf_pipeline.cli.terminal import (
    AsOfOption,
    SourceArgument,
    note,
    output_option,
    parse_time,
    printable,
    show_time,
    write_bytes,
)
from caf_pipeline.errors import UsageError
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.reader import fetch, save, write_whole
from caf_pipeline.settings import load_settings


def get(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="The object's key in S3, prefix included.",
            autocompletion=complete_key,
        ),
    ],
    output: Annotated[
        Path | None, output_option("Write to FILE. Standard output by default, and if FILE is '-'.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    version: Annotated[
        str | None,
        typer.Option(
            "--object-version", metavar="V", help="A version id, instead of the current version."
        ),
    ] = None,
    as_of: AsOfOption = None,
    member: Annotated[
        str | None,
        typer.Option("--member", metavar="NAME", help="One file of an object that is a .tar.co."),
    ] = None,
) -> None:
    r"""Fetch one archived object.

    Nothing is written before the whole object is read and its SHA-256 verified. If a provider
    returns wrong bytes, the next one is tried. An existing FILE is refused without --force; a
    symbolic link is followed. A terminal receives only text.

    A note says so if the object's chunk was restored by a rebuild, and its bytes were not compared
    with its Merkle root since. `caf prove` and `caf check` do that.

    Returns the version that S3 had at the last inventory, or else the newest archived version, with
    a note. A note also marks objects that `caf doctor --add-unknown-posts` added.

    --member extracts one file of a tar archive with a cotar index. Above 8 MiB, only the index and
    the file are read. Its name and size are compared with its tar header, because part of an object
    has no SHA-256. A hard link is refused: fetch the object, and use `caf cotar cat`.

    \b
    Examples:
      caf get demo report.csv --as-of 2026-11-21T10:00 -o report.csv
      caf get demo tiles.tar.co --member 12/4038/2564.pbf > tile.pbf

    \b
    Exit status: 0, 3, 6, 7, 11
      2  FILE exists or cannot be written, binary output is for a terminal, or TIME is no time.
      4  The chunk's age header is damaged, or the object has no cotar index or no such file.
      9  All copies have wrong bytes, or no copy has the object.
    """
    moment = None if as_of is None else parse_time(as_of)
    if output == Path("-"):
        output = None
    if output and output.is_file() and not force:
        raise UsageError(f"{output} exists.", hint="--force replaces it.")
    settings = load_settings()
    with opened_lookup(settings) as lookup, opened_reader(settings, lookup, source) as store:
        archived = fetch(lookup, store, source, key, version, as_of=moment, suggest=True)
        if warning := _warning(key, archived.location):
            note(warning)
        unread = lookup.unread_chunks(source)
        for chunk in sorted(unread.keys() & {part.chunk for part in archived.location.ranges}):
            note(_not_read_whole(chunk, unread[chunk], source))
        if member is not None:
            # Loaded here because few objects are .tar.co files.
            from caf_pipeline.cli.cotar import opened_cotar  # noqa: PLC0415
            from caf_pipeline.retrieval.object_ranges import ObjectRanges  # noqa: PLC0415

            with opened_cotar(ObjectRanges(archived)) as tar:
                pieces = tar.pieces(os.fsencode(member))
                if output:
                    write_whole(output, lambda file: file.writelines(pieces))
                    return
                write_bytes(pieces)
        elif output:
            save(archived, output)
        else:
            write_bytes(archived.pieces)


def _not_read_whole(chunk: str, damage: str, source: str) -> str:
    why = f" (it is damaged: {damage})" if damage else ""
    return (
        f"a rebuild restored chunk {chunk}, and its bytes were not yet found to have its Merkle "
        f"root{why}: these bytes may be forged; 'caf prove {source}' reads the chunk whole"
    )


def _warning(key: str, location: Location) -> str:
    currency = location.currency
    if location.from_unknown_post:
        return (
            f"'{printable(key)}' comes from an unknown post (chunk {location.chunk}, block "
            f"{location.posting.start}) that an operator added: nothing shows that this ledger "
            "packed it, or that S3 had this content"
        )
    if currency is None or currency.is_current:
        return ""
    written = f"this is its content of {show_time(location.row.last_modified)}"
    at = f" at {show_time(currency.as_of)}" if currency.as_of else ""
    if currency.gone_at:
        listed = (
            f", an inventory last listed it on {show_time(currency.last_seen)}"
            if currency.last_seen
            else ""
        )
        gone = f"was gone from S3{at}" if at else "is gone from S3"
        return f"'{printable(key)}' {gone}{listed}; {written}"
    other = f"had other content in S3{at}" if at else "has other content in S3 now"
    if currency.chunk:
        why = f"chunk {currency.chunk} ({currency.state}) archives"
    elif currency.state == SkipReason.WAITING:
        why = "waits to be planned"
    elif currency.state:
        why = f"was skipped ({currency.state})"
    else:
        why = "is not archived"
    return f"'{printable(key)}' {other}, which {why}; {written}"
