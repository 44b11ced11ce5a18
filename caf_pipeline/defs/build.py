"""Builds all definitions without network or database access."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dagster import AssetSpec, Definitions, JobDefinition, in_process_executor

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.automation.tick import TICK_SECONDS
from caf_pipeline.defs.asset_checks import source_checks
from caf_pipeline.defs.assets import source_assets
from caf_pipeline.defs.jobs import source_jobs
from caf_pipeline.defs.maintenance_jobs import look_job, prune_job, source_maintenance_jobs
from caf_pipeline.defs.resources import Execute, build_resources, run_step
from caf_pipeline.defs.restore_job import restore_job
from caf_pipeline.defs.schedules import (
    ScheduledJob,
    look_schedule,
    plan_schedule,
    prune_schedule,
)
from caf_pipeline.defs.sensors import (
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


@dataclass(frozen=True)
class ArchivePart:
    """Sources that are defined with the same options; see `build_defs`."""

    sources: Collection[str]
    translate: Translate = as_it_is
    crons: Mapping[ScheduledJob, str] = field(default_factory=dict)
    execute: Execute = run_step


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
    part = ArchivePart(settings.sources, translate, crons or {}, execute)
    (defs,) = build_parts(settings, [part], tick_seconds)
    return defs


def build_parts(
    settings: Settings, parts: Sequence[ArchivePart], tick_seconds: float = TICK_SECONDS
) -> list[Definitions]:
    """Return the definitions of each part, in order. The parts have all sources of `settings`.

    They merge: their resources are the same objects, and the first has all jobs, sensors and
    schedules.
    """
    on_jackal = settings.store.kind == "jackal"
    assets = [
        [
            translate_assets(
                name,
                source_assets(
                    name,
                    settings.sources[name],
                    len(set(settings.recipients_of(name))),
                    on_jackal=on_jackal,
                ),
                part.translate,
            )
            for name in part.sources
        ]
        for part in parts
    ]
    keys = AssetKeys(
        {key: value for part in assets for _, new in part for key, value in new.items()}
    )
    has_wallet = on_jackal and settings.jackal.has_wallet
    archive_jobs = [
        job for name in settings.sources for job in source_jobs(name, keys, has_wallet=has_wallet)
    ]
    other_jobs = [job for name in settings.sources for job in source_maintenance_jobs(name)]
    sensors = [new_objects_sensor(settings, name, tick_seconds) for name in settings.sources]
    schedules = [
        plan_schedule(name, automatic=settings.sources[name].automatic, cron=part.crons.get("plan"))
        for part in parts
        for name in part.sources
    ]
    if settings.sources:
        sensors.append(launching_sensor(settings, archive_jobs, keys, tick_seconds))
        sensors.append(alert_sensor(settings, keys, tick_seconds))
        sensors.append(dead_runs_sensor())
        other_jobs.append(look_job(list(settings.sources), has_wallet=has_wallet))
        crons = [part.crons["look"] for part in parts if "look" in part.crons]
        schedules.append(
            look_schedule(settings.sources, has_wallet=has_wallet, cron=crons[0] if crons else None)
        )
    executes = {name: part.execute for part in parts for name in part.sources}
    resources = build_resources(settings, keys, executes)
    built = [
        Definitions(
            assets=[asset for source_defs, _ in part_assets for asset in source_defs],
            asset_checks=[
                check
                for name in part.sources
                for check in source_checks(name, keys, on_jackal=on_jackal)
            ],
            resources=resources,
        )
        for part, part_assets in zip(parts, assets, strict=True)
    ]
    # Jobs are here, too: the definitions with a sensor contain its jobs.
    for_all = Definitions(
        jobs=[*archive_jobs, *other_jobs, *_decrypting_jobs(settings)],
        sensors=sensors,
        schedules=schedules,
    )
    return [Definitions.merge(built[0], for_all), *built[1:]]


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
