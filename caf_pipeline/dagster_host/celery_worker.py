"""A Celery worker that executes runs, configured by the launcher's dagster.yaml.

    python -m caf_pipeline.dagster_host.celery_worker --concurrency 2

dagster-celery's own command copies the broker's address, with its password, to a folder that all
users can read.
"""

import secrets
import sys

from celery import Celery
from dagster_celery.tasks import create_execute_job_task

from caf_pipeline.dagster_host.celery_launcher import CheckedCeleryRunLauncher
from caf_pipeline.dagster_host.home import prepare_dagster_home
from caf_pipeline.dagster_private import InstanceRef
from caf_pipeline.errors import CafError, SettingsError, with_hint
from caf_pipeline.settings import load_settings


def celery_app() -> Celery:
    """Return the configured app, or raise a SettingsError."""
    home = prepare_dagster_home(load_settings())  # run processes inherit DAGSTER_HOME
    launcher = InstanceRef.from_dir(str(home)).run_launcher
    if not isinstance(launcher, CheckedCeleryRunLauncher):
        raise SettingsError(
            f"the run launcher of {home}/dagster.yaml is not {CheckedCeleryRunLauncher.__name__}",
            hint="replace it by deploy/celery/dagster.yaml, which `caf init --celery` writes",
        )
    create_execute_job_task(launcher.celery)
    return launcher.celery


def main(options: list[str]) -> int:
    """Execute runs until a signal ends the process; takes the options of `celery worker`.

    Containers may have the same host name, and RabbitMQ's control queues are named like workers.
    """
    try:
        app = celery_app()
    except CafError as error:
        print(with_hint(error), file=sys.stderr)
        return error.exit_code
    # The last --hostname counts.
    app.worker_main(["worker", "--hostname", f"{secrets.token_hex(4)}@%h", *options])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
