"""`caf setup`: what Dagster needs on a machine once."""

from typing import Annotated

import typer

from caf_pipeline.cli.dagster_commands import dagster_command
from caf_pipeline.settings import load_settings


def setup(
    reset: Annotated[
        bool,
        typer.Option(
            "--reset", help="Also set limits that were set before, by hand or by this command."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    r"""Prepare DAGSTER_HOME and the limits of Dagster's pools.

    Makes DAGSTER_HOME with links to our dagster.yaml and workspace.yaml. Sets how many steps at a
    time pack (pool s3) and send (pool jackal_uploads). It computes these limits from cores, memory,
    staging and bandwidth, and prints their reasons. A limit that was set before stays, and so does
    a dagster.yaml of your own: done again, it changes nothing. The last line is the command that
    opens the Dagster UI for this caf.toml.

    Nothing needs this command: without it four steps share each pool. Tables make themselves. Runs
    under way and waiting take a new limit at once.

    \b
    Examples:
      caf setup --dry-run
      caf setup
      caf setup --reset          # after memory, cores or staging have changed

    Exit status: 0; 3 a setting is wrong, or Dagster's folder or storage cannot be used.
    """
    settings = load_settings()
    status: int = dagster_command("setup")(
        settings=settings, dry_run=dry_run, reset=reset, json=json
    )
    return status
