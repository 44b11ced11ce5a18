"""`caf ui`."""

from typing import Annotated

import typer

from caf_pipeline.settings import load_settings


def ui(
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=1, max=65_535, help="The port of the UI.")
    ] = 3000,
) -> None:
    r"""Serve Dagster's UI and daemon until Ctrl-C.

    The UI shows the sources of caf.toml and every run of this DAGSTER_HOME, at 127.0.0.1 only. The
    daemon archives new objects of sources that have `automatic`, and executes backfills.

    \b
    Exit status:
      0  Ctrl-C ended it.
      1  Dagster's UI is not installed.
      2  The port is in use, or your own Dagster project has the folder: use its `dg dev`.
      3  Wrong settings, or DAGSTER_HOME cannot be written.
    """
    from caf_pipeline.dagster_host.ui import ui_command  # noqa: PLC0415 - loads Dagster

    ui_command(settings=load_settings(), port=port)
