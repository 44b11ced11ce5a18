"""One tick of the sensor for new objects: at inventory reports, then round the bucket part by part,
or where events say.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar
from urllib.parse import quote_from_bytes, unquote_to_bytes

from dagster import RunRequest, RunsFilter, SensorEvaluationContext, SensorResult, SkipReason

from caf_pipeline.automation.launch_tick import ENOUGH
from caf_pipeline.automation.launching import UNFINISHED, by_outage, waits
from caf_pipeline.automation.tick import TickResult, ask_in_time, pause_reason
from caf_pipeline.defs.naming import REPORT_TAG, job_name, op_name
from caf_pipeline.errors import CafError, SourceError, with_hint
from caf_pipeline.ledger.database import describe_database
from caf_pipeline.run_context import RunContext
from caf_pipeline.run_wiring import open_queue
from caf_pipeline.settings import Settings, SourceSettings
from caf_pipeline.steps import inventories, notices
from caf_pipeline.system.deadline import Deadline, Overdue
from caf_pipeline.system.quantities import counted

ENOUGH_FOR_EVENTS: Final = 0.2
"""As `ENOUGH`, of a look that has asked the queue before the bucket."""

REPORT_SHARE: Final = 0.3
"""Of what is left of the deadline, for the question whether there is a new inventory report: the
look goes on without it.
"""

RUNS_OF_REPORT: Final = 100
"""Of one report's plan, the latest that a look reads."""

PART_PAGES: Final = 20
"""Of a part that is planned at once. 20,000 objects that arrive together are one run and chunks of
them all, where page by page they would be 20 runs, one after the other, and 20 small chunks at
least. With more pages the first object would wait longer: 20 of them take 10 minutes, at one in
`sensors.LOOK_SECONDS`.
"""

T = TypeVar("T")


def pages_of_events(its: SourceSettings) -> int:
    """Return how many pages a look lists at most where events say where: there is no round to go,
    and few parts are few plans.
    """
    return max(its.watch_pages, PART_PAGES)


@dataclass(frozen=True)
class NewObjectsCursor:
    """Where the next look begins, and the part before it that is not planned yet; empty where it
    was written by hand and is none.

    Attributes: after: the next look lists keys greater than this. since: where the part began that
        has new objects, up to `after`, and is planned once it has ended. pages: of that part; 0:
        there is none.
    """

    after: bytes = b""
    since: bytes = b""
    pages: int = 0

    @classmethod
    def read(cls, written: str | None) -> "NewObjectsCursor":
        """Return the cursor of the tick before."""
        try:
            said = json.loads(written or "{}")
            after = unquote_to_bytes(said["after"])
            if "since" not in said:
                return cls(after, after)
            since, pages = unquote_to_bytes(said["since"]), said["pages"]
            return (
                cls(after, since, pages)
                if since < after and isinstance(pages, int) and pages > 0
                else cls()
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()

    def written(self) -> str:
        """Return the cursor for the next tick."""
        part = {"since": quote_from_bytes(self.since), "pages": self.pages} if self.pages else {}
        return json.dumps({"after": quote_from_bytes(self.after), **part})


@dataclass
class NewObjectsTick:
    """One tick for one source.

    Attributes:
        context: Dagster's.
        settings: all.
        source: its name.
        deadline: for all questions to servers.
        notes: sentences on the queue and the inventory reports.
        unread: why the queue was not read; None where it was, or there is none.
    """

    context: SensorEvaluationContext
    settings: Settings
    source: str
    deadline: Deadline
    notes: list[str] = field(default_factory=list)
    unread: CafError | None = None

    def result(self) -> TickResult:
        """Ask for a plan of what is new.

        Raises: Overdue: the ledger, the queue or the bucket did not answer in time. Where the
            bucket of the reports does not, the
                look goes on.
            CafError: the queue cannot be read, and what else was looked at has nothing new.
        """
        answer = self._look()
        if self.unread and not (isinstance(answer, SensorResult) and answer.run_requests):
            raise self.unread
        return answer

    def _look(self) -> TickResult:
        database = describe_database(self.settings)
        if paused := self._ask(database, lambda: pause_reason(self.context.resources.ledger.get())):
            return SkipReason(paused)
        if self._its.queue:
            try:
                self._ask(f"queue {self._its.queue}, or the ledger,", self._drain)
            except (
                SourceError
            ) as error:  # reports and the keys that are noticed already are looked at without it
                self.unread = error
                self.notes.append(f"{with_hint(error)}.")
        planning_runs = RunsFilter(job_name=job_name(self.source, "plan"), statuses=UNFINISHED)
        if busy := self.context.instance.get_runs(planning_runs, limit=1):
            return SkipReason(self._said(f"Run {busy[0].run_id} is planning this source already."))
        if self._its.inventory and (request := self._new_report()):
            return SensorResult([request], cursor=self.context.cursor)
        cursor = NewObjectsCursor.read(self.context.cursor)
        if not self._its.queue:
            return self._round(cursor)
        if self._planned_lately():
            return SkipReason(self._said(f"{self._lately()} what events name is looked for."))
        return self._where_events_say(cursor)

    @property
    def _its(self) -> SourceSettings:
        return self.settings.sources[self.source]

    def _work(self) -> RunContext:
        run_context: RunContext = self.context.resources.run.open(self.context, self.source)
        return run_context

    def _ask(self, whom: str, question: Callable[[], T]) -> T:
        return ask_in_time(self.context, self.deadline, whom, question)

    def _ask_bucket(self, look: Callable[[RunContext], T]) -> T:
        whom = f"bucket '{self._its.bucket}' at {self._its.endpoint_url or 'AWS'}, or the ledger,"
        return self._ask(whom, lambda: look(self._work()))

    def _is_enough(self, share: float) -> bool:
        return self.deadline.left() < self.deadline.seconds * share

    def _said(self, sentence: str) -> str:
        return " ".join([sentence, *self.notes])

    def _log_notes(self) -> None:
        for note in self.notes:
            self.context.log.warning(note)

    def _new_report(self) -> RunRequest | None:
        """Ask for a plan of the newest inventory report, where it is newer than what is planned,
        which the ledger tells.

        A plan of it that has run did not come so far: the next one waits, longer each time, and
        after some it is left to the daily schedule.
        """
        whom = f"the folder of inventory reports {self._its.inventory}, or the ledger,"
        deadline = Deadline(self.deadline.left() * REPORT_SHARE)
        try:
            name = ask_in_time(
                self.context, deadline, whom, lambda: inventories.find_new_report(self._work())
            )
        except (CafError, Overdue) as error:
            self.notes.append(f"No inventory report is taken: {with_hint(error)}.")
            return None
        if not name:
            return None
        of_it = RunsFilter(job_name=job_name(self.source, "plan"), tags={REPORT_TAG: name})
        runs = self.context.instance.get_run_records(of_it, limit=RUNS_OF_REPORT)
        if sum(not by_outage(run) for run in runs) >= self.settings.runs.attempts:
            self.notes.append(
                f"Runs did not plan the inventory report {name}: it is left to the daily schedule."
            )
        elif waits(runs):
            self.notes.append(
                f"Run {runs[0].dagster_run.run_id} did not plan the inventory report {name}: the "
                "next one waits."
            )
        else:
            config = {"ops": {op_name(self.source, "s3_inventory"): {"config": {"report": name}}}}
            return RunRequest(run_config=config, tags={REPORT_TAG: name})
        return None

    def _planned_lately(self) -> bool:
        """Tell whether a plan of the source began too short ago: what trickles in would be a chunk
        at each look.
        """
        interval = self._its.watch_interval_seconds
        latest = self.context.instance.get_run_records(
            RunsFilter(job_name=job_name(self.source, "plan")), limit=1
        )
        # One that is ahead was written while a clock was wrong; those of two machines may differ a
        # little.
        return any(
            -interval < time.time() - run.create_timestamp.timestamp() < interval for run in latest
        )

    def _lately(self) -> str:
        return (
            "The latest plan began less than "
            f"{counted(self._its.watch_interval_seconds, 'second')} ago; after that"
        )

    def _round(self, at: NewObjectsCursor) -> TickResult:
        """Look at what comes next.

        What is new is planned at once; if all of it is, or it is too soon, with what follows.
        """
        look = partial(
            inventories.scan_for_new,
            after=at.after,
            max_pages=self._its.watch_pages,
            enough=partial(self._is_enough, ENOUGH),
        )
        seen = self._ask_bucket(look)
        pages = at.pages + seen.pages
        cursor = NewObjectsCursor(seen.next_after or b"").written()  # None: again from the start
        if not seen.new_objects and not at.pages:
            return SensorResult(
                skip_reason=self._said(f"Nothing new after '{quote_from_bytes(at.after)}'."),
                cursor=cursor,
            )
        soon = self._planned_lately()
        if (seen.all_new or soon) and seen.next_after is not None and pages < PART_PAGES:
            said = (
                f"New in {counted(pages, 'page')} after '{quote_from_bytes(at.since)}': "
                "planned "
                "with what comes next."
            )
            return SensorResult(
                skip_reason=self._said(said),
                cursor=NewObjectsCursor(seen.next_after, at.since, pages).written(),
            )
        if soon:
            return SkipReason(
                self._said(
                    f"{self._lately()} what is new after '{quote_from_bytes(at.since)}' is planned."
                )
            )
        self._log_notes()
        return SensorResult(
            [RunRequest(run_config=self._window(at.since, seen.next_after))], cursor=cursor
        )

    def _where_events_say(self, cursor: NewObjectsCursor) -> TickResult:
        """Look at one part of the bucket after another that has keys which events named, up to one
        that is to be planned.
        """
        after, enough = cursor.after, partial(self._is_enough, ENOUGH_FOR_EVENTS)
        if cursor.pages:  # what a round saw before the source had a queue: no event names it
            self._log_notes()
            request = RunRequest(run_config=self._window(cursor.since, after))
            return SensorResult([request], cursor=NewObjectsCursor(after).written())
        while not enough():
            look = partial(
                notices.scan_noticed,
                after=after,
                max_pages=pages_of_events(self._its),
                enough=enough,
            )
            seen = self._ask_bucket(look)
            if seen is None:
                return SensorResult(
                    skip_reason=self._said(
                        "Nothing new: no event names a key that is to be looked for."
                    )
                )
            after = seen.until or b""
            if seen.to_plan:
                self._log_notes()
                request = RunRequest(run_config=self._window(seen.after, seen.until))
                return SensorResult([request], cursor=NewObjectsCursor(after).written())
        said = self._said("Nothing new so far; the next look goes on.")
        return SensorResult(skip_reason=said, cursor=NewObjectsCursor(after).written())

    def _drain(self) -> None:
        """Take what the source's queue has into the ledger, and note what is to be said of it."""
        run_context, queue = self._work(), open_queue(self.settings, self.source)
        drained = notices.drain_queue(run_context, queue, enough=partial(self._is_enough, ENOUGH))
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

    def _window(self, after: bytes, until: bytes | None) -> dict[str, object]:
        window: dict[str, object] = {"after": quote_from_bytes(after)}
        if until is not None:
            window["until"] = quote_from_bytes(until)
        # a window of the whole bucket would be taken for no window, and a report is older than what
        # was seen
        if self._its.inventory:
            window["list_bucket"] = True
        return {"ops": {op_name(self.source, "s3_inventory"): {"config": window}}}
