"""A job whose op takes a slot of the pool `caf_s3` and sleeps until it is killed or interrupted.

`python -m caf_pipeline_tests.support.sleeper FILE` executes it like `caf run`, and adds a line to
FILE each time the op begins. DAGSTER_HOME must be set.
"""

import os
import sys
import time
from pathlib import Path

from dagster import (
    DagsterInstance,
    DefaultSensorStatus,
    Definitions,
    OpExecutionContext,
    RunRequest,
    in_process_executor,
    job,
    op,
    sensor,
)

from caf_pipeline.dagster_host.executing import execute_here
from caf_pipeline.defs.failures import RETRY_TRANSIENT, attempt
from caf_pipeline.defs.resources import ignore
from caf_pipeline.naming import S3_POOL

BEGUN_VARIABLE = "CAF_TEST_BEGUN"
"""Environment variable with the path of FILE, which a daemon's runs inherit."""


@op(pool=S3_POOL, retry_policy=RETRY_TRANSIENT)
def sleep_long(context: OpExecutionContext) -> None:
    def sleep() -> None:
        begun = Path(os.environ[BEGUN_VARIABLE])
        with begun.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if len(begun.read_text().split()) == 1:
            time.sleep(600)

    attempt(context, sleep, ignore)


@job
def sleeper() -> None:
    sleep_long()


@sensor(job=sleeper, minimum_interval_seconds=1, default_status=DefaultSensorStatus.RUNNING)
def once() -> RunRequest:
    """Launch the job once."""
    return RunRequest(run_key="once")


defs = Definitions(jobs=[sleeper], sensors=[once], executor=in_process_executor)

if __name__ == "__main__":
    os.environ[BEGUN_VARIABLE] = sys.argv[1]
    with DagsterInstance.get() as instance:
        execute_here(defs.resolve_job_def("sleeper"), instance, run_config={})
