"""Sensors: what happens by itself.

One looks for new objects and plans them, one launches chunks, one tells what is wrong.

The first two are off unless a source's settings say `automatic = true`, or an operator switches
them on in the UI. Neither sets a `run_key`, which would deduplicate for ever: whether there is work
is asked of the bucket and the ledger each time. Their cursors are small, and to lose one loses
nothing: the look begins again from the start. Servers are asked within a deadline: Dagster's daemon
ends a tick after 60 s, without a word of what it waited for.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from dagster import (
    DefaultSensorStatus,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    sensor,
)

from caf_pipeline.automation.alerting import AlertTick
from caf_pipeline.automation.launch_tick import LaunchTick
from caf_pipeline.automation.new_objects_tick import PART_PAGES, NewObjectsTick, pages_of_events
from caf_pipeline.automation.tick import TickResult
from caf_pipeline.defs.evaluations import due_observations, observe, report_conditions
from caf_pipeline.defs.naming import (
    ALERT_SENSOR,
    LAUNCH_SENSOR,
    LEDGER,
    STORE,
    job_name,
    new_objects_name,
    s3_key,
)
from caf_pipeline.defs.resources import EVERY_STEP
from caf_pipeline.errors import CafError, HeldByOther, LedgerError, with_hint
from caf_pipeline.settings import Settings, SourceSettings
from caf_pipeline.system.deadline import Deadline, Overdue
from caf_pipeline.system.quantities import counted

LAUNCH_SECONDS: Final = 30
"""Between two looks at the ledger, as often as Dagster's daemon asks a sensor by default; a look is
a few queries.
"""

LOOK_SECONDS: Final = 30
"""Between two looks for new objects at most, likewise: each lists a page, and a bucket of many is
to be gone round soon.
"""

ALERT_SECONDS: Final = 300
"""Between two looks. Each reads the rows of all chunks; what it tells of lasts for hours."""

TICK_SECONDS: Final = 15.0
"""For all that a tick asks of servers: chain, providers, S3, ledger.

With what it asks of Dagster it takes less than 20 s.
"""


def _result(decide: Callable[[], TickResult], afterwards: str) -> TickResult:
    """Return the tick; a transient error is a tick that found nothing out, a permanent one fails it
    with one sentence.

    `afterwards` says what happens next where a server did not answer in time.
    """
    try:
        return decide()
    except Overdue as overdue:
        return SkipReason(f"{overdue}. {afterwards}")
    except CafError as error:
        if error.permanent and not isinstance(error, HeldByOther):
            raise
        return SkipReason(with_hint(error))


# --- new objects
# ------------------------------------------------------------------------------------------


def new_objects_sensor(
    settings: Settings, source: str, tick_seconds: float = TICK_SECONDS
) -> SensorDefinition:
    """Return the sensor that looks for new objects of one source."""
    its = settings.sources[source]
    watched = its.watch_interval_seconds > 0

    @sensor(
        name=new_objects_name(source),
        job_name=job_name(source, "plan"),
        minimum_interval_seconds=min(its.watch_interval_seconds, LOOK_SECONDS) or None,
        required_resource_keys=EVERY_STEP | {s3_key(source)},
        default_status=DefaultSensorStatus.RUNNING
        if watched and its.automatic
        else DefaultSensorStatus.STOPPED,
        description=_described(its),
    )
    def new_objects(context: SensorEvaluationContext) -> TickResult:
        tick = NewObjectsTick(context, settings, source, Deadline(tick_seconds))
        return _result(
            tick.result, "Nothing is planned by this look; the next one begins at the same key."
        )

    return new_objects


def _described(its: SourceSettings) -> str:
    reports = (
        f"Asks first whether there is a complete inventory report in {its.inventory} that is newer "
        "than what is planned, and "
        "plans it. Where there is none, it looks for what was written since. "
        if its.inventory
        else ""
    )
    often = f"at most every {counted(its.watch_interval_seconds, 'second')}"
    if its.queue:
        return reports + (
            f"Takes event notifications from the queue {its.queue} and keeps the keys that they "
            "name in the ledger, then lists "
            f"the part of the bucket that has the first of them, {_pages(pages_of_events(its))} at "
            "most, and plans it "
            f"where it has objects which no chunk has, {often}. A message is deleted once the "
            "ledger has its keys."
        )
    return reports + (
        f"Lists {_pages(its.watch_pages)} at a time, going round the bucket, and plans the part of "
        "it that has objects which no "
        f"chunk has, {often}. Pages with nothing else are planned together, up to {PART_PAGES}."
    )


def _pages(count: int) -> str:
    return f"{counted(count, 'page')} of 1,000 keys"


# --- chunks
# ------------------------------------------------------------------------------------------


def launching_sensor(
    settings: Settings, jobs: Iterable[Any], tick_seconds: float = TICK_SECONDS
) -> SensorDefinition:
    """Return the sensor that launches chunks of all sources, whose jobs are `jobs`."""
    wanted = {
        job_name(source, what) for source in settings.sources for what in ("archive", "audit")
    }
    automatic = any(source.automatic for source in settings.sources.values())

    @sensor(
        name=LAUNCH_SENSOR,
        jobs=[job for job in jobs if job.name in wanted],
        minimum_interval_seconds=LAUNCH_SECONDS,
        required_resource_keys=EVERY_STEP,
        default_status=DefaultSensorStatus.RUNNING if automatic else DefaultSensorStatus.STOPPED,
        description=(
            "Launches chunks that the ledger says have work to do, of every source, a few at a "
            "time, with growing pauses after "
            "failures. A chunk that failed too often is parked, which is an operator's turn. When "
            "no chunk of a source has work "
            "left, it asks whether the source is complete. It is on if the settings of any source "
            "say `automatic = true`, and "
            "then launches chunks of those sources only. If no source is automatic, you may switch "
            "it on here, for all sources."
        ),
    )
    def launch_chunks(context: SensorEvaluationContext) -> TickResult:
        tick = LaunchTick(context, settings, Deadline(tick_seconds))
        return _result(
            tick.result,
            "Nothing is launched by this look; the next one asks again, and runs under way go on.",
        )

    return launch_chunks


# --- alerts
# ------------------------------------------------------------------------------------------


def alert_sensor(settings: Settings, tick_seconds: float = TICK_SECONDS) -> SensorDefinition:
    """Return the sensor that tells an operator what is wrong with any source, and observes how far
    it is.
    """

    @sensor(
        name=ALERT_SENSOR,
        minimum_interval_seconds=ALERT_SECONDS,
        required_resource_keys={LEDGER, STORE},
        default_status=DefaultSensorStatus.RUNNING,
        description=(
            "Looks in the ledger for what an operator is to know: parked chunks, sources that "
            "stand still or are late, many "
            "skipped objects. It reports each as a check of the source's plan, and sends it to the "
            "webhook and the addresses in "
            "[alerts]. Hourly, where a number has changed, it observes how far a source is: see "
            "the plots on the page of its "
            "`s3_inventory`. A tick fails where none of them could be notified; the next one sends "
            "it again."
        ),
    )
    def watch_sources(context: SensorEvaluationContext) -> SensorResult:
        tick = AlertTick(context, settings, tick_seconds)
        due = due_observations(context.instance, settings.sources)
        try:
            seen = tick.look(list(due))
        except (Overdue, LedgerError) as error:
            return tick.result_without_ledger(error)
        report_conditions(context.instance, seen.conditions)
        for progress in seen.progress:
            if progress.source in due:
                observe(context.instance, progress, seen.copies, due[progress.source])
        return tick.result(seen)

    return watch_sources
