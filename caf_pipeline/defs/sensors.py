"""Sensors: what happens by itself. One looks for new objects and plans them, one launches chunks that have work to do.

Neither sets a `run_key`, which would deduplicate for ever: whether there is work is asked of the bucket and the ledger each
time. Their cursors are small, and to lose one loses nothing: the look begins again from the start. Servers are asked within a
deadline: Dagster's daemon ends a tick after 60 s, without a word of what it waited for.
"""

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

from dagster import (
    DefaultSensorStatus,
    RunRequest,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    sensor,
)

from caf_pipeline.defs.dagster_private import UnresolvedAssetJobDefinition
from caf_pipeline.defs.launch_look import ENOUGH, LaunchLook, Tick, pause_reason
from caf_pipeline.defs.launching import UNFINISHED
from caf_pipeline.defs.naming import LAUNCH_SENSOR, identifier, job_name, op_name, s3_key
from caf_pipeline.defs.resources import EVERY_STEP, ask_in_time, open_work
from caf_pipeline.errors import CafError, HeldByOther
from caf_pipeline.ledger.database import describe_database
from caf_pipeline.settings import Settings, SourceSettings
from caf_pipeline.steps import planning
from caf_pipeline.system.deadline import Deadline, Overdue

LAUNCH_SECONDS: Final = 30
"""Between two looks at the ledger, as often as Dagster's daemon asks a sensor by default; a look is a few queries."""

TICK_SECONDS: Final = 15.0
"""For all that a tick asks of servers: chain, providers, S3, ledger. With what it asks of Dagster it takes less than 20 s."""


def _told(look: Callable[[], Tick], afterwards: str) -> Tick:
    """Return the tick; a transient error is a tick that found nothing out, a permanent one fails it with one sentence.

    `afterwards` says what happens next where a server did not answer in time.
    """
    try:
        return look()
    except Overdue as overdue:
        return SkipReason(f"{overdue}. {afterwards}")
    except CafError as error:
        if error.permanent and not isinstance(error, HeldByOther):
            raise
        return SkipReason(f"{error} {error.hint}".rstrip())


# --- new objects -----------------------------------------------------------------------------------------------------


def new_objects_sensor(settings: Settings, source: str, tick_seconds: float = TICK_SECONDS) -> SensorDefinition:
    """Return the sensor that looks for new objects of one source."""
    its = settings.sources[source]
    watched = its.watch_interval_seconds > 0
    afterwards = "Nothing is planned by this look; the next one begins at the same key."

    @sensor(
        name=f"new_objects_{identifier(source)}",
        job_name=job_name(source, "plan"),
        minimum_interval_seconds=its.watch_interval_seconds or None,
        required_resource_keys=EVERY_STEP | {s3_key(source)},
        default_status=DefaultSensorStatus.RUNNING if watched else DefaultSensorStatus.STOPPED,
        description=(
            f"Lists at most {its.watch_pages:,} pages of 1,000 keys at a time, going round the bucket, and plans the part "
            "of it that has objects which no chunk has."
        ),
    )
    def new_objects(context: SensorEvaluationContext) -> Tick:
        deadline = Deadline(tick_seconds)
        busy = context.instance.get_runs(RunsFilter(job_name=job_name(source, "plan"), statuses=UNFINISHED), limit=1)
        if busy:
            return SkipReason(f"Run {busy[0].run_id} is planning this source already.")

        def look() -> Tick:
            ask = partial(ask_in_time, context, deadline)
            if paused := ask(describe_database(settings), lambda: pause_reason(context.resources.ledger.get())):
                return SkipReason(paused)
            after = unquote_to_bytes(json.loads(context.cursor)["after"]) if context.cursor else b""
            seen = ask(
                f"bucket '{its.bucket}' at {its.endpoint_url or 'AWS'}, or the ledger,",
                lambda: planning.look_for_new(
                    open_work(context, source),
                    after=after,
                    max_pages=its.watch_pages,
                    enough=lambda: deadline.left() < tick_seconds * ENOUGH,
                ),
            )
            cursor = json.dumps({"after": quote_from_bytes(seen.next_after or b"")})  # None: again from the start
            if not seen.new_objects:
                return SensorResult(skip_reason=f"Nothing new after '{quote_from_bytes(after)}'.", cursor=cursor)
            return SensorResult([RunRequest(run_config=_window(source, after, seen.next_after, its))], cursor=cursor)

        return _told(look, afterwards)

    return new_objects


def _window(source: str, after: bytes, until: bytes | None, settings: SourceSettings) -> dict[str, object]:
    window: dict[str, object] = {"after": quote_from_bytes(after)}
    if until is not None:
        window["until"] = quote_from_bytes(until)
    if settings.inventory:  # a window of the whole bucket would be taken for no window, and a report is older than what was seen
        window["list_bucket"] = True
    return {"ops": {op_name(source, "s3_inventory"): {"config": window}}}


# --- chunks ----------------------------------------------------------------------------------------------------------


def launching_sensor(
    settings: Settings, jobs: Iterable[UnresolvedAssetJobDefinition], tick_seconds: float = TICK_SECONDS
) -> SensorDefinition:
    """Return the sensor that launches chunks of all sources, whose jobs are `jobs`."""
    wanted = {job_name(source, what) for source in settings.sources for what in ("archive", "audit")}

    @sensor(
        name=LAUNCH_SENSOR,
        jobs=[job for job in jobs if job.name in wanted],
        minimum_interval_seconds=LAUNCH_SECONDS,
        required_resource_keys=EVERY_STEP,
        default_status=DefaultSensorStatus.RUNNING,
        description=(
            "Launches chunks that the ledger says have work to do, of every source, a few at a time, with growing pauses after "
            "failures. A chunk that failed too often is parked, which is an operator's turn. When no chunk of a source has work "
            "left, it asks whether the source is complete. `launch = false` in a source's settings leaves it out."
        ),
    )
    def launch_chunks(context: SensorEvaluationContext) -> Tick:
        look = LaunchLook(context, settings, Deadline(tick_seconds))
        return _told(look.tick, "Nothing is launched by this look; the next one asks again, and runs under way go on.")

    return launch_chunks
