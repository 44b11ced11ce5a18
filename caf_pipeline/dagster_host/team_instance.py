"""Advice about the instance of a team's project, for `caf doctor`."""

from collections.abc import Iterator

from dagster import DagsterError, DagsterInstance, DagsterRunStatus, RunsFilter
from sqlalchemy.exc import SQLAlchemyError

from caf_pipeline.automation.dead_runs import ends_dead_runs, process_lives
from caf_pipeline.dagster_host.team_project import HOME_VARIABLE, team_project
from caf_pipeline.errors import SettingsError, first_line
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.maintenance.doctor.findings import Actor, Finding, Kind, not_checked
from caf_pipeline.naming import S3_POOL, SOURCE_TAG, UPLOAD_POOL
from caf_pipeline.settings import Settings


def instance_findings(*, settings: Settings, ledger: Ledger) -> Iterator[Finding]:
    """Yield missing settings that would help, and runs that may be dead; nothing elsewhere."""
    project = team_project(settings.folder)
    if project is None:
        return
    try:
        home = str(project.dagster_home)
    except SettingsError as error:
        yield Finding(Kind.INSTANCE, HOME_VARIABLE, str(error), error.hint, Actor.NOBODY)
        return
    try:
        with DagsterInstance.from_config(home) as instance:
            yield from _missing_settings(instance, settings)
            yield from _unknown_runs(instance, settings, ledger)
    except (DagsterError, SQLAlchemyError, OSError) as error:
        failed = SettingsError(f"it cannot be opened: {first_line(error)}", hint=f"check {home}")
        yield not_checked(f"the instance in {home}", failed)


def _missing_settings(instance: DagsterInstance, settings: Settings) -> Iterator[Finding]:
    def advice(name: str, problem: str, remedy: str) -> Finding:
        return Finding(Kind.INSTANCE, name, problem, remedy, Actor.NOBODY)

    if not instance.run_monitoring_enabled:
        yield advice(
            "run_monitoring",
            "it is off, so a run that does not start or end in time stays as it is",
            "set `run_monitoring: {enabled: true}` in dagster.yaml",
        )
    if not instance.run_retries_enabled:
        yield advice(
            "run_retries",
            "they are off, so a run that crashed waits for the sensor or for you",
            "set `run_retries: {enabled: true, max_retries: 3}` in dagster.yaml",
        )
    pools = (S3_POOL, UPLOAD_POOL) if settings.store.kind == "jackal" else (S3_POOL,)
    for pool in pools:
        if instance.event_log_storage.get_concurrency_info(pool).limit is None:
            yield advice(
                pool,
                "the pool has no limit, so any number of its steps run at a time",
                f"run `dagster instance concurrency set {pool} 4`",
            )


def _unknown_runs(
    instance: DagsterInstance, settings: Settings, ledger: Ledger
) -> Iterator[Finding]:
    if ends_dead_runs(instance):
        return
    holders = {lease.holder.run for lease in ledger.leases.list() if lease.live}
    begun = RunsFilter(
        tags={SOURCE_TAG: list(settings.sources)},
        statuses=[DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING],
    )
    for run in instance.get_runs(begun):
        if run.run_id not in holders and process_lives(run) is None:
            yield Finding(
                Kind.RUN,
                run.run_id,
                f"it is {run.status.value}, and its process is not visible here: it is on another "
                "machine, or the machine was restarted",
                "if it is dead, terminate it in Dagster's UI, with forced termination",
                Actor.NOBODY,
            )
