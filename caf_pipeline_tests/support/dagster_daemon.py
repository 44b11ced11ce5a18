"""A real Dagster daemon for tests, with a code server and an instance polled each second."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from caf_pipeline.dagster_host.home import prepare_dagster_home
from caf_pipeline.naming import LOCATION_NAME

ROOT = Path(__file__).parents[2]

LOG_LINES = 60


def impatient_home(settings) -> Path:
    """Create a DAGSTER_HOME with our dagster.yaml, where run monitoring polls each second."""
    home = prepare_dagster_home(settings)
    instance = yaml.safe_load((ROOT / "dagster.yaml").read_text())
    instance["run_monitoring"] |= {
        "poll_interval_seconds": 1,
        "free_slots_after_run_end_seconds": 1,
    }
    (home / "dagster.yaml").unlink()
    (home / "dagster.yaml").write_text(yaml.safe_dump(instance))
    return home


def settings_of(pipeline, folder: Path) -> dict[str, str]:
    """Write a pipeline's settings to `folder`/caf.toml; return the environment that uses them."""
    settings, source = pipeline.settings, pipeline.settings.sources["my-source"]
    (folder / "caf.toml").write_text(
        f'home = "{settings.home}"\n[store]\nkind = "directory"\nfolder = '
        f'"{settings.store.folder}"\n[sources.my-source]\n'
        f'bucket = "{source.bucket}"\nendpoint_url = "{source.endpoint_url}"\n'
        f"target_size = {int(source.target_size)}\npublic = true\n"
        "automatic = true\nwatch_interval_seconds = 0\n"
    )
    return {
        **os.environ,
        "CAF_CONFIG": str(folder / "caf.toml"),
        "CAF_DATABASE_URL": settings.database_url.get_secret_value(),
        "CAF_SOURCES__MY-SOURCE__ACCESS_KEY_ID": source.access_key_id.get_secret_value(),
        "CAF_SOURCES__MY-SOURCE__SECRET_ACCESS_KEY": source.secret_access_key.get_secret_value(),
    }


@contextlib.contextmanager
def daemon(module: str, folder: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon, its code server and its runs in a process group, which is killed at the end.

    A failure in the block prints the end of the daemon's log.
    """
    log_file, workspace = folder / "daemon.log", folder / "workspace.yaml"
    location = {
        "module_name": module,
        "location_name": LOCATION_NAME,
        "working_directory": str(ROOT),
    }
    workspace.write_text(yaml.safe_dump({"load_from": [{"python_module": location}]}))
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            [
                Path(sys.executable).with_name("dagster-daemon"),
                "run",
                "-w",
                workspace,
            ],
            env=os.environ | environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    except BaseException:
        print(*log_file.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n")
        raise
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
