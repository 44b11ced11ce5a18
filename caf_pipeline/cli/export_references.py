"""The command that lets others read what is archived with no code of ours: export-references."""

from itertools import chain
from pathlib import Path
from typing import Annotated, Final

import typer

from caf_pipeline.cli.listing import CurrentOption, PrefixArgument, nothing_listed, wanted_status
from caf_pipeline.cli.opening import opened_lookup, opened_reader
from caf_pipeline.cli.terminal import SourceArgument, a_path, counted, note
from caf_pipeline.errors import CafError, UsageError
from caf_pipeline.retrieval.listing import list_objects
from caf_pipeline.retrieval.references import write_references
from caf_pipeline.settings import load_settings

KINDS: Final = (".json", ".parquet")


def export_references(
    source: SourceArgument,
    prefix: PrefixArgument = "",
    *,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            parser=a_path,
            metavar="FILE",
            help="What to write: FILE.json or FILE.parquet.",
        ),
    ],
    current: CurrentOption = False,
) -> None:
    r"""Write where each archived object's bytes are.

    A reference is a URL of a stored chunk, an offset and a length. What `caf ls --recursive` lists
    is written. FILE.json is read by fsspec's file system `reference`; FILE.parquet has a row for
    each object, or part of one, with its SHA-256. Whoever has the file reads the objects from the
    providers, with no code of ours and without the ledger. An object larger than a chunk is in
    parts, and not in FILE.json; a key that ends in '/' is there, and fsspec does not read it. How
    many there are of both is said.

    A URL is that of one provider, which gave an object of the chunk right when it was asked now, or
    a byte where that has more than 64 KiB: write the file again where providers change. What is
    read by it is compared with nothing: that is what the SHA-256 is for. A FILE that is there is
    replaced; where it is a link, what it leads to.

    \b
    Examples:
      caf export-references demo packages/ -o packages.json
      caf export-references demo packages/rich/ -o rich.parquet

    Exit status: 0; 1 FILE.json lacks objects that are in parts; 2 FILE is neither kind; 3 a setting
    is wrong or there is no such source; 6 the database failed; 7 some chunk cannot be read now; 8
    FILE cannot be written; 9 no provider gives an object of some chunk right, or none has it; 11 no
    archived key begins with PREFIX. After any but 0 and 1, FILE is as it was.
    """
    if output.suffix not in KINDS:
        raise UsageError(
            f"{str(output)!r} ends neither in .json nor in .parquet.",
            hint="The ending selects the format.",
        )
    settings = load_settings()
    with opened_lookup(settings) as lookup, opened_reader(settings, lookup, source) as store:
        listed = list_objects(lookup, source, prefix, include=wanted_status(current))
        first = next(listed, None)
        if first is None:
            raise nothing_listed(lookup, source, prefix, current)
        sums = write_references(chain([first], listed), store, output)
    written = counted(sums.objects - sums.in_parts, "object")
    note(
        f"{source}: references to {written} in {counted(sums.chunks, 'chunk')} are in "
        f"{str(output)!r}"
    )
    if sums.end_in_slash:
        note(
            f"{source}: {counted(sums.end_in_slash, 'key')} of these in {str(output)!r} cannot be "
            "read by fsspec, which cuts"
            " the '/' off the end; FILE.parquet has them for any program"
        )
    if sums.in_parts:
        raise CafError(
            f"{counted(sums.in_parts, 'object')} of several parts could not be written to "
            f"{str(output)!r}",
            hint="FILE.parquet has a row for each part",
        )
