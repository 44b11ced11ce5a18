"""`caf run`."""

from typing import Annotated

import typer

from caf_pipeline.cli.completing import complete_source
from caf_pipeline.cli.opening import chosen_source
from caf_pipeline.cli.terminal import JsonOption, ListOption, ReportOption, exclusive
from caf_pipeline.errors import UsageError
from caf_pipeline.settings import load_settings


def run(  # noqa: PLR0917 - the command line's options
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="The source to archive, if there are several.",
            autocompletion=complete_source,
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--source", metavar="NAME", help="Another way to name the source."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Archive all sources of caf.toml, one after the other.")
    ] = False,
    new_archive: Annotated[
        bool,
        typer.Option(
            "--new-archive", help="Archive all of SOURCE again, whatever the store lists."
        ),
    ] = False,
    report: ReportOption = None,
    list_bucket: ListOption = False,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            metavar="N",
            min=0,
            help="Archive N chunks at a time; 0 chooses by the machine and their sizes.",
        ),
    ] = 0,
    json: JsonOption = False,
) -> int:
    r"""Take an inventory, plan what is new, and archive it.

    Runs Dagster jobs in this process; the UI shows them. In your own Dagster project, these are the
    project's jobs, in its DAGSTER_HOME. Also finishes what earlier runs left unfinished. If a chunk
    fails, the others continue; after the same permanent error on three chunks, no more are tried.
    After Ctrl-C, repeat the command to continue.

    If the ledger has nothing of a source, the store is searched first. If it may hold the source's
    objects, nothing is planned: `caf rebuild` restores them to the ledger. With --new-archive, all
    of SOURCE is archived anyway.

    With N workers, N - 1 chunks are packed while another is uploaded. Each has a process and its
    space in staging; without space for two, chunks are archived one by one. By default one worker
    packs for each two cores (at least 1, at most 8), and another uploads, as far as staging and
    memory suffice. Small chunks have one worker.

    For a source with the setting `inventory`, the newest complete S3 Inventory report replaces the
    listing.

    \b
    Examples:
      caf run demo
      caf run --all --json | jq '.sources[] | select(.exit_status != 0)'

    \b
    Exit status, the first that applies to any source:
      0   All objects are located, or skipped as unsupported_key or too_large.
      12  Chunks failed.
      13  Other live runs hold the missing chunks.
      14  Objects must be tried again: skipped for now, claimed or not planned.
      15  Objects wait for min_chunk_size or max_wait; all others are located.
      18  All are located, but chunks are damaged: run `caf repair`.
      19  The inventory is empty, and the source never had an object.

    \b
    Before any chunk is tried, or if nothing can continue:
      1   An inventory or a plan failed.
      3   Wrong settings or source, or the project has no DAGSTER_HOME.
      5   The source failed.
      6   The database failed.
      7   The store failed, or may have the source already.
      8   The disk of `home` failed.
      9   A plan or an inventory is damaged.
    """
    settings = load_settings()
    sources = [*(names or ()), *(options or ())]
    if len(sources) > 1:
        raise UsageError(
            "caf run takes one source.", hint="Give --all, or run the command for each."
        )
    source = None
    if every:
        exclusive(all=True, source=sources, new_archive=new_archive, report=report)
    else:
        source = chosen_source(settings, *(sources or [None]), hint="--all archives all of them.")
    exclusive(report=report, list=list_bucket)
    from caf_pipeline.dagster_host.run_source import run_command  # noqa: PLC0415 - loads Dagster

    return run_command(
        source,
        settings=settings,
        new_archive=new_archive,
        inventory={"report": report or "", "list_bucket": list_bucket},
        workers=workers,
        json=json,
    )
