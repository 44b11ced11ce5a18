"""One tick of the sensor for new objects.

It looks for an inventory report, then lists the bucket's next part, or a part that events named.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar
from urllib.parse import quote_from_bytes, unquote_to_bytes

from dagster import RunRequest, RunsFilter, SensorEvaluationContext, SensorResult, SkipReason

from caf_pipeline.automation.launch_tick import MIN_TIME_LEFT
from caf_pipeline.automation.launching import UNFINISHED, is_backing_off
from caf_pipeline.automation.tick import TickResult, ask_in_time, pause_reason
from caf_pipeline.errors import CafError, SourceError, with_hint
from caf_pipeline.naming import OUTAGE_TAG, REPORT_TAG, job_name, op_name
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import Settings, SourceSettings
from caf_pipeline.system.deadline import Deadline, Overdue
from caf_pipeline.system.quantities import counted
from caf_pipeline.wiring import open_queue

MIN_TIME_LEFT_WITH_EVENTS: Final = 0.2

QUEUE_SHARE: Final = 0.6
"""Share of the remaining time. The tick goes on if the queue does not answer by then.

Messages are taken until MIN_TIME_LEFT; the rest is for the last request.
"""

REPORT_SHARE: Final = 0.3
"""Share of the remaining time. The tick goes on if there is no report by then."""

REPORT_RUNS_READ: Final = 100

PART_PAGES: Final = 20
"""Pages that are planned together, so that 20,000 new objects become one run.

More pages would delay the first object: 20 pages take 10 minutes at one page per tick.
"""

T = TypeVar("T")


def pages_of_events(settings: SourceSettings) -> int:
    """Return how many pages a tick lists at most around an event's key."""
    return max(settings.watch_pages, PART_PAGES)


@dataclass(frozen=True)
class NewObjectsCursor:
    """The key at which the next tick begins, and the part before it that is not planned yet.

    Attributes:
        after: the part's end; the next tick lists greater keys.
        since: the part's start (exclusive).
        pages: of the part; 0: there is no part.
    """

    after: bytes = b""
    since: bytes = b""
    pages: int = 0

    @classmethod
    def read(cls, written: str | None) -> "NewObjectsCursor":
        """An invalid cursor is empty."""
        try:
            cursor = json.loads(written or "{}")
            after = unquote_to_bytes(cursor["after"])
            if "since" not in cursor:
                return cls(after, after)
            since, pages = unquote_to_bytes(cursor["since"]), cursor["pages"]
            is_valid = since < after and isinstance(pages, int) and pages > 0
            return cls(after, since, pages) if is_valid else cls()
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()

    def written(self) -> str:
        part = {"since": quote_from_bytes(self.since), "pages": self.pages} if self.pages else {}
        return json.dumps({"after": quote_from_bytes(self.after), **part})


@dataclass
class NewObjectsTick:
    """One tick for one source; `notes` are about the queue and the inventory reports."""

    context: SensorEvaluationContext
    settings: Settings
    source: str
    deadline: Deadline
    notes: list[str] = field(default_factory=list)
    queue_error: CafError | Overdue | None = None

    def result(self) -> TickResult:
        """Request a plan of new objects.

        Raises:
            Overdue: a server is late, except for that of the inventory reports. For the queue only
                if there is nothing else to plan.
            CafError: the queue cannot be read, and there is nothing else to plan.
        """
        result = self._result()
        if self.queue_error and not (isinstance(result, SensorResult) and result.run_requests):
            raise self.queue_error
        return result

    def _result(self) -> TickResult:
        from caf_pipeline.ledger.database import describe_database

        database = describe_database(self.settings)
        if paused := self._ask(
            database, lambda: pause_reason(self.context.resources.caf_ledger.get())
        ):
            return SkipReason(paused)
        if queue := self._source_settings.queue:
            try:
                self._ask(f"queue {queue}, or the ledger,", self._drain, share=QUEUE_SHARE)
            except (SourceError, Overdue) as error:
                # Go on with reports and with keys that the ledger already has.
                self.queue_error = error
                self.notes.append(f"{with_hint(error)}.")
        planning_runs = RunsFilter(job_name=job_name(self.source, "plan"), statuses=UNFINISHED)
        if busy := self.context.instance.get_runs(planning_runs, limit=1):
            return self._skip(f"Run {busy[0].run_id} is planning this source already.")
        if self._source_settings.inventory and (request := self._new_report()):
            return SensorResult([request], cursor=self.context.cursor)
        cursor = NewObjectsCursor.read(self.context.cursor)
        if not queue:
            return self._list_next_pages(cursor)
        if self._was_planned_lately():
            return self._skip(f"{self._interval_note()} keys named by events are planned.")
        return self._list_keys_of_events(cursor)

    @property
    def _source_settings(self) -> SourceSettings:
        return self.settings.sources[self.source]

    def _open(self) -> RunContext:
        run_context: RunContext = self.context.resources.caf_run.open(self.context, self.source)
        return run_context

    def _ask(self, server: str, question: Callable[[], T], *, share: float = 1) -> T:
        deadline = Deadline(round(self.deadline.left() * share, 1)) if share < 1 else self.deadline
        return ask_in_time(self.context, deadline, server, question)

    def _ask_bucket(self, question: Callable[[RunContext], T]) -> T:
        endpoint = self._source_settings.endpoint_url or "AWS"
        server = f"bucket '{self._source_settings.bucket}' at {endpoint}, or the ledger,"
        return self._ask(server, lambda: question(self._open()))

    def _is_time_short(self, share: float) -> bool:
        return self.deadline.left() < self.deadline.seconds * share

    def _skip(self, sentence: str, cursor: NewObjectsCursor | None = None) -> TickResult:
        reason = " ".join([sentence, *self.notes])
        if cursor is None:
            return SkipReason(reason)
        return SensorResult(skip_reason=reason, cursor=cursor.written())

    def _plan(self, after: bytes, until: bytes | None, cursor: NewObjectsCursor) -> TickResult:
        for note in self.notes:
            self.context.log.warning(note)
        window: dict[str, object] = {"after": quote_from_bytes(after)}
        if until is not None:
            window["until"] = quote_from_bytes(until)
        if self._source_settings.inventory:
            # Otherwise a window of the whole bucket would take a report, which is older than the
            # objects listed here.
            window["list_bucket"] = True
        config = {"ops": {op_name(self.source, "s3_inventory"): {"config": window}}}
        return SensorResult([RunRequest(run_config=config)], cursor=cursor.written())

    def _new_report(self) -> RunRequest | None:
        # Plans the newest inventory report if the ledger does not have it. If such a run failed,
        # the next one waits, longer each time. After some failures it is left to the schedule.
        from caf_pipeline.steps import inventories

        folder = self._source_settings.inventory
        server = f"the folder of inventory reports {folder}, or the ledger,"
        try:
            name = self._ask(
                server, lambda: inventories.find_new_report(self._open()), share=REPORT_SHARE
            )
        except (CafError, Overdue) as error:
            self.notes.append(f"No inventory report is taken: {with_hint(error)}.")
            return None
        if not name:
            return None
        report_runs = RunsFilter(job_name=job_name(self.source, "plan"), tags={REPORT_TAG: name})
        runs = self.context.instance.get_run_records(report_runs, limit=REPORT_RUNS_READ)
        attempts = [
            run
            for run in runs  # but for those that an outage ended, or that no worker started
            if run.start_time and run.dagster_run.tags.get(OUTAGE_TAG) != run.dagster_run.run_id
        ]
        if len(attempts) >= self.settings.runs.attempts:
            self.notes.append(
                f"Several runs failed to plan the inventory report {name}: it is left to the daily "
                "schedule."
            )
        elif is_backing_off(runs):
            self.notes.append(
                f"Run {runs[0].dagster_run.run_id} failed to plan the inventory report {name}: the "
                "next run waits."
            )
        else:
            config = {"ops": {op_name(self.source, "s3_inventory"): {"config": {"report": name}}}}
            return RunRequest(run_config=config, tags={REPORT_TAG: name})
        return None

    def _was_planned_lately(self) -> bool:
        # Objects that arrive slowly would otherwise become a small chunk at each tick.
        interval = self._source_settings.watch_interval_seconds
        latest = self.context.instance.get_run_records(
            RunsFilter(job_name=job_name(self.source, "plan")), limit=1
        )
        # Clocks of two machines may differ a little. A time far ahead was written by a wrong clock.
        return any(
            -interval < time.time() - run.create_timestamp.timestamp() < interval for run in latest
        )

    def _interval_note(self) -> str:
        interval = counted(self._source_settings.watch_interval_seconds, "second")
        return f"The latest plan began less than {interval} ago; after that"

    def _list_next_pages(self, cursor: NewObjectsCursor) -> TickResult:
        # New objects are planned at once. If all listed objects are new, or the last plan is too
        # recent, they are planned together with the following pages.
        from caf_pipeline.steps import inventories

        listing = self._ask_bucket(
            partial(
                inventories.scan_for_new,
                after=cursor.after,
                max_pages=self._source_settings.watch_pages,
                enough=partial(self._is_time_short, MIN_TIME_LEFT),
            )
        )
        pages = cursor.pages + listing.pages
        next_cursor = NewObjectsCursor(listing.next_after or b"")  # None: again from the start
        if not listing.new_objects and not cursor.pages:
            return self._skip(f"Nothing new{_after(cursor.after)}.", next_cursor)
        since = _after(cursor.since)
        too_soon = self._was_planned_lately()
        may_wait = pages < PART_PAGES and (listing.all_new or too_soon)
        if listing.next_after is not None and may_wait:
            return self._skip(
                f"New objects in {counted(pages, 'page')}{since}: they are planned with "
                "the next pages.",
                NewObjectsCursor(listing.next_after, cursor.since, pages),
            )
        if too_soon:
            return self._skip(f"{self._interval_note()} new objects{since} are planned.")
        return self._plan(cursor.since, listing.next_after, next_cursor)

    def _list_keys_of_events(self, cursor: NewObjectsCursor) -> TickResult:
        # Lists the parts of the bucket with keys named by events, until one has objects to plan.
        from caf_pipeline.steps import notices

        after = cursor.after
        if cursor.pages:  # found by a listing before the source had a queue: no event names them
            return self._plan(cursor.since, after, NewObjectsCursor(after))
        is_time_short = partial(self._is_time_short, MIN_TIME_LEFT_WITH_EVENTS)
        while not is_time_short():
            part = self._ask_bucket(
                partial(
                    notices.scan_noticed,
                    after=after,
                    max_pages=pages_of_events(self._source_settings),
                    enough=is_time_short,
                )
            )
            if part is None:
                return self._skip("Nothing new: no event names another key.")
            after = part.until or b""
            if part.to_plan:
                return self._plan(part.after, part.until, NewObjectsCursor(after))
        return self._skip("Nothing new so far; the next tick continues.", NewObjectsCursor(after))

    def _drain(self) -> None:
        from caf_pipeline.steps import notices

        run_context, queue = self._open(), open_queue(self.settings, self.source)
        drained = notices.drain_queue(
            run_context, queue, enough=partial(self._is_time_short, MIN_TIME_LEFT)
        )
        _, apart = run_context.ledger.notices.count_noticed([self.source]).get(self.source, (0, 0))
        if drained.taken:
            self.notes.append(f"{counted(drained.taken, 'message')} taken from the queue.")
        if apart:
            self.notes.append(
                f"{counted(apart, 'message')} of the queue set apart: `caf queue {self.source}` "
                "shows why."
            )
        if drained.rest:
            self.notes.append(
                f"{counted(drained.rest, 'message')} left in the queue: too many are set apart "
                "already."
            )


def _after(key: bytes) -> str:
    return f" after '{quote_from_bytes(key)}'" if key else ""
