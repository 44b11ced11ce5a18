"""Calls methods of an instance that Dagster does not mark as public.

A method that another version of Dagster lacks has no effect and no result.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dagster import AssetCheckKey, DagsterInstance, DagsterRun, RunsFilter


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
    if method := _method(instance, "report_run_failed"):
        method(run, message=message)


def report_run_canceled(instance: DagsterInstance, run: DagsterRun, message: str) -> None:
    """End a run as canceled."""
    if method := _method(instance, "report_run_canceled"):
        method(run, message=message)


def report_run_canceling(instance: DagsterInstance, run: DagsterRun) -> None:
    """Mark a run as interrupted."""
    if method := _method(instance, "report_run_canceling"):
        method(run)


def free_pool_slots(instance: DagsterInstance, run_id: str) -> None:
    """Free a run's pool slots."""
    if method := _method(_event_log(instance), "free_concurrency_slots_for_run"):
        method(run_id)


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


def _event_log(instance: DagsterInstance) -> Any:  # noqa: ANN401
    return getattr(instance, "event_log_storage", None)


def _method(owner: Any, name: str) -> Any:  # noqa: ANN401 - of types that Dagster does not export
    return getattr(owner, name, None)
