"""Sensors: what happens by itself. One looks for new objects and plans them, one launches chunks that have work to do.

Neither sets a `run_key`, which would deduplicate for ever: whether there is work is asked of the bucket and the ledger each
time. The cursor is one key.
"""

import json
from collections.abc import Callable, Sequence
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

from caf_pipeline.chunk_state import ChunkState, has_reached
from caf_pipeline.context import Workplace
from caf_pipeline.defs.dagster_private import UnresolvedAssetJobDefinition
from caf_pipeline.defs.failures import HITS_EVERY_CHUNK
from caf_pipeline.defs.launching import UNFINISHED, audit_is_due, choose_chunks
from caf_pipeline.defs.naming import PARKED_TAG, identifier, job_name, op_name, s3_key
from caf_pipeline.defs.partitions import register_chunks
from caf_pipeline.defs.resources import EVERY_STEP, open_work
from caf_pipeline.errors import CafError, ChunkTooLarge, HeldByOther, PlanTooSmall
from caf_pipeline.settings import SourceSettings
from caf_pipeline.steps import chunk_steps, planning

LAUNCH_SECONDS: Final = 30
"""Between two looks at the ledger, as often as Dagster's daemon asks a sensor by default; a look is a few queries."""

Tick = SensorResult | SkipReason


def source_sensors(source: str, settings: SourceSettings, jobs: Sequence[UnresolvedAssetJobDefinition]) -> list[SensorDefinition]:
    """Return the sensors of one source, whose jobs are `jobs`."""
    return [_new_objects(source, settings), _launch_chunks(source, jobs)]


def _told(look: Callable[[], Tick]) -> Tick:
    """Return the tick; a transient error is a tick that found nothing out, a permanent one fails it with one sentence."""
    try:
        return look()
    except CafError as error:
        if error.permanent and not isinstance(error, HeldByOther):
            raise
        return SkipReason(f"{error} {error.hint}".rstrip())


def _new_objects(source: str, settings: SourceSettings) -> SensorDefinition:
    watched = settings.watch_interval_seconds > 0

    @sensor(
        name=f"new_objects_{identifier(source)}",
        job_name=job_name(source, "plan"),
        minimum_interval_seconds=settings.watch_interval_seconds or None,
        required_resource_keys=EVERY_STEP | {s3_key(source)},
        default_status=DefaultSensorStatus.RUNNING if watched else DefaultSensorStatus.STOPPED,
        description=(
            f"Lists at most {settings.watch_pages:,} pages of 1,000 keys at a time, going round the bucket, and plans the part "
            "of it that has objects which no chunk has."
        ),
    )
    def new_objects(context: SensorEvaluationContext) -> Tick:
        busy = context.instance.get_runs(RunsFilter(job_name=job_name(source, "plan"), statuses=UNFINISHED), limit=1)
        if busy:
            return SkipReason(f"Run {busy[0].run_id} is planning this source already.")

        def look() -> Tick:
            if paused := _paused(context):
                return SkipReason(paused)
            after = unquote_to_bytes(json.loads(context.cursor)["after"]) if context.cursor else b""
            seen = planning.look_for_new(open_work(context, source), after=after, max_pages=settings.watch_pages)
            cursor = json.dumps({"after": quote_from_bytes(seen.next_after or b"")})  # None: again from the start
            if not seen.new_objects:
                return SensorResult(skip_reason=f"Nothing new after '{quote_from_bytes(after)}'.", cursor=cursor)
            return SensorResult([RunRequest(run_config=_window(source, after, seen.next_after, settings))], cursor=cursor)

        return _told(look)

    return new_objects


def _window(source: str, after: bytes, until: bytes | None, settings: SourceSettings) -> dict[str, object]:
    window: dict[str, object] = {"after": quote_from_bytes(after)}
    if until is not None:
        window["until"] = quote_from_bytes(until)
    if settings.inventory:  # a window of the whole bucket would be taken for no window, and a report is older than what was seen
        window["list_bucket"] = True
    return {"ops": {op_name(source, "s3_inventory"): {"config": window}}}


def _paused(context: SensorEvaluationContext) -> str:
    """Return the reason for which a tick is skipped while an operator has paused everything; "" otherwise."""
    reason = context.resources.ledger.get().controls().orders().paused
    return f"Paused: {reason}. `caf jackal resume` ends it." if reason else ""


def _launch_chunks(source: str, jobs: Sequence[UnresolvedAssetJobDefinition]) -> SensorDefinition:
    @sensor(
        name=f"launch_chunks_{identifier(source)}",
        jobs=[job for job in jobs if job.name in (job_name(source, "archive"), job_name(source, "audit"))],
        minimum_interval_seconds=LAUNCH_SECONDS,
        required_resource_keys=EVERY_STEP,
        default_status=DefaultSensorStatus.RUNNING,
        description=(
            "Launches chunks that the ledger says have work to do, a few at a time, with growing pauses after failures. A chunk "
            "that failed too often is parked, which is an operator's turn. When no chunk has work left, it asks whether the "
            "source is complete."
        ),
    )
    def launch_chunks(context: SensorEvaluationContext) -> Tick:
        def look() -> Tick:
            if paused := _paused(context):
                return SkipReason(paused)
            work = open_work(context, source)
            register_chunks(context.instance, work.ledger, source)
            choice = choose_chunks(context.instance, work.ledger, source, work.settings.runs)
            for chunk, last in choice.give_up:
                _park(context, work, chunk, last.dagster_run.run_id)
            launch, refusal = _admitted(work, choice.launch)
            if not launch and not choice.waits and audit_is_due(context.instance, work.ledger, source):
                return SensorResult([RunRequest(job_name=job_name(source, "audit"))])
            if not launch:
                return SkipReason(
                    refusal
                    or f"{choice.active} under way, {choice.waiting} waiting, {len(choice.give_up)} parked now, none to launch."
                )
            return SensorResult([RunRequest(job_name=job_name(source, "archive"), partition_key=chunk) for chunk in launch])

        return _told(look)

    return launch_chunks


def _admitted(work: Workplace, names: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return those that may be launched, and why others may not.

    What the store would refuse of any chunk is asked here: else every chunk of the source would be launched, fail and be
    parked, one after the other, because a wallet was empty.
    """
    chunks = [work.ledger.chunk(name) for name in names]
    unposted = [chunk for chunk in chunks if not has_reached(chunk.state, ChunkState.POSTED)]
    if not unposted:
        return names, ""
    largest = max(chunk.stored_size_bytes or chunk.expected_size_bytes for chunk in unposted)
    try:
        work.store.admit(public=work.source_settings.public, stored_size_bytes=largest, waiting_bytes=0)
    except ChunkTooLarge:
        return names, ""  # the run itself withdraws it
    except (*HITS_EVERY_CHUNK, PlanTooSmall) as error:
        return [chunk.name for chunk in chunks if chunk not in unposted], f"{error}. {error.hint}".rstrip(". ") + "."
    return names, ""


def _park(context: SensorEvaluationContext, work: Workplace, chunk: str, run_id: str) -> None:
    chunk_steps.park(work, chunk, f"its runs failed too often, the last one was {run_id}")
    # Failures before this one count no more once an operator has sent the chunk on its way again.
    context.instance.add_run_tags(run_id, {PARKED_TAG: run_id})
