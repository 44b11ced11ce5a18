"""`caf runs`."""

from typing import Annotated

import typer

from caf_pipeline.cli.terminal import JsonOption
from caf_pipeline.settings import load_settings


def runs(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[SOURCE]", help="One source; all by default."),
    ] = None,
    last: Annotated[
        int,
        typer.Option("--last", metavar="N", min=0, max=1000, help="Number of ended runs to show."),
    ] = 20,
    json: JsonOption = False,
) -> int:
    r"""Show current runs and how the last ones ended.

    A line has the run's id, chunk or job, status and time, the chunk's state in the ledger, and the
    result of the run or what it waits for. Runs whose process is dead are marked; the daemon ends
    them. Newest come first.

    Shows at most 1,000 current runs. For SOURCE, searches the latest 20,000. Needs Dagster's
    storage and the ledger, but no daemon.

    \b
    Example:
      caf runs --json | jq 'select(.status == "failure") | .result'

    \b
    Exit status: 0, 6
      3  Wrong settings, no such source, or Dagster's storage cannot be opened.
    """
    from caf_pipeline.dagster_host.runs import runs_command  # noqa: PLC0415 - loads Dagster

    return runs_command(source, settings=load_settings(), last=last, json=json)
