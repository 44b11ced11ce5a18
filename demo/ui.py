"""Opens the Dagster UI with the demo's S3 server and Jackal network: `make ui`.

It archives nothing by itself. Set `automatic = true` in [sources.demo] of caf.toml, or switch the
sensors on in the UI under Automation. Then caf archives objects that you add to the bucket. Any key
and secret work:

    aws --endpoint-url http://127.0.0.1:5055 s3 cp README.md s3://demo/
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bucket
import identity
import network
import ports
import processes
import server
import yaml
from dagster import DagsterInstance

# Runs the code server with keys, so that the webserver and the daemon have none. The name is
# private to the Dagster version in `dagster_private`. The fallback is one `dg dev` with the keys.
from dagster._cli.proxy_server_manager import ProxyServerManager

from caf_pipeline.dagster_host.home import prepare_dagster_home
from caf_pipeline.dagster_host.logging_filters import add_logging_filters
from caf_pipeline.dagster_private import WorkspaceFileTarget
from caf_pipeline.settings import load_settings
from caf_pipeline.system.child_environment import Need, child_environment

WORKSPACE = Path(__file__).parents[1] / "workspace.yaml"
DG = Path(__file__).with_name("dg.py")


def main() -> int:
    """Run the UI until it ends, and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bucket", help="also show this existing bucket")
    parser.add_argument("--port", default="3000", help="port of the UI (default: 3000)")
    arguments = parser.parse_args()
    if not (
        arguments.port.isascii()
        and arguments.port.isdecimal()
        and 0 < int(arguments.port) < 1 << 16
    ):
        sys.exit(f"PORT is {arguments.port!r}: it must be a number from 1 to 65535")
    if arguments.bucket:
        bucket.use(arguments.bucket)
    add_logging_filters()
    settings = load_settings()
    # If the port is taken, Dagster's webserver ends and leaves the rest running.
    ports.require_free(
        "127.0.0.1",
        int(arguments.port),
        user="the UI",
        hint="choose another port, as in make ui PORT=3001",
    )
    if not arguments.bucket:
        server.runs()
    network.runs()
    with (
        processes.ending_all(settings.home),
        nullcontext() if arguments.bucket else server.running(),
        network.running(),
    ):
        if not arguments.bucket:
            server.client().create_bucket(Bucket=server.BUCKET)
        identity.use(settings)
        prepare_dagster_home(settings)
        keys = child_environment(Need.S3) if arguments.bucket else server.KEYS
        print(f"http://127.0.0.1:{arguments.port}  (Ctrl-C ends it)", flush=True)
        try:
            with code_server(network.environment() | keys) as workspace:
                command = [
                    sys.executable,
                    str(DG),
                    "dev",
                    "--workspace",
                    str(workspace),
                    "--port",
                    arguments.port,
                ]
                return processes.run(
                    command, child_environment(Need.SETTINGS | Need.STORAGE | Need.POSTGRES)
                )
        except KeyboardInterrupt:
            return 0


@contextmanager
def code_server(environment: dict[str, str]) -> Iterator[Path]:
    """Run the code server, which alone gets the keys. Yields a workspace file that names it."""
    os.environ.clear()
    os.environ.update(environment)  # Dagster starts it with this process's environment
    with (
        tempfile.TemporaryDirectory() as folder,
        DagsterInstance.get() as instance,
        ProxyServerManager(instance, WorkspaceFileTarget([str(WORKSPACE)])) as servers,
    ):
        file = Path(folder, "workspace.yaml")
        file.write_text(
            yaml.safe_dump({"load_from": servers.get_code_server_specs()}), encoding="utf-8"
        )
        yield file


if __name__ == "__main__":
    sys.exit(main())
