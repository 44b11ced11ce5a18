"""Calls methods of an instance that Dagster does not mark as public.

A method that another version of Dagster lacks has no result; if it ends a run or frees slots, the
call raises a SettingsError.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dagster import (
    AssetCheckKey,
    AssetExecutionContext,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultSensorStatus,
    QueuedRunCoordinator,
    RunRequest,
    RunsFilter,
)

from caf_pipeline.errors import SettingsError
from caf_pipeline.naming import PARTITION_TAG, RUN_KEY_TAG, SENSOR_TAG


def get_runs(
    instance: DagsterInstance, filters: RunsFilter, limit: int | None = None
) -> Sequence[DagsterRun]:
    """Return matching runs, latest first."""
    return [record.dagster_run for record in instance.get_run_records(filters, limit=limit)]


def count_runs(instance: DagsterInstance, filters: RunsFilter) -> int:
    """Count matching runs."""
    if count := _method(instance, "get_runs_count"):
        return int(count(filters))
    return len(instance.get_run_records(filters))


def get_backfills(instance: DagsterInstance, **options: Any) -> Sequence[Any]:  # noqa: ANN401
    """Return backfills, latest first."""
    method = _method(instance, "get_backfills")
    return method(**options) if method else ()


def add_run_tags(instance: DagsterInstance, run_id: str, tags: Mapping[str, str]) -> None:
    """Tag a run."""
    if method := _method(instance, "add_run_tags"):
        method(run_id, tags)


def report_run_failed(instance: DagsterInstance, run: DagsterRun, message: str) -> None:
    """End a run as failed."""
    _required(instance, "report_run_failed")(run, message=message)


def report_run_canceled(instance: DagsterInstance, run: DagsterRun, message: str) -> None:
    """End a run as canceled."""
    _required(instance, "report_run_canceled")(run, message=message)


def report_run_canceling(instance: DagsterInstance, run: DagsterRun) -> None:
    """Mark a run as interrupted."""
    if method := _method(instance, "report_run_canceling"):
        method(run)


def free_pool_slots(instance: DagsterInstance, run_id: str) -> None:
    """Free a run's pool slots."""
    _required(_event_log(instance), "free_concurrency_slots_for_run")(run_id)


def runs_with_slots(instance: DagsterInstance, pools: Collection[str]) -> set[str]:
    """Return the ids of runs that hold a slot of these pools, or wait for one."""
    method = _method(_event_log(instance), "get_concurrency_info")
    infos = [method(pool) for pool in pools] if method else []
    return {slot.run_id for info in infos for slot in (*info.claimed_slots, *info.pending_steps)}


def latest_checks(
    instance: DagsterInstance, keys: Sequence[AssetCheckKey]
) -> Mapping[AssetCheckKey, Any]:
    """Return each check's latest execution."""
    method = _method(_event_log(instance), "get_latest_asset_check_execution_by_key")
    return method(keys) if method else {}


def check_history(
    instance: DagsterInstance,
    key: AssetCheckKey,
    **options: Any,  # noqa: ANN401
) -> Sequence[Any]:
    """Return a check's executions, latest first."""
    method = _method(_event_log(instance), "get_asset_check_execution_history")
    return method(key, **options) if method else ()


def run_launcher_class(instance: DagsterInstance) -> str:
    """Return the name of the launcher's class."""
    method = _method(instance, "get_ref")
    launcher = method().run_launcher_data if method else None
    return launcher.class_name if launcher else ""


def ends_dead_runs(instance: DagsterInstance) -> bool:
    """Return whether run monitoring is on, with a launcher that knows whether a run is alive."""
    launcher = _method(instance, "run_launcher")
    return bool(
        _method(instance, "run_monitoring_enabled")
        and _method(launcher, "supports_check_run_worker_health")
    )


def may_queue_like(context: AssetExecutionContext, sensor: str) -> bool:
    """Return whether a sensor of the run's code location is on, and queued runs are started."""
    origin = context.run.remote_job_origin
    if origin is None or not isinstance(context.instance.run_coordinator, QueuedRunCoordinator):
        return False
    repository = context.repository_def
    if not repository.has_sensor_def(sensor):
        return False
    states = context.instance.all_instigator_state(
        repository_selector_id=origin.repository_origin.get_selector_id()
    )
    status = next((state.status.value for state in states if state.instigator_name == sensor), "")
    if status in ("RUNNING", "STOPPED"):  # someone switched it in the UI
        return status == "RUNNING"
    return repository.get_sensor_def(sensor).default_status is DefaultSensorStatus.RUNNING


def queue_run_of_sensor(context: AssetExecutionContext, sensor: str, request: RunRequest) -> bool:
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
    tags = {**request.tags, PARTITION_TAG: request.partition_key, SENSOR_TAG: sensor}
    if request.run_key:
        tags[RUN_KEY_TAG] = request.run_key
        if get_runs(instance, RunsFilter(tags={RUN_KEY_TAG: request.run_key}), limit=1):
            return False
    instance.create_run_for_job(
        context.repository_def.get_job(request.job_name),
        status=DagsterRunStatus.QUEUED,  # a killed process leaves no run that is never submitted
        tags=tags,
        remote_job_origin=type(origin)(origin.repository_origin, request.job_name),
        job_code_origin=code and type(code)(request.job_name, code.repository_origin),
    )
    return True


def _event_log(instance: DagsterInstance) -> Any:  # noqa: ANN401
    return getattr(instance, "event_log_storage", None)


def _method(owner: Any, name: str) -> Any:  # noqa: ANN401 - of types that Dagster does not export
    return getattr(owner, name, None)


def _required(owner: Any, name: str) -> Any:  # noqa: ANN401
    method = _method(owner, name)
    if method is None:
        raise SettingsError(
            f"this version of Dagster has no {type(owner).__name__}.{name}, which ends runs and "
            "frees their pool slots",
            hint="install a version of Dagster that caf-pipeline supports, and end the run in the "
            "UI until then",
        )
    return method
