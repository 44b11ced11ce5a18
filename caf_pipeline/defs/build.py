"""Joins, for each source of the settings, its assets, checks, jobs, sensors and schedules into what
Dagster loads.

Building asks neither network nor database.
"""

from collections.abc import Mapping
from typing import Any

from dagster import Definitions, in_process_executor

from caf_pipeline.defs.asset_checks import source_checks
from caf_pipeline.defs.assets import source_assets
from caf_pipeline.defs.jobs import source_jobs
from caf_pipeline.defs.maintenance_jobs import prune_job, source_maintenance_jobs
from caf_pipeline.defs.resources import build_resources
from caf_pipeline.defs.restore_job import restore_job
from caf_pipeline.defs.schedules import prune_schedule, source_schedules
from caf_pipeline.defs.sensors import (
    TICK_SECONDS,
    alert_sensor,
    launching_sensor,
    new_objects_sensor,
)
from caf_pipeline.settings import Settings


def build_defs(
    settings: Settings,
    *,
    resource_overrides: Mapping[str, Any] | None = None,
    tick_seconds: float = TICK_SECONDS,
) -> Definitions:
    """Return the definitions for these settings.

    `resource_overrides` replaces resources by name; `tick_seconds` is what each tick of a sensor
    may wait for servers.
    """
    sources = settings.sources.items()
    on_jackal = settings.store.kind == "jackal"
    jobs = {source: source_jobs(source, on_jackal=on_jackal) for source in settings.sources}
    return Definitions(
        assets=[each for source, its in sources for each in source_assets(source, its)],
        asset_checks=[
            each for source, _ in sources for each in source_checks(source, on_jackal=on_jackal)
        ],
        jobs=[
            *(each for its in jobs.values() for each in its),
            *(each for source, _ in sources for each in source_maintenance_jobs(source)),
            restore_job(),
            prune_job(settings.runs.keep_events_days, list(settings.sources)),
        ],
        sensors=[
            *(new_objects_sensor(settings, source, tick_seconds) for source in settings.sources),
            *(
                [
                    launching_sensor(
                        settings, (each for its in jobs.values() for each in its), tick_seconds
                    )
                ]
                if jobs
                else []
            ),
            *([alert_sensor(settings, tick_seconds)] if jobs else []),
        ],
        schedules=[
            prune_schedule(settings.runs.keep_events_days),
            *(
                schedule
                for name, source in sources
                for schedule in source_schedules(
                    name, automatic=source.automatic, on_jackal=on_jackal
                )
            ),
        ],
        resources=build_resources(settings) | dict(resource_overrides or {}),
        # Here and not on the jobs: asset backfills and runs of the UI ignore a job's executor, and
        # the default one takes a process for each op, which is fifty seconds a chunk.
        executor=in_process_executor,
    )
