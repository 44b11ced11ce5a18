"""`caf setup`."""

from typing import Annotated

import typer

from caf_pipeline.cli.terminal import DryRunOption, JsonOption
from caf_pipeline.settings import load_settings


def setup(
    reset: Annotated[
        bool,
        typer.Option("--reset", help="Replace limits that were set before."),
    ] = False,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> int:
    r"""Prepare DAGSTER_HOME and the limits of Dagster's pools.

    Makes DAGSTER_HOME with links to this software's dagster.yaml and workspace.yaml. Limits how
    many steps pack (pool caf_s3) and upload (pool caf_jackal_uploads) at a time, and prints why.
    Existing limits and your own dagster.yaml stay. The last line is the command that opens the
    Dagster UI.

    Optional: without it, four steps share each pool. It can be repeated; current runs use new
    limits immediately.

    \b
    Example:
      caf setup --reset          # after memory, cores or staging changed

    \b
    Exit status: 0
      2  Your own Dagster project has the folder; nothing is changed.
      3  Wrong settings, or Dagster's folder or storage cannot be used.
    """
    from caf_pipeline.dagster_host.setup import setup_command  # noqa: PLC0415 - loads Dagster

    return setup_command(settings=load_settings(), dry_run=dry_run, reset=reset, json=json)
