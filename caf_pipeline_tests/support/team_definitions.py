"""A team's project with an archive.

Environment variables: `TEAM_EXECUTOR` names its executor, `CAF_CONFIG` the settings, and
`CAF_TEST_BEGUN` the file that the asset `numbers` creates.
"""

import os
import time
from pathlib import Path

import dagster as dg

from caf_pipeline.defs.build import build_defs
from caf_pipeline.settings import load_settings

EXECUTORS = {
    "in_process": dg.in_process_executor,
    "multiprocess": dg.multiprocess_executor,
    "default": None,
}


@dg.asset
def numbers() -> None:
    Path(os.environ["CAF_TEST_BEGUN"]).touch()
    time.sleep(600)


defs = dg.Definitions.merge(
    dg.Definitions(assets=[numbers], executor=EXECUTORS[os.environ["TEAM_EXECUTOR"]]),
    build_defs(load_settings()),
)
