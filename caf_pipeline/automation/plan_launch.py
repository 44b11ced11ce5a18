"""The run of a plan launches its chunks, and does not wait for a tick of the sensor."""

from dagster import AssetExecutionContext, DagsterError

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.automation import instance_calls
from caf_pipeline.automation.launch_tick import LaunchTick
from caf_pipeline.automation.tick import TICK_SECONDS
from caf_pipeline.errors import CafError, first_line
from caf_pipeline.naming import COMMAND_TAG, LAUNCH_SENSOR
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
    try:
        if not instance_calls.may_queue_like(context, LAUNCH_SENSOR):
            return []
        tick = LaunchTick(context, settings, Deadline(TICK_SECONDS), keys)
        queued = [
            str(request.partition_key)
            for request in tick.requests_of(source)
            if instance_calls.queue_run_of_sensor(context, LAUNCH_SENSOR, request)
        ]
        for note in tick.notes:
            context.log.warning(note)
    except (CafError, Overdue, DagsterError, SQLAlchemyError) as error:
        context.log.warning(
            f"No chunk was launched: {first_line(error)}. The sensor {LAUNCH_SENSOR} launches them."
        )
        return []
    if queued:
        context.log.info(f"Launched {', '.join(queued)}.")
    return queued
