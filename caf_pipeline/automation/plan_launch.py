"""The run of a plan launches its chunks, and does not wait for a tick of the sensor."""

from dagster import (
    AssetExecutionContext,
    DagsterError,
    DagsterRunStatus,
    DefaultSensorStatus,
    QueuedRunCoordinator,
    RunRequest,
    RunsFilter,
)

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.automation.launch_tick import LaunchTick
from caf_pipeline.automation.tick import TICK_SECONDS
from caf_pipeline.dagster_private import InstigatorStatus, JobPythonOrigin, RemoteJobOrigin
from caf_pipeline.errors import CafError, first_line
from caf_pipeline.naming import COMMAND_TAG, LAUNCH_SENSOR, PARTITION_TAG, RUN_KEY_TAG, SENSOR_TAG
from caf_pipeline.settings import Settings
from caf_pipeline.system.deadline import Deadline, Overdue


def launch_planned(
    context: AssetExecutionContext, settings: Settings, source: str, keys: AssetKeys
) -> list[str]:
    """Queue runs of a source's chunks as the launching sensor would, and return the chunks.

    Does nothing if the sensor is off, if the run has no code location, or if no queue starts runs.
    `caf run` archives what it plans itself. After an error, the sensor launches the chunks.
    """
    from sqlalchemy.exc import SQLAlchemyError

    if context.run.tags.get(COMMAND_TAG):
        return []
    queued: list[str] = []
    try:
        if not _may_queue(context):
            return []
        tick = LaunchTick(context, settings, Deadline(TICK_SECONDS), keys)
        for request in tick.requests_of(source):
            if queue_run_of_sensor(context, request):
                queued.append(str(request.partition_key))
        for note in tick.notes:
            context.log.warning(note)
    except (CafError, Overdue, DagsterError, SQLAlchemyError) as error:
        context.log.warning(
            f"Launching ended: {first_line(error)}. The sensor {LAUNCH_SENSOR} launches the rest."
        )
    if queued:
        context.log.info(f"Launched {', '.join(queued)}.")
    return queued


def _may_queue(context: AssetExecutionContext) -> bool:
    """Return whether the sensor of the run's code location is on, and queued runs are started."""
    origin = context.run.remote_job_origin
    if origin is None or not isinstance(context.instance.run_coordinator, QueuedRunCoordinator):
        return False
    repository = context.repository_def
    if not repository.has_sensor_def(LAUNCH_SENSOR):
        return False
    states = context.instance.all_instigator_state(
        repository_selector_id=origin.repository_origin.get_selector_id()
    )
    status = next(
        (state.status for state in states if state.instigator_name == LAUNCH_SENSOR), None
    )
    # Someone may have switched it in the UI.
    if status in (InstigatorStatus.RUNNING, InstigatorStatus.STOPPED):
        return status is InstigatorStatus.RUNNING
    return repository.get_sensor_def(LAUNCH_SENSOR).default_status is DefaultSensorStatus.RUNNING


def queue_run_of_sensor(context: AssetExecutionContext, request: RunRequest) -> bool:
    """Queue a run in the run's code location; False if the sensor has already created it.

    Dagster's daemon recognises the run by its tags if the sensor requests it, too.
    """
    assert request.job_name is not None
    assert request.partition_key is not None
    instance, origin, code = (
        context.instance,
        context.run.remote_job_origin,
        context.run.job_code_origin,
    )
    assert origin is not None
    job = context.repository_def.get_job(request.job_name)
    tags = {
        **job.run_tags,
        **request.tags,
        PARTITION_TAG: request.partition_key,
        SENSOR_TAG: LAUNCH_SENSOR,
    }
    if request.run_key:
        tags[RUN_KEY_TAG] = request.run_key
        if instance.get_runs(RunsFilter(tags={RUN_KEY_TAG: request.run_key}), limit=1):
            return False
    instance.create_run_for_job(
        job,
        status=DagsterRunStatus.QUEUED,  # a killed process leaves no run that is never submitted
        tags=tags,
        remote_job_origin=RemoteJobOrigin(origin.repository_origin, request.job_name),
        job_code_origin=code and JobPythonOrigin(request.job_name, code.repository_origin),
    )
    return True
