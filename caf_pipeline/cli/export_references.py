"""`caf export-references`."""

from itertools import chain
from pathlib import Path
from typing import Annotated, Final

from caf_pipeline.cli.listing import CurrentOption, PrefixArgument, nothing_listed, status_filter
from caf_pipeline.cli.opening import opened_lookup, opened_reader
from caf_pipeline.cli.terminal import SourceArgument, counted, note, output_option
from caf_pipeline.errors import CafError, UsageError
from caf_pipeline.retrieval.listing import list_objects
from caf_pipeline.retrieval.references import require_plain, write_references
from caf_pipeline.settings import load_settings

KINDS: Final = (".json", ".parquet")


def export_references(
    source: SourceArgument,
    prefix: PrefixArgument = "",
    *,
    output: Annotated[Path, output_option("The file to write: FILE.json or FILE.parquet.")],
    current: CurrentOption = False,
) -> None:
    r"""Write the URLs and byte ranges of archived objects.

    Other programs can then read the objects from the stored chunks, without this software and the
    ledger. fsspec's file system `reference` reads FILE.json. FILE.parquet has a row with the
    SHA-256 for each object or part.

    FILE.json leaves out objects larger than a chunk, and fsspec cannot read keys that end in '/'.
    Notes count both.

    Each URL names one provider, which returned an object or a byte of the chunk just now. Write the
    file again when providers change. Readers should compare the SHA-256. FILE is replaced if it
    exists.

    A source with encrypted chunks is refused, because the URLs would return encrypted bytes.

    \b
    Example:
      caf export-references demo packages/ -o packages.json

    \b
    Exit status: 3, 6, 8
      0   FILE is complete.
      1   FILE.json lacks objects larger than a chunk.
      2   FILE ends in neither .json nor .parquet, or SOURCE has encrypted chunks.
      7   A chunk cannot be read now.
      9   No provider returns an object of some chunk right.
      11  No archived key begins with PREFIX.
    After other statuses than 0 and 1, FILE is unchanged.
    """
    if output.suffix not in KINDS:
        raise UsageError(
            f"{str(output)!r} ends neither in .json nor in .parquet.",
            hint="The ending selects the format.",
        )
    settings = load_settings()
    with opened_lookup(settings) as lookup, opened_reader(settings, lookup, source) as store:
        require_plain(lookup, source)
        listed = list_objects(lookup, source, prefix, include=status_filter(current))
        first = next(listed, None)
        if first is None:
            raise nothing_listed(lookup, source, prefix, current)
        sums = write_references(chain([first], listed), store, output)
    written = counted(sums.objects - sums.in_parts, "object")
    chunks = counted(sums.chunks, "chunk")
    note(f"{source}: references to {written} in {chunks} are in {str(output)!r}")
    if sums.end_in_slash:
        note(
            f"{source}: fsspec cannot read {counted(sums.end_in_slash, 'key')} in "
            f"{str(output)!r}, because it removes the '/' at the end; other programs can read "
            "FILE.parquet"
        )
    if sums.in_parts:
        raise CafError(
            f"{counted(sums.in_parts, 'object')} of several parts could not be written to "
            f"{str(output)!r}",
            hint="FILE.parquet has a row for each part",
        )
