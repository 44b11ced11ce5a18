"""`caf run`."""

from typing import Annotated

import typer

from caf_pipeline.cli.dagster_commands import dagster_command
from caf_pipeline.cli.terminal import ReportOption
from caf_pipeline.errors import UsageError
from caf_pipeline.settings import load_settings


def run(  # noqa: PLR0917 - the command line's options
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE", help="The source to archive; all of caf.toml by default."),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--source", metavar="NAME", help="Another way to name the source."),
    ] = None,
    new_archive: Annotated[
        bool,
        typer.Option(
            "--new-archive", help="Archive SOURCE as new: it is none of the wallet's archives."
        ),
    ] = False,
    report: ReportOption = None,
    list_bucket: Annotated[
        bool, typer.Option("--list", help="List the bucket, although the source has reports.")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            metavar="N",
            min=0,
            help="Archive N chunks at a time; 0 chooses by their sizes.",
        ),
    ] = 0,
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="End with one JSON object that sums it up, on standard output."
        ),
    ] = False,
) -> int:
    r"""Take an inventory, plan what is new, and archive it.

    Runs through Dagster, in this process; each run is on its job's page in the UI. What an earlier
    run left unfinished is finished, too. Whatever it waits for is said at once, with what ends the
    wait; without a terminal a line says every minute how far it is. A chunk that fails lets the
    others go on; after the same permanent error on three chunks the rest is not tried. Ctrl-C ends
    it; the same command goes on where it stopped.

    Where the ledger has nothing of a source, e.g. in an empty home, the store is asked first. Where
    it lists files that may hold the source's objects, nothing is planned: `caf rebuild` restores
    them into the ledger. `--new-archive` says that these files belong to other archives, and
    archives all of SOURCE.

    Of N chunks at a time, N - 1 are packed while another is sent, each by a process of its own;
    each takes its room in staging. Where there is no room for two, one follows the other. By
    default it is 2, and 1 where the chunks are small.

    A source with the setting `inventory` is not listed: its newest complete S3 Inventory report is
    taken. `--report` takes SOURCE's report of another day; `--list` lists the bucket.

    \b
    Examples:
      caf run demo
      caf run demo --new-archive
      caf run --json | jq '.sources[] | select(.exit_status != 0)'

    Exit status: 0 everything that the inventory found is located, or skipped as unsupported_key or
    too_large. Else the first that applies, of all sources: 12 chunks failed; 13 other live runs
    hold what is missing; 14 objects are to be tried again: skipped for another reason, claimed by a
    chunk that is not archived yet, or not planned yet; 15 all others are located, and some wait
    until a chunk of min_chunk_size can be filled, or max_wait is over; 18 everything is located,
    and chunks are damaged, which `caf repair` mends; 19 the inventory lists no object, and no
    object of the source was ever planned. Before any chunk is tried, or if nothing can go on: 1 an
    inventory or a plan failed by a fault of its own; 2 an option is for one source, or excludes
    another; 3 a setting is wrong; 5 the source, 6 the database or 7 the store failed, or the store
    may have the source already; 8 the disk under home failed; 9 a plan or an inventory is damaged.
    130 interrupted by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP or a closed terminal.
    """
    settings = load_settings()
    sources = [*(names or ()), *(options or ())]
    source = sources[0] if sources else None
    if len(sources) > 1:
        raise UsageError(
            "caf run takes one source.",
            hint="Leave it out for all of caf.toml, or run the command for each.",
        )
    if source is not None:
        settings.source(source)
    elif new_archive or report:
        raise UsageError(
            f"{'--new-archive' if new_archive else '--report'} is for one source.",
            hint="Name it: caf run SOURCE.",
        )
    if report and list_bucket:
        raise UsageError("--report and --list exclude each other.", hint="Give one of them.")
    inventory = {"report": report or "", "list_bucket": list_bucket}
    how = {"new_archive": new_archive, "inventory": inventory, "workers": workers}
    status: int = dagster_command("run")(source, settings=settings, **how, json=json)
    return status
