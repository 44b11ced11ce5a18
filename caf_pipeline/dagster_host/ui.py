"""`caf ui`: becomes Dagster's `dg dev` for the sources of caf.toml."""

import os
import socket
import sys
from importlib.util import find_spec
from typing import Final

from caf_pipeline.dagster_host.home import WORKSPACE_FILE, prepare_dagster_home
from caf_pipeline.dagster_host.team_project import team_project
from caf_pipeline.errors import CafError, UsageError
from caf_pipeline.settings import Settings

HOST: Final = "127.0.0.1"
"""Dagster's UI has no login."""

_PACKAGES: Final = ("dagster_dg_cli", "dagster_webserver")


def ui_command(*, settings: Settings, port: int) -> None:
    """Replace this process by `dg dev`.

    Raises:
        UsageError: The port is in use, or the folder belongs to another Dagster project.
        CafError: The extra `host` is not installed.
    """
    if project := team_project(settings.folder):
        raise UsageError(
            f"{project.root} is a Dagster project of its own.",
            hint="Run `dg dev` in it. Its UI shows these sources if a component or `build_defs` "
            "loads them.",
        )
    if missing := [name for name in _PACKAGES if not find_spec(name)]:
        raise CafError(
            f"Dagster's UI needs {' and '.join(missing).replace('_', '-')}",
            hint="run: pip install 'caf-pipeline[host]'",
        )
    # If the port is in use, Dagster's webserver ends and leaves the daemon running.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # recently closed: free
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UsageError(
                f"port {port} of {HOST} cannot be used: {error.strerror}.",
                hint="Give another one by --port.",
            ) from error
    workspace = prepare_dagster_home(settings) / WORKSPACE_FILE
    print(f"http://{HOST}:{port}  (Ctrl-C ends it)", flush=True)
    command = [sys.executable, "-m", "dagster_dg_cli.cli", "dev", "--workspace", str(workspace)]
    os.execv(sys.executable, [*command, "--host", HOST, "--port", str(port)])
