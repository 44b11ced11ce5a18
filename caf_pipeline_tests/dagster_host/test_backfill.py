"""`caf backfill`: which chunks it submits, how it follows them, and when it refuses."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dagster import DagsterRunStatus, RunsFilter
from rich.console import Console

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host import backfill
from caf_pipeline.dagster_host.backfill import Selection, backfill_command, select
from caf_pipeline.dagster_host.code_location import code_location
from caf_pipeline.dagster_host.home import dagster_home
from caf_pipeline.dagster_private import BulkActionStatus
from caf_pipeline.errors import NoDaemon, NotLocated, UsageError
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.naming import BACKFILL_TAG, PRIORITY_TAG
from caf_pipeline.steps import chunk_steps
from caf_pipeline.waits import Work
from caf_pipeline_tests.support.dagster_daemon import daemon, impatient_home, settings_of
from caf_pipeline_tests.support.dagster_private import DaemonHeartbeat
from caf_pipeline_tests.support.patience import wait_for
from caf_pipeline_tests.support.pipeline_runs import ARCHIVE, SOURCE, fail_run, start_run
from caf_pipeline_tests.support.postgres import connected

pytestmark = pytest.mark.thorough

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]


@pytest.fixture
def planned(pipeline):
    """A source with several planned chunks."""
    pipeline.put(25)
    assert len(pipeline.plan()) == 5
    return pipeline


def heartbeat(pipeline, seconds_ago: float = 0) -> None:
    pipeline.instance.add_daemon_heartbeat(
        DaemonHeartbeat(time.time() - seconds_ago, backfill.DAEMON, "a daemon")
    )


def chosen(pipeline, **wanted) -> list[str]:
    return [
        chunk.name
        for chunk in select(pipeline.instance, pipeline.ledger, SOURCE, Selection(**wanted)).chunks
    ]


def submit(pipeline) -> str:
    backfill_id = backfill.new_id()
    backfill.submit(
        pipeline.settings,
        pipeline.instance,
        pipeline.ledger,
        SOURCE,
        pipeline.chunks(),
        backfill_id,
        code_location(pipeline.settings, [SOURCE]),
    )
    return backfill_id


def test_backfill_without_a_dagster_home_creates_nothing(pipeline_settings):
    with pytest.raises(NoDaemon, match="no Dagster daemon"):
        backfill_command(SOURCE, settings=pipeline_settings, wanted={})
    assert not dagster_home(pipeline_settings).exists()


@pytest.mark.parametrize("seconds_ago", [None, 3600, -3600], ids=["none", "an hour ago", "to come"])
def test_without_a_live_daemon_nothing_is_submitted(planned, seconds_ago):
    if seconds_ago:
        heartbeat(planned, seconds_ago)
    with pytest.raises(NoDaemon, match="would not start") as refused:
        backfill_command(SOURCE, settings=planned.settings, wanted={})
    assert refused.value.exit_code == 16
    assert str(dagster_home(planned.settings)) in refused.value.hint
    assert planned.instance.get_backfills() == []


def test_where_there_is_nothing_to_do_it_ends_well(planned, capsys):
    for chunk in planned.chunks():
        chunk_steps.withdraw(planned.run_context(), chunk)
    assert (
        backfill_command(SOURCE, settings=planned.settings, wanted={}) == 0
    )  # no daemon is needed for that
    assert "nothing to submit" in capsys.readouterr().err
    assert planned.instance.get_backfills() == []


def test_selection_by_plan_and_by_range(planned):
    names = planned.chunks()
    assert chosen(planned) == names
    assert chosen(planned, first=names[1], last=names[3]) == names[1:4]
    assert chosen(planned, last=names[0]) == names[:1]
    planned.put(3, prefix="later")
    later = sorted(set(planned.plan()) - set(names))
    assert chosen(planned, plan=planned.ledger.chunks.get(later[0]).plan) == later
    assert chosen(planned, first=names[-1]) == [names[-1], *later]  # in the order of planning


def test_wrong_ends_and_unknown_plans_are_refused(planned):
    names = planned.chunks()
    with pytest.raises(UsageError, match="comes after"):
        chosen(planned, first=names[3], last=names[1])
    with pytest.raises(NotLocated, match="'ffff'"):
        chosen(planned, plan="ffff")
    with pytest.raises(NotLocated):
        chosen(planned, first="my-source-00000000-00001")
    planned.put(3, prefix="later")
    later = sorted(set(planned.plan()) - set(names))
    with pytest.raises(UsageError, match=f"{later[0]} .* plan"):
        chosen(planned, plan=planned.ledger.chunks.get(names[0]).plan, last=later[0])


def test_held_and_parked_chunks_are_left_out(planned):
    queued, leased, parked, *others = planned.chunks()
    start_run(planned, ARCHIVE, DagsterRunStatus.QUEUED, **{"dagster/partition": queued})
    chunk_steps.park(planned.run_context(), parked, "an operator's turn")
    with planned.run_context().lease(chunk_lease(leased)):
        result = select(planned.instance, planned.ledger, SOURCE, Selection())
        assert ([chunk.name for chunk in result.chunks], result.held, result.parked) == (
            others,
            [queued, leased],
            1,
        )


def test_failed_selects_failed_and_unparks_parked_chunks(planned, monkeypatch):
    _, failed, parked, *_ = planned.chunks()
    fail_run(planned, failed)
    chunk_steps.park(planned.run_context(), parked, "failed too often")
    assert chosen(planned, failed=True) == [failed, parked]
    heartbeat(planned)
    monkeypatch.setattr(backfill, "follow", lambda *_: "CANCELED")
    assert backfill_command(SOURCE, settings=planned.settings, wanted={"failed": True}) == 12
    assert planned.ledger.chunks.get(parked).state is ChunkState.PLANNED
    (submitted,) = planned.instance.get_backfills()
    assert submitted.partition_names == [failed, parked]


def test_withdrawn_and_empty_chunks_do_not_count_as_archived(planned, monkeypatch, capsys):
    withdrawn, empty, located, *others = planned.chunks()
    heartbeat(planned)
    source = "SELECT file_path FROM claims JOIN caf_files USING (caf_file_id) WHERE name = %(name)s"
    with connected(planned.ledger.database) as connection:
        claimed = connection.execute(source, {"name": empty}).scalars()

    def follow(*_):
        chunk_steps.withdraw(planned.run_context(), withdrawn, reason="too large")
        for key in claimed:
            planned.bucket.delete(key)
        for chunk in (empty, located, *others):
            assert planned.execute(ARCHIVE, partition_key=chunk).success
        return "COMPLETED_SUCCESS"

    monkeypatch.setattr(backfill, "follow", follow)
    assert backfill_command(SOURCE, settings=planned.settings, wanted={}, json=True) == 12
    output = capsys.readouterr()
    assert json.loads(output.out)["left"] == [withdrawn, empty]
    assert f"{withdrawn} is withdrawn: too large" in output.err
    assert f"{empty} is empty" in output.err
    assert "3 of 5 chunks done" in output.err


def test_a_dry_run_names_the_chunks_and_changes_nothing(planned, capsys):
    names = planned.chunks()
    planned.instance.delete_dynamic_partition("caf_my-source_chunks", names[0])
    chunk_steps.park(planned.run_context(), names[1], "an operator's turn")
    assert (
        backfill_command(
            SOURCE, settings=planned.settings, wanted={"failed": True}, dry_run=True, json=True
        )
        == 0
    )
    out = capsys.readouterr()
    assert json.loads(out.out)["chunks"] == [names[1]]
    assert "would submit 1 chunk" in out.err
    assert planned.instance.get_backfills() == []
    assert planned.ledger.chunks.get(names[1]).state is ChunkState.PARKED
    assert not planned.instance.has_dynamic_partition("caf_my-source_chunks", names[0])


def follow(planned, backfill_id, left, printed):
    """Follow a backfill with so many chunks left."""
    console = Console(file=printed, width=200)
    names = planned.chunks()[:left]
    return backfill.follow(planned.instance, planned.ledger, backfill_id, names, console)


def test_following_a_backfill_again_counts_from_its_beginning(planned, monkeypatch):
    backfill_id, printed = submit(planned), io.StringIO()
    counts = iter([8, 0, 0, 5, 13, 0, 0, 0])  # succeeded, failed, canceled, unfinished; twice

    def count(instance, *_):
        instance.update_backfill(
            instance.get_backfill(backfill_id).with_status(BulkActionStatus.COMPLETED_SUCCESS)
        )
        return next(counts)

    monkeypatch.setattr(type(planned.instance), "get_runs_count", count)
    monkeypatch.setattr(backfill, "POLL_SECONDS", 0)
    assert follow(planned, backfill_id, 5, printed) == "COMPLETED_SUCCESS"
    first, last = (line for line in printed.getvalue().splitlines() if line.startswith("backfill"))
    assert "8 of 13 chunks" in first
    assert "5 runs queued" in first
    assert "13 of 13 chunks" in last


def test_a_backfill_without_live_runs_has_no_time_left():
    counts = {"well": 2, "failed": 1, "canceled": 0, "going": 0}
    line = backfill.describe_progress(counts, 3, 2, 60, Work(packed_bytes=2048, sent_bytes=300))
    assert "1 run failed, 0 runs queued" in line
    assert "(2.0 KiB packed, 300 B sent)" in line
    assert " left" not in line


def test_a_canceled_backfill_counts_its_canceled_runs(planned):
    backfill_id, printed = submit(planned), io.StringIO()
    chunks = planned.chunks()
    for chunk, status in zip(
        chunks, [DagsterRunStatus.SUCCESS, *[DagsterRunStatus.CANCELED] * 2], strict=False
    ):
        start_run(
            planned, ARCHIVE, status, **{"dagster/partition": chunk, BACKFILL_TAG: backfill_id}
        )
    planned.instance.update_backfill(
        planned.instance.get_backfill(backfill_id).with_status(BulkActionStatus.CANCELED)
    )
    assert follow(planned, backfill_id, 4, printed) == "CANCELED"
    assert "1 of 5 chunks" in printed.getvalue()
    assert "2 runs canceled" in printed.getvalue()


def test_a_backfill_that_does_not_begin_is_reported_once(planned, monkeypatch):
    backfill_id, printed = submit(planned), io.StringIO()
    polls = []

    def lives(instance):
        polls.append(1)
        if len(polls) == 3:
            canceled = instance.get_backfill(backfill_id).with_status(BulkActionStatus.CANCELED)
            instance.update_backfill(canceled)
        return True

    monkeypatch.setattr(backfill, "_daemon_lives", lives)
    monkeypatch.setattr(backfill, "POLL_SECONDS", 0)
    monkeypatch.setattr(backfill, "BEGIN_SECONDS", 0)
    assert follow(planned, backfill_id, 4, printed) == "CANCELED"
    assert printed.getvalue().count("has not begun") == 1


def test_an_unfinished_backfill_is_followed_and_not_submitted_twice(planned, monkeypatch):
    backfill_id = submit(planned)
    result = select(planned.instance, planned.ledger, SOURCE, Selection())
    assert (result.chunks, result.backfills) == ([], {backfill_id: planned.chunks()})
    heartbeat(planned)
    followed = []
    monkeypatch.setattr(
        backfill, "follow", lambda _, __, which, *___: followed.append(which) or "COMPLETED_FAILED"
    )
    assert backfill_command(SOURCE, settings=planned.settings, wanted={}) == 12
    assert followed == [backfill_id]
    assert len(planned.instance.get_backfills()) == 1


def test_a_failed_chunk_of_a_backfill_is_submitted_again(planned):
    backfill_id = submit(planned)
    failed, retried, *others = planned.chunks()
    for chunk, status in (
        (failed, DagsterRunStatus.FAILURE),
        (retried, DagsterRunStatus.FAILURE),
        (retried, DagsterRunStatus.QUEUED),
    ):
        start_run(
            planned, ARCHIVE, status, **{"dagster/partition": chunk, BACKFILL_TAG: backfill_id}
        )
    result = select(planned.instance, planned.ledger, SOURCE, Selection())
    assert ([chunk.name for chunk in result.chunks], result.backfills) == (
        [failed],
        {backfill_id: [retried, *others]},
    )


@pytest.mark.parametrize("submitted", [False, True])
def test_an_interrupted_submit_reports_whether_the_backfill_exists(
    planned, monkeypatch, capsys, submitted
):
    heartbeat(planned)
    add = type(planned.instance).add_backfill

    def interrupted(*arguments):
        if submitted:
            add(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(planned.instance), "add_backfill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backfill_command(SOURCE, settings=planned.settings, wanted={})
    assert ("goes on" in capsys.readouterr().err) is submitted


def test_the_daemon_continues_an_interrupted_backfill_command(pipeline, tmp_path):
    pipeline.put(7)
    assert len(pipeline.plan()) == 2
    environment = settings_of(pipeline, tmp_path)
    described = (
        tmp_path / "caf.toml"
    ).read_text()  # else the daemon's sensor may have launched some before
    (tmp_path / "caf.toml").write_text(described.replace("automatic = true", "automatic = false"))
    impatient_home(pipeline.settings)
    command = [Path(sys.executable).with_name("caf"), "backfill", SOURCE]

    def caf() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    with daemon("caf_pipeline.definitions", tmp_path, **environment):
        wait_for(lambda: backfill.DAEMON in pipeline.instance.get_daemon_heartbeats())
        first = caf()
        wait_for(lambda: pipeline.instance.get_backfills() or first.poll() is not None)
        (submitted,) = pipeline.instance.get_backfills()
        first.send_signal(signal.SIGINT)
        _, output = first.communicate()
        assert first.returncode == 130, output.decode()
        assert f"backfill {submitted.backfill_id} goes on" in output.decode()

        second = caf()
        _, output = second.communicate()
        assert second.returncode == 0, output.decode()
        assert "2 of 2 chunks done" in output.decode()
    assert pipeline.chunks(ChunkState.LOCATED) == pipeline.chunks()
    (result,) = pipeline.instance.get_backfills()
    assert result.status is BulkActionStatus.COMPLETED_SUCCESS
    runs = pipeline.instance.get_runs(RunsFilter(tags={BACKFILL_TAG: submitted.backfill_id}))
    assert len(runs) == 2  # the sensor that launches chunks leaves them to the backfill
    assert {run.tags[PRIORITY_TAG] for run in runs} == {"-1"}
    assert {run.job_name for run in runs} == {ARCHIVE}
    log = pipeline.instance.all_logs(runs[0].run_id)
    assert any("steps in process" in (entry.user_message or "") for entry in log)
