"""Sensors: plan new objects, launch chunks, end dead runs, send alerts.

A `run_key` deduplicates for ever, so a chunk's key changes with its latest run. A lost cursor loses
nothing. Requests have a deadline, because Dagster's daemon ends a tick after 60 s without reporting
what it waited for.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from dagster import (
    DefaultSensorStatus,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    sensor,
)

from caf_pipeline.asset_keys import AssetKeys
from caf_pipeline.automation.alerting import AlertTick
from caf_pipeline.automation.dead_runs import (
    ends_dead_runs,
    free_slots_of_ended_runs,
    reap_dead_runs,
)
from caf_pipeline.automation.launch_tick import LaunchTick
from caf_pipeline.automation.new_objects_tick import PART_PAGES, NewObjectsTick, pages_of_events
from caf_pipeline.automation.tick import TICK_SECONDS, TickResult
from caf_pipeline.defs.evaluations import due_observations, observe, report_conditions
from caf_pipeline.defs.failed_partitions import failed_partitions, report_located
from caf_pipeline.defs.resources import EVERY_STEP
from caf_pipeline.errors import CafError, HeldByOther, LedgerError, with_hint
from caf_pipeline.naming import (
    ALERT_SENSOR,
    DEAD_RUNS_SENSOR,
    LAUNCH_SENSOR,
    LEDGER,
    STORE,
    job_name,
    new_objects_name,
    s3_key,
)
from caf_pipeline.settings import Settings, SourceSettings
from caf_pipeline.system.deadline import Deadline, Overdue
from caf_pipeline.system.quantities import counted

LAUNCH_SECONDS: Final = 30
"""Dagster's own default. A tick takes a few queries."""

NEW_OBJECTS_SECONDS: Final = 30
"""Maximum; a tick lists a few of a bucket's many pages."""

ALERT_SECONDS: Final = 300
"""Each tick reads the rows of all chunks, and problems last for hours."""

DEAD_RUNS_SECONDS: Final = 60
"""A tick reads the unfinished runs of the whole instance."""


def _result(decide: Callable[[], TickResult], afterwards: str) -> TickResult:
    # A transient error skips the tick; a permanent error fails it. `afterwards` explains what
    # happens next if a server did not answer in time.
    try:
        return decide()
    except Overdue as overdue:
        return SkipReason(f"{overdue}. {afterwards}")
    except CafError as error:
        if error.permanent and not isinstance(error, HeldByOther):
            raise
        return SkipReason(with_hint(error))


def new_objects_sensor(
    settings: Settings, source: str, tick_seconds: float = TICK_SECONDS
) -> SensorDefinition:
    """Return the sensor that plans a source's new objects."""
    source_settings = settings.sources[source]
    interval = source_settings.watch_interval_seconds
    automatic = source_settings.automatic and interval > 0

    @sensor(
        name=new_objects_name(source),
        job_name=job_name(source, "plan"),
        minimum_interval_seconds=min(interval, NEW_OBJECTS_SECONDS) or None,
        required_resource_keys=EVERY_STEP | {s3_key(source)},
        default_status=DefaultSensorStatus.RUNNING if automatic else DefaultSensorStatus.STOPPED,
        description=_new_objects_description(source_settings),
    )
    def new_objects(context: SensorEvaluationContext) -> TickResult:
        tick = NewObjectsTick(context, settings, source, Deadline(tick_seconds))
        return _result(tick.result, "Nothing was planned; the next tick begins at the same key.")

    return new_objects


def _new_objects_description(settings: SourceSettings) -> str:
    reports = ""
    if settings.inventory:
        reports = (
            f"First checks for a complete inventory report in {settings.inventory} that is newer "
            "than the last planned one, and plans it. Otherwise looks for objects written since. "
        )
    limit = f"at most once every {counted(settings.watch_interval_seconds, 'second')}"
    if settings.queue:
        pages = counted(pages_of_events(settings), "page")
        return reports + (
            f"Takes event notifications from the queue {settings.queue} and records their keys in "
            f"the ledger. Lists up to {pages} of 1,000 keys around the first recorded key, and "
            f"plans that part of the bucket if it has objects that no chunk has, {limit}. A "
            "message is deleted once the ledger has its keys."
        )
    return reports + (
        f"Lists {counted(settings.watch_pages, 'page')} of 1,000 keys per tick, in a cycle through "
        "the bucket. Plans a part of the bucket if it has objects that no chunk has, "
        f"{limit}. Up to {PART_PAGES} pages that hold only new objects are planned together."
    )


def launching_sensor(
    settings: Settings, jobs: Iterable[Any], keys: AssetKeys, tick_seconds: float = TICK_SECONDS
) -> SensorDefinition:
    """Return the sensor that launches chunks."""
    launched = {
        job_name(source, what) for source in settings.sources for what in ("archive", "audit")
    }
    automatic = any(source.automatic for source in settings.sources.values())

    @sensor(
        name=LAUNCH_SENSOR,
        jobs=[job for job in jobs if job.name in launched],
        minimum_interval_seconds=LAUNCH_SECONDS,
        required_resource_keys=EVERY_STEP,
        default_status=DefaultSensorStatus.RUNNING if automatic else DefaultSensorStatus.STOPPED,
        description=(
            "Launches chunks that have work to do, of every source, a few at a time. After a "
            "failure it waits, longer each time. A chunk that failed too often is parked until an "
            "operator acts. When no chunk of a source has work left, the sensor checks whether the "
            "source is complete. It is on by default if any source has 'automatic = true', and "
            "then serves only automatic sources. If no source is automatic, you can switch it on "
            "here for all sources. You may switch it off: then chunks are archived only by "
            "backfills and by 'caf run'."
        ),
    )
    def launch_chunks(context: SensorEvaluationContext) -> TickResult:
        tick = LaunchTick(context, settings, Deadline(tick_seconds), keys)
        return _result(
            partial(tick.result, context.cursor),
            "Nothing was launched; the next tick tries again, and runs under way go on.",
        )

    return launch_chunks


def alert_sensor(
    settings: Settings, keys: AssetKeys, tick_seconds: float = TICK_SECONDS
) -> SensorDefinition:
    """Return the sensor that alerts and records progress."""

    @sensor(
        name=ALERT_SENSOR,
        minimum_interval_seconds=ALERT_SECONDS,
        required_resource_keys={LEDGER, STORE},
        default_status=DefaultSensorStatus.RUNNING,
        description=(
            "Reports problems that need an operator: parked chunks, stalled or late sources, many "
            "skipped objects. Each problem fails a check of the source's plan, and is sent to the "
            "webhook and the mail addresses in [alerts]. If no recipient can be reached, the tick "
            "fails and the next tick sends the alert again. Every hour, the sensor also records "
            "the progress of each source, if it changed; see the plots of its s3_inventory. A "
            "located chunk that a later, failed run shows as failed is materialized again."
        ),
    )
    def watch_sources(context: SensorEvaluationContext) -> SensorResult:
        tick = AlertTick(context, settings, keys=keys, tick_seconds=tick_seconds)
        due = due_observations(context.instance, settings.sources, keys)
        failed = {
            source: failed_partitions(context.instance, source, keys) for source in settings.sources
        }
        try:
            state = tick.read_ledger(list(due), failed)
        except (Overdue, LedgerError) as error:
            return tick.result_without_ledger(error)
        report_conditions(context.instance, state.conditions, keys)
        for chunk, recipients in state.located:
            report_located(context.instance, chunk, recipients, failed[chunk.source][chunk.name])
        for progress in state.progress:
            if progress.source in due:
                last = due[progress.source]
                observe(context.instance, progress, state.copies, last, keys)
        return tick.result(state)

    return watch_sources


def dead_runs_sensor() -> SensorDefinition:
    """Return the sensor that ends dead runs, in an instance that does not."""

    @sensor(
        name=DEAD_RUNS_SENSOR,
        minimum_interval_seconds=DEAD_RUNS_SECONDS,
        default_status=DefaultSensorStatus.RUNNING,
        description=(
            "Marks archive runs as failed if their process on this machine was killed, and frees "
            "their pool slots. Runs of other code are not touched, nor are those of other "
            "machines. Skips if Dagster's run monitoring checks the processes of runs, and may "
            "then be switched off."
        ),
    )
    def end_dead_runs(context: SensorEvaluationContext) -> SkipReason:
        if ends_dead_runs(context.instance):
            return SkipReason("Dagster's run monitoring ends dead runs.")
        ended = reap_dead_runs(context.instance)
        for run in ended:
            context.log.warning(f"Run {run} was killed.")
        free_slots_of_ended_runs(context.instance)
        return SkipReason(f"{counted(len(ended), 'dead run')} ended.")

    return end_dead_runs
