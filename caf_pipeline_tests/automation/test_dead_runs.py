"""Killed runs in a team's instance, which has Dagster's default settings."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from dagster import DagsterInstance, DagsterRunStatus, RunsFilter, job, op

from caf_pipeline.automation import dead_runs, launching
from caf_pipeline.automation.dead_runs import process_lives, process_tags, reap_dead_runs
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host.team_project import HOME_VARIABLE
from caf_pipeline.naming import DEAD_RUNS_SENSOR, LAUNCH_SENSOR, PROCESS_TAG, S3_POOL
from caf_pipeline.system.processes import this_process
from caf_pipeline_tests.support.command_line import FOREIGN
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS, wait_for
from caf_pipeline_tests.support.s3_server import KEY_ID, SECRET
from caf_pipeline_tests.support.ticks import evaluate_tick

pytest_plugins = ["caf_pipeline_tests.support.dagster_home", "caf_pipeline_tests.support.unruly_s3"]

CHUNK_ASSETS = 'key:"my-source/caf_chunk" or key:"my-source/stored_chunk"'


@op
def nothing() -> None: ...


@job
def foreign() -> None:
    nothing()


@pytest.fixture
def new_bucket(new_bucket, unruly_s3):
    return unruly_s3.in_front_of(new_bucket)


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DagsterInstance]:
    """A team's instance."""
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "team"))
    with DagsterInstance.get() as instance:
        yield instance


@pytest.fixture
def planned(pipeline, tmp_path):
    """The pipeline with a chunk, and caf.toml."""
    pipeline.put(5)
    pipeline.plan()
    pipeline.write_settings(tmp_path / "caf.toml")
    return pipeline


def environment(pipeline, tmp_path, executor: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return kept | {
        HOME_VARIABLE: os.environ[HOME_VARIABLE],
        "TEAM_EXECUTOR": executor,
        "CAF_TEST_BEGUN": str(tmp_path / "begun"),
        "CAF_CONFIG": str(tmp_path / "caf.toml"),
        "CAF_DATABASE_URL": pipeline.settings.database_url.get_secret_value(),
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }


@contextmanager
def materializing(pipeline, tmp_path, executor: str, *selection: str):
    """A run of `dagster asset materialize`, in a process group of its own that is killed."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "dagster", "asset", "materialize"),
            *("-m", "caf_pipeline_tests.support.team_definitions", "--select", *selection),
        ],
        env=environment(pipeline, tmp_path, executor),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill(process)


def kill(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE_SECONDS)


@contextmanager
def packing(planned, unruly_s3, tmp_path, executor: str):
    """A run that packs the chunk, and waits for S3."""
    unruly_s3.hang(20)
    (chunk,) = planned.chunks()
    selection = CHUNK_ASSETS, "--partition", chunk
    with materializing(planned, tmp_path, executor, *selection) as process:
        wait_for(lambda: unruly_s3.struck, process)
        wait_for(lambda: PROCESS_TAG in latest(planned).tags, process)
        yield process


def latest(pipeline):
    return pipeline.instance.get_runs(limit=1)[0]


def tick(pipeline) -> str:
    return evaluate_tick(pipeline, DEAD_RUNS_SENSOR).skip_message


@pytest.mark.thorough
@pytest.mark.parametrize("executor", ["in_process", "default"])
def test_killed_run_is_marked_as_failed(planned, unruly_s3, tmp_path, executor):
    with packing(planned, unruly_s3, tmp_path, executor) as process:
        run = latest(planned)
        assert json.loads(run.tags[PROCESS_TAG])[2] == process.pid
        tick(planned)
        assert latest(planned).status is DagsterRunStatus.STARTED
        kill(process)
    assert tick(planned).startswith("1 dead run")
    assert planned.instance.get_run_by_id(run.run_id).status is DagsterRunStatus.FAILURE


@pytest.mark.thorough
def test_chunk_of_a_killed_run_is_launched_again(planned, unruly_s3, tmp_path, monkeypatch):
    with packing(planned, unruly_s3, tmp_path, "multiprocess") as process:
        kill(process)
    tick(planned)
    monkeypatch.setattr(launching, "FIRST_WAIT_SECONDS", 0)
    requests = []
    # The dead process's lease has to expire.
    wait_for(
        lambda: requests.extend(evaluate_tick(planned, LAUNCH_SENSOR).run_requests) or requests
    )
    (request,) = requests
    unruly_s3.well_behaved()
    assert planned.execute(request.job_name, partition_key=request.partition_key).success
    assert planned.ledger.chunks.get(request.partition_key).state is ChunkState.LOCATED


@pytest.mark.thorough
def test_killed_step_leaves_its_run_to_dagster(planned, unruly_s3, tmp_path):
    with packing(planned, unruly_s3, tmp_path, "multiprocess") as process:
        (lease,) = [lease for lease in planned.ledger.leases.list() if lease.live]
        assert lease.holder.pid != process.pid
        os.kill(lease.holder.pid, signal.SIGKILL)
        assert tick(planned).startswith("0 dead runs")
        process.communicate(timeout=PATIENCE_SECONDS)
    assert latest(planned).status is DagsterRunStatus.SUCCESS  # it tried the op again
    assert tick(planned).startswith("0 dead runs")


@pytest.mark.thorough
def test_killed_foreign_run_is_left_alone(planned, tmp_path):
    with materializing(planned, tmp_path, "multiprocess", "numbers") as process:
        wait_for((tmp_path / "begun").exists, process)
        kill(process)
    assert tick(planned).startswith("0 dead runs")
    assert latest(planned).status is DagsterRunStatus.STARTED


def dead_run(instance, status=DagsterRunStatus.STARTED, **changes):
    """Create a run whose process, by its number, is this one, which started later."""
    run = instance.create_run_for_job(foreign, status=status)
    process = replace(this_process(run.run_id), process_started=0.0, **changes)
    instance.add_run_tags(run.run_id, process_tags(process))
    return instance.get_run_by_id(run.run_id)


def test_dead_run_that_was_being_canceled_is_canceled(instance):
    run = dead_run(instance, DagsterRunStatus.CANCELING)
    assert reap_dead_runs(instance) == [run.run_id]
    assert instance.get_run_by_id(run.run_id).status is DagsterRunStatus.CANCELED


def test_dead_run_fails_and_loses_its_slot(instance):
    storage = instance.event_log_storage
    storage.set_concurrency_slots(S3_POOL, 1)
    run = dead_run(instance)
    storage.claim_concurrency_slot(S3_POOL, run.run_id, "step")
    assert reap_dead_runs(instance) == [run.run_id]
    assert instance.get_run_by_id(run.run_id).status is DagsterRunStatus.FAILURE
    assert not storage.get_concurrency_info(S3_POOL).claimed_slots


def test_run_of_another_machine_is_left_alone(instance):
    dead_run(instance, boot_id="another machine")
    assert reap_dead_runs(instance) == []


def test_run_with_an_inherited_process_tag_is_left_alone(instance):
    dead = dead_run(instance)
    instance.create_run_for_job(
        foreign,
        status=DagsterRunStatus.STARTED,
        tags={PROCESS_TAG: dead.tags[PROCESS_TAG]},
        parent_run_id=dead.run_id,
        root_run_id=dead.run_id,
    )
    assert reap_dead_runs(instance) == [dead.run_id]


def test_run_that_ends_while_listed_keeps_its_status(instance, monkeypatch):
    listed = dead_run(instance)
    instance.delete_run(listed.run_id)
    ended = instance.create_run_for_job(
        foreign, run_id=listed.run_id, status=DagsterRunStatus.SUCCESS, tags=listed.tags
    )
    monkeypatch.setattr(instance, "get_runs", lambda _: [listed])
    assert process_lives(listed) is False
    assert reap_dead_runs(instance) == []
    assert instance.get_run_by_id(ended.run_id).status is DagsterRunStatus.SUCCESS


@pytest.mark.thorough
@pytest.mark.parametrize(("seconds_ago", "left"), [(0, 1), (2 * dead_runs.FREE_SLOTS_SECONDS, 0)])
def test_ended_run_loses_its_slot_after_a_while(instance, seconds_ago, left, monkeypatch):
    storage = instance.event_log_storage
    storage.set_concurrency_slots(S3_POOL, 1)
    run = instance.create_run_for_job(foreign, status=DagsterRunStatus.FAILURE)
    storage.claim_concurrency_slot(S3_POOL, run.run_id, "step")
    later = datetime.now(UTC) + timedelta(seconds=seconds_ago)
    monkeypatch.setattr(dead_runs, "datetime", SimpleNamespace(now=lambda _: later))
    dead_runs.free_slots_of_ended_runs(instance)
    assert len(storage.get_concurrency_info(S3_POOL).claimed_slots) == left


@pytest.mark.thorough
def test_live_run_keeps_its_slot(instance):
    storage = instance.event_log_storage
    storage.set_concurrency_slots(S3_POOL, 1)
    run = instance.create_run_for_job(foreign, status=DagsterRunStatus.STARTED)
    storage.claim_concurrency_slot(S3_POOL, run.run_id, "step")
    dead_runs.free_slots_of_ended_runs(instance)
    assert storage.get_concurrency_info(S3_POOL).claimed_slots


def status_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@contextmanager
def daemon(pipeline, tmp_path):
    process = subprocess.Popen(
        [
            *(str(Path(sys.executable).with_name("dagster-daemon")), "run"),
            *("-m", "caf_pipeline_tests.support.team_definitions"),
        ],
        env=environment(pipeline, tmp_path, "default"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill(process)


@pytest.mark.thorough
def test_restarted_daemon_archives_the_chunk_of_a_killed_run(planned, unruly_s3, tmp_path):
    settings = tmp_path / "caf.toml"
    settings.write_text(f"{settings.read_text()}automatic = true\nwatch_interval_seconds = 0\n")
    (chunk,) = planned.chunks()
    unruly_s3.hang(20)
    with daemon(planned, tmp_path) as process:
        wait_for(lambda: unruly_s3.struck, process)
        (run,) = planned.instance.get_runs(RunsFilter(statuses=[DagsterRunStatus.STARTED]))
        worker = json.loads(run.tags[PROCESS_TAG])[2]
        code_server = int(status_of(worker)[1])
        for pid in (code_server, worker):
            os.kill(pid, signal.SIGKILL)
        kill(process)
    unruly_s3.well_behaved()
    with daemon(planned, tmp_path) as process:
        wait_for(lambda: planned.ledger.chunks.get(chunk).state is ChunkState.LOCATED, process)
    assert planned.instance.get_run_by_id(run.run_id).status is DagsterRunStatus.FAILURE
