"""A job of a project that uses Dagster's multiprocess executor, with the assets of a chunk.

Each step's process loads it again, from the file that `CAF_CONFIG` names.
"""

from dagster import (
    AssetKey,
    AssetSelection,
    Definitions,
    JobDefinition,
    define_asset_job,
    multiprocess_executor,
)

from caf_pipeline.defs.build import build_defs
from caf_pipeline.naming import ASSETS
from caf_pipeline.settings import load_settings


def chunk_job() -> JobDefinition:
    settings = load_settings()
    keys = [AssetKey([source, name]) for source in settings.sources for name in ASSETS[2:]]
    job = define_asset_job("team_job", AssetSelection.assets(*keys))
    project = Definitions(jobs=[job], executor=multiprocess_executor)
    return Definitions.merge(project, build_defs(settings)).resolve_job_def("team_job")
