"""`caf backfill`."""

from typing import Annotated

import typer

from caf_pipeline.cli.terminal import DryRunOption, JsonOption, SourceArgument
from caf_pipeline.settings import load_settings


def backfill(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    plan: Annotated[
        str,
        typer.Option(
            "--plan", metavar="PLAN", help="Only chunks of this plan, as shown by `caf plans`."
        ),
    ] = "",
    first: Annotated[
        str,
        typer.Option("--from", metavar="CHUNK", help="First chunk, in the order of planning."),
    ] = "",
    last: Annotated[str, typer.Option("--to", metavar="CHUNK", help="Last chunk, inclusive.")] = "",
    failed: Annotated[
        bool, typer.Option("--failed", help="Only parked chunks and those whose last run failed.")
    ] = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> int:
    r"""Archive planned chunks with Dagster's daemon.

    Submits one backfill of the job caf_archive_<source>, with a run for each chunk that has work
    to do, and shows its progress. The daemon runs it: Ctrl-C ends only this command, and the same
    command follows it again. Runs for new objects have priority.

    Leaves out chunks of live runs, other processes and an unfinished backfill, and parked chunks.
    --failed retries failed and parked chunks now. If no daemon runs, use `caf run`.

    \b
    Examples:
      caf backfill demo --plan 1a2b3c4d --to demo-1a2b3c4d-00100
      caf backfill demo --failed --dry-run --json

    \b
    Exit status: 6
      0   All chunks are archived, or there was nothing to do.
      2   The chunks are not of the source or plan, or are out of order.
      3   Wrong settings or source, or your Dagster project has no DAGSTER_HOME.
      11  No such plan or chunk, or nothing is planned.
      12  The named chunks are not archived; `caf status` shows why.
      13  Nothing was submitted: runs work on the remaining chunks.
      16  Nothing was submitted: no Dagster daemon runs.
      130, 143, 129: interrupted by Ctrl-C, SIGTERM, or SIGHUP; the backfill continues.
    """
    from caf_pipeline.dagster_host.backfill import backfill_command  # noqa: PLC0415 - loads Dagster

    return backfill_command(
        source,
        settings=load_settings(),
        wanted={"plan": plan, "first": first, "last": last, "failed": failed},
        dry_run=dry_run,
        json=json,
    )
