"""Builds all definitions without network or database access."""

from collections.abc import Mapping
from typing import Any

from dagster import Definitions, JobDefinition, in_process_executor

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
    """Return the definitions; resources are overridden by key.

    `tick_seconds` is the deadline of a sensor's tick.
    """
    on_jackal = settings.store.kind == "jackal"
    assets, checks, archive_jobs, other_jobs, sensors, schedules = [], [], [], [], [], []
    for name, source in settings.sources.items():
        assets += source_assets(name, source, len(set(settings.recipients_of(name))))
        checks += source_checks(name, on_jackal=on_jackal)
        archive_jobs += source_jobs(name, on_jackal=on_jackal)
        other_jobs += source_maintenance_jobs(name)
        sensors.append(new_objects_sensor(settings, name, tick_seconds))
        schedules += source_schedules(name, automatic=source.automatic, on_jackal=on_jackal)
    if settings.sources:
        sensors.append(launching_sensor(settings, archive_jobs, tick_seconds))
        sensors.append(alert_sensor(settings, tick_seconds))
    keep_days = settings.runs.keep_events_days
    return Definitions(
        assets=assets,
        asset_checks=checks,
        jobs=[
            *archive_jobs,
            *other_jobs,
            *_decrypting_jobs(settings),
            prune_job(keep_days, list(settings.sources)),
        ],
        sensors=sensors,
        schedules=[prune_schedule(keep_days), *schedules],
        resources=build_resources(settings) | dict(resource_overrides or {}),
        # Set for all jobs, since asset backfills and runs of the UI ignore a job's executor. The
        # default executor starts a process for each op, which adds fifty seconds to a chunk.
        executor=in_process_executor,
    )


def build_decrypting_defs(settings: Settings) -> Definitions:
    """Return the definitions for a machine with the identity.

    Its jobs are those that decrypt. All others, sensors and schedules stay with the workers.
    """
    return Definitions(
        jobs=_decrypting_jobs(settings),
        resources=build_resources(settings),
        executor=in_process_executor,
    )


def _decrypting_jobs(settings: Settings) -> list[JobDefinition]:
    is_all_public = all(source.public for source in settings.sources.values())
    return [restore_job()] if is_all_public or settings.encryption.has_identity else []
