"""`caf backfill`: planned chunks as one backfill of Dagster's daemon."""

from typing import Annotated

import typer

from caf_pipeline.cli.dagster_commands import dagster_command
from caf_pipeline.cli.terminal import SourceArgument
from caf_pipeline.settings import load_settings


def backfill(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    plan: Annotated[
        str,
        typer.Option(
            "--plan", metavar="PLAN", help="Only chunks of this plan, as `caf plans` names it."
        ),
    ] = "",
    first: Annotated[
        str,
        typer.Option(
            "--from", metavar="CHUNK", help="From this chunk on, in the order of planning."
        ),
    ] = "",
    last: Annotated[
        str, typer.Option("--to", metavar="CHUNK", help="Up to this chunk, and with it.")
    ] = "",
    failed: Annotated[
        bool, typer.Option("--failed", help="Only chunks whose last run failed, and parked ones.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be submitted, and change nothing.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="End with one JSON object, on standard output.")
    ] = False,
) -> int:
    r"""Let Dagster's daemon archive a source's planned chunks.

    Submits one asset backfill of all chunks that have work to do, a run for each, and says how far
    it is, at which rate, and how long it will still take. The daemon runs it: Ctrl-C or a lost
    connection end only the command, and the same command follows the backfill again. Its runs come
    after those of new objects. Left out are chunks that a run or another process works on, those of
    an unfinished backfill, and parked ones; --failed tries what failed again at once and sends
    parked chunks on their way.

    Without a daemon, `caf run` archives in its own process.

    \b
    Examples:
      caf backfill demo
      caf backfill demo --plan 1a2b3c4d --to demo-1a2b3c4d-00100
      caf backfill demo --failed --dry-run --json

    Exit status: 0 all that was submitted or followed is archived, or there was nothing to do; 2 the
    chunks named do not fit; 3 a setting is wrong or there is no such source; 6 the database failed;
    11 there is no such plan or chunk, or nothing is planned; 12 chunks are not archived: they are
    named, and `caf status` says why; 13 nothing was submitted, since runs work on what is left; 16
    no Dagster daemon runs, and nothing was submitted; 130 interrupted by Ctrl-C, 143 by SIGTERM,
    129 by SIGHUP or a closed terminal, and the backfill goes on.
    """
    settings = load_settings()
    wanted = {"plan": plan, "first": first, "last": last, "failed": failed}
    status: int = dagster_command("backfill")(
        source, settings=settings, wanted=wanted, dry_run=dry_run, json=json
    )
    return status
