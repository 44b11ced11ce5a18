"""`caf runs`: what Dagster runs now, and how the last runs ended."""

from typing import Annotated

import typer

from caf_pipeline.cli.dagster_commands import dagster_command
from caf_pipeline.cli.terminal import JsonOption
from caf_pipeline.settings import load_settings


def runs(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[SOURCE]", help="Runs of one source; of all by default."),
    ] = None,
    last: Annotated[
        int, typer.Option("--last", metavar="N", min=0, max=1000, help="Ended runs that are shown.")
    ] = 20,
    json: JsonOption = False,
) -> int:
    r"""Show the runs that go on, and how the last ones ended.

    Of each run: its id, its chunk, or its job where it has none, the chunk's state in the ledger,
    the run's status and since when, and what became of it, or what it waits for. Where Dagster
    shows a run as going on whose process here is dead, that is said; the daemon ends it. Runs of
    the UI, of `caf run` and of backfills are all shown, the latest first. Of those that go on,
    1,000 are shown at most. Those of one source are looked for among the latest 20,000 of all.

    Needs Dagster's storage and the ledger, no daemon.

    \b
    Examples:
      caf runs
      caf runs demo --last 5
      caf runs --json | jq 'select(.status == "failure") | .result'

    Exit status: 0; 3 a setting is wrong, there is no such source, or Dagster's storage cannot be
    opened; 6 the database failed.
    """
    settings = load_settings()
    status: int = dagster_command("runs")(source, settings=settings, last=last, json=json)
    return status
