"""Builds all definitions without network or database access."""

from collections.abc import Mapping

from dagster import (
    AssetKey,
    AssetsDefinition,
    AssetSpec,
    Definitions,
    JobDefinition,
    in_process_executor,
)

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.defs.asset_checks import source_checks
from caf_pipeline.defs.assets import source_assets
from caf_pipeline.defs.jobs import source_jobs
from caf_pipeline.defs.maintenance_jobs import prune_job, source_maintenance_jobs
from caf_pipeline.defs.resources import Execute, build_resources, run_step
from caf_pipeline.defs.restore_job import restore_job
from caf_pipeline.defs.schedules import ScheduledJob, prune_schedule, source_schedules
from caf_pipeline.defs.sensors import (
    TICK_SECONDS,
    alert_sensor,
    dead_runs_sensor,
    launching_sensor,
    new_objects_sensor,
)
from caf_pipeline.defs.translation import ArchiveAsset, Translate, translate_assets
from caf_pipeline.settings import Settings


def as_it_is(spec: AssetSpec, _: ArchiveAsset) -> AssetSpec:
    """Change nothing."""
    return spec


def build_defs(
    settings: Settings,
    *,
    translate: Translate = as_it_is,
    crons: Mapping[ScheduledJob, str] | None = None,
    execute: Execute = run_step,
    tick_seconds: float = TICK_SECONDS,
) -> Definitions:
    """Return definitions for any project. Only our jobs have an executor.

    `crons` replaces default cron expressions, in UTC. `tick_seconds` is the deadline of a sensor's
    tick.
    """
    on_jackal = settings.store.kind == "jackal"
    assets: list[AssetsDefinition] = []
    other_jobs, sensors, schedules = [], [], []
    translated: dict[tuple[str, str], AssetKey] = {}
    for name, source in settings.sources.items():
        recipients = len(set(settings.recipients_of(name)))
        source_defs, source_keys = translate_assets(
            name, source_assets(name, source, recipients, on_jackal=on_jackal), translate
        )
        assets += source_defs
        translated |= source_keys
        other_jobs += source_maintenance_jobs(name)
        sensors.append(new_objects_sensor(settings, name, tick_seconds))
        schedules += source_schedules(
            name,
            automatic=source.automatic,
            on_jackal=on_jackal,
            has_nodes=bool(settings.jackal.lcd),
            crons=crons or {},
        )
    keys = AssetKeys(translated)
    archive_jobs = [
        job for name in settings.sources for job in source_jobs(name, keys, on_jackal=on_jackal)
    ]
    if settings.sources:
        sensors.append(launching_sensor(settings, archive_jobs, keys, tick_seconds))
        sensors.append(alert_sensor(settings, keys, tick_seconds))
        sensors.append(dead_runs_sensor())
    return Definitions(
        assets=assets,
        asset_checks=[
            check
            for name in settings.sources
            for check in source_checks(name, keys, on_jackal=on_jackal)
        ],
        jobs=[*archive_jobs, *other_jobs, *_decrypting_jobs(settings)],
        sensors=sensors,
        schedules=schedules,
        resources=build_resources(settings, keys, execute),
    )


def build_own_defs(settings: Settings) -> Definitions:
    """Return the definitions of our own code location, which prunes events."""
    keep_days = settings.runs.keep_events_days
    return Definitions.merge(
        build_defs(settings),
        Definitions(
            jobs=[prune_job(keep_days, list(settings.sources))],
            schedules=[prune_schedule(keep_days)],
            # Asset backfills and runs of the UI ignore a job's executor.
            executor=in_process_executor,
        ),
    )


def build_decrypting_defs(settings: Settings) -> Definitions:
    """Return the jobs that decrypt, for a machine with the identity."""
    return Definitions(
        jobs=_decrypting_jobs(settings),
        resources=build_resources(settings),
    )


def _decrypting_jobs(settings: Settings) -> list[JobDefinition]:
    is_all_public = all(source.public for source in settings.sources.values())
    return [restore_job()] if is_all_public or settings.encryption.has_identity else []
