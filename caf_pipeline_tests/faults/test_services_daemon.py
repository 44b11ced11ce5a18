"""A backfill by a real Dagster daemon while everything is killed and misbehaves.

The long form has 500 chunks.
"""

import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

from caf_pipeline.automation.dead_runs import process_lives
from caf_pipeline.automation.launching import UNFINISHED
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host.backfill import ENDED
from caf_pipeline.dagster_host.team_project import HOME_VARIABLE
from caf_pipeline.naming import PROCESS_TAG, S3_POOL, UPLOAD_POOL
from caf_pipeline.settings import Settings
from caf_pipeline_tests.faults.dagster_world import settings_of_world, submit_backfill
from caf_pipeline_tests.faults.s3_faults import PASSING
from caf_pipeline_tests.faults.world import World
from caf_pipeline_tests.support.dagster_daemon import daemon, impatient_home
from caf_pipeline_tests.support.patience import wait_for
from caf_pipeline_tests.support.unruly_s3 import UnrulyS3

BACKFILL = "a-backfill"
OBJECTS = 3  # of a chunk
OBJECT_BYTES = 5_500
CHUNKS, FAILURES_EVERY = 10, 1
LONG_CHUNKS, LONG_FAILURES_EVERY = 500, 5
STANDSTILL_SECONDS = 900
"""A failed chunk waits a minute or more for its next run."""

SHARE_SPOILED = 0.03
"""Share of S3's answers that each of seven faults spoils."""


@pytest.fixture
def world(new_world, new_bucket, unruly_s3):
    return new_world(bucket=unruly_s3.in_front_of(new_bucket), source={"target_size": 20_000})


@pytest.fixture
def described(world, tmp_path):
    return settings_of_world(world, tmp_path)


@dataclass
class Failures:
    """Failures of a running backfill. Each returns whether it applied.

    Attributes:
        start: starts a daemon.
        daemons: all started daemons; the last one is alive.
        done: how often each failure was done.
        spoiled: spoiled answers of S3.
    """

    world: World
    s3: UnrulyS3
    instance: DagsterInstance
    start: Callable[[], Any]
    daemons: list[Any] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    spoiled: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random("failures"))

    def turns(self) -> Iterator[Callable[[], bool]]:
        """Yield the failures in turn, forever; a new daemon only once in three rounds."""
        small = [self._kill_a_run, self._provider_fails_uploads, self._kill_a_run, self._node_fails]
        small += [
            self._provider_loses_answers,
            self._kill_the_chain,
            self._broadcasts_are_cut,
            self._kill_a_provider,
        ]
        for daemon_too in itertools.cycle([True, False, False]):
            yield from (
                [self._kill_everything, *small[:4], self._kill_the_daemon, *small[4:]]
                if daemon_too
                else small
            )

    def do(self, one: Callable[[], bool]) -> bool:
        """Undo the last failure's orders to the network, and do this one."""
        self.world.network.well_behaved()
        if not one():
            return False
        self.done[one.__name__.lstrip("_")] += 1
        return True

    def s3_misbehaves(self) -> None:
        self.s3_behaves()
        for spoil in PASSING.values():
            spoil(self.s3, when=self._sometimes)
        self.s3.fail(503, "SlowDown", kind=None, when=self._sometimes)

    def s3_behaves(self) -> None:
        self.spoiled += self.s3.struck
        self.s3.well_behaved()

    def end(self) -> None:
        self.world.network.well_behaved()
        self.s3_behaves()

    def _sometimes(self, _asked: object) -> bool:
        return self.chance.random() < SHARE_SPOILED

    def _started(self) -> list[int]:
        """Return the live processes of runs."""
        runs = self.instance.get_runs(RunsFilter(statuses=[DagsterRunStatus.STARTED]))
        return [json.loads(run.tags[PROCESS_TAG])[2] for run in runs if process_lives(run)]

    def _kill_everything(self) -> bool:
        """Kill everything, as a power loss does, while runs wait for S3 and hold slots."""
        if not self.instance.get_runs_count(RunsFilter(statuses=[DagsterRunStatus.QUEUED])):
            return False  # no run would start
        released = threading.Event()
        self.s3_behaves()
        self.s3.meanwhile(lambda: released.wait(STANDSTILL_SECONDS))
        wait_for(lambda: self._started() and slots(self.instance, S3_POOL))
        for process in self.daemons:
            os.killpg(process.pid, signal.SIGKILL)
        released.set()
        assert slots(self.instance, S3_POOL)
        self.s3_misbehaves()
        self.daemons.append(self.start())
        return True

    def _kill_the_daemon(self) -> bool:
        if not self._started():
            return False
        os.kill(self.daemons[-1].pid, signal.SIGKILL)
        self.daemons.append(self.start())
        return True

    def _kill_a_run(self) -> bool:
        started = self._started()
        if started:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.chance.choice(started), signal.SIGKILL)
        return bool(started)

    def _kill_the_chain(self) -> bool:
        self.world.network.kill()
        self.world.network.start()
        return True

    def _kill_a_provider(self) -> bool:
        self.world.network.kill_provider(0)
        time.sleep(1)
        self.world.network.start_provider(0)
        return True

    def _provider_fails_uploads(self) -> bool:
        self.world.network.misbehave(provider=1, error_status="a disk is broken", times=2)
        return True

    def _provider_loses_answers(self) -> bool:
        self.world.network.misbehave(provider=2, drop_reply=True, times=2)
        return True

    def _node_fails(self) -> bool:
        self.world.network.misbehave(lcd=0, fail=503)
        return True

    def _broadcasts_are_cut(self) -> bool:
        self.world.network.misbehave(cut_broadcast="accept")
        return True


@pytest.fixture
def failures(world, unruly_s3, described, tmp_path, monkeypatch):
    """Failures of a DAGSTER_HOME that gives up unstarted runs after a minute instead of five."""
    monkeypatch.setenv(HOME_VARIABLE, "to be put back")
    home = impatient_home(Settings.model_validate(world.values))
    instance_file = yaml.safe_load((home / "dagster.yaml").read_text())
    instance_file["run_monitoring"]["start_timeout_seconds"] = 60
    (home / "dagster.yaml").write_text(yaml.safe_dump(instance_file))
    with DagsterInstance.from_config(str(home)) as instance, ExitStack() as running:
        yield Failures(
            world,
            unruly_s3,
            instance,
            lambda: running.enter_context(
                daemon("caf_pipeline.definitions", tmp_path, **described)
            ),
        )


def slots(instance: DagsterInstance, pool: str) -> list[Any]:
    """Return the holders of pool slots, and those that wait."""
    usage = instance.event_log_storage.get_concurrency_info(pool)
    return [*usage.claimed_slots, *usage.pending_steps]


def located(world: World) -> int:
    ((count,),) = world.query("SELECT count(*) FROM chunks WHERE state = 'located'")
    return int(count)


@pytest.mark.filterwarnings(
    "ignore:Function `AssetSelection.sources` is deprecated"
)  # Dagster's own call
def test_backfill_under_all_failures_completes_and_frees_slots(fault, world, failures, soak):
    count, every = (LONG_CHUNKS, LONG_FAILURES_EVERY) if soak else (CHUNKS, FAILURES_EVERY)
    chance = random.Random("bodies")
    for number in range(count * OBJECTS):
        world.put(f"key-{number:05}", chance.randbytes(OBJECT_BYTES))
    chunks, instance = world.plan(), failures.instance
    assert len(chunks) == count
    with fault(
        "A service is killed and started again",
        "all of them, their runs too, under a backfill by the Dagster daemon",
    ) as case:
        submit_backfill(world, instance, chunks, BACKFILL)
        failures.daemons.append(failures.start())
        turns, done, changed_at = failures.turns(), -1, time.monotonic()
        failure = next(turns)
        while done < count or instance.get_runs_count(RunsFilter(statuses=UNFINISHED)):
            if done != (done := located(world)):
                changed_at = time.monotonic()
            assert time.monotonic() - changed_at < STANDSTILL_SECONDS, (
                f"stands still at {done} of {count}"
            )
            if done < count and failures.done.total() * every <= done and failures.do(failure):
                failure = next(turns)
            time.sleep(0.5)
        failures.end()
        wait_for(lambda: instance.get_backfill(BACKFILL).status.value in ENDED)
        wait_for(lambda: not any(slots(instance, pool) for pool in (S3_POOL, UPLOAD_POOL)))
        print(f"{count} chunks; {dict(failures.done)}; {failures.spoiled} answers of S3 spoiled;")
        print(
            instance.get_backfill(BACKFILL).status,
            Counter(run.status.value for run in instance.get_runs()),
        )
        assert {chunk.state for chunk in world.chunks()} == {ChunkState.LOCATED}
        case.tried = failures.done.total()
        case.check(world)
