"""`caf runs`: unfinished runs and the last ended runs."""

import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from dagster import DagsterRunStatus

from caf_pipeline.automation.dead_runs import process_tags
from caf_pipeline.automation.launching import UNFINISHED
from caf_pipeline.dagster_host import runs
from caf_pipeline.dagster_host.home import dagster_home
from caf_pipeline.dagster_host.runs import find_runs, runs_command
from caf_pipeline.errors import SettingsError
from caf_pipeline.system.processes import this_process
from caf_pipeline.waits import Wait, Work
from caf_pipeline_tests.support.dagster_private import EngineEventData, SerializableErrorInfo
from caf_pipeline_tests.support.pipeline_runs import ARCHIVE, SOURCE, start_run

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]


@pytest.mark.thorough
def test_each_run_shows_chunk_status_and_result(pipeline, capsys):
    pipeline.put(25)
    good, bad, waiting, dead, *_ = pipeline.plan()
    pipeline.execute(ARCHIVE, partition_key=good)
    shutil.rmtree(pipeline.ledger.chunks.get(bad).plan_folder)
    pipeline.execute(ARCHIVE, partition_key=bad)
    started = start_run(
        pipeline, ARCHIVE, DagsterRunStatus.STARTED, **{"dagster/partition": waiting}
    )
    wait = Wait("a provider's proof", "it comes", datetime.now(UTC), waiting)
    pipeline.ledger.progress.record(this_process(started), SOURCE, Work(waits=(wait,)))
    killed = start_run(pipeline, ARCHIVE, DagsterRunStatus.STARTED, **{"dagster/partition": dead})
    pipeline.instance.add_run_tags(
        killed, process_tags(replace(this_process(killed), process_started=1.0))
    )

    actual = find_runs(pipeline.instance, pipeline.ledger, SOURCE, 20)
    assert [run.run_id for run in actual[:2]] == [killed, started]
    by_chunk = {run.chunk: (run.status, run.chunk_state, run.result) for run in actual}
    assert by_chunk[dead][:2] == ("started", "planned")
    assert by_chunk[dead][2].startswith("its process")
    status, state, result = by_chunk[waiting]
    assert (status, state) == ("started", "planned")
    assert "for a provider's proof; it comes" in result
    status, state, result = by_chunk[bad]
    assert status == "failure"
    assert pipeline.ledger.chunks.get(bad).plan_folder in result
    assert by_chunk[good] == ("success", "located", "")
    assert by_chunk[""][0] == "success"  # the plan's own run

    assert runs_command(SOURCE, settings=pipeline.settings, last=1, json=True) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["status"] for line in lines] == ["started", "started", "failure"]
    assert (lines[2]["chunk"], lines[2]["source"], lines[2]["job"]) == (bad, SOURCE, ARCHIVE)
    runs_command(None, settings=pipeline.settings, last=20, json=False)
    shown = capsys.readouterr().out
    assert all(run.run_id in shown for run in actual)


def test_a_run_that_was_not_launched_shows_the_reason(pipeline):
    run = pipeline.instance.get_run_by_id(start_run(pipeline, ARCHIVE, DagsterRunStatus.STARTING))
    for reason in ("an earlier try", "the code server did not answer in time\nand more"):
        error = EngineEventData.engine_error(SerializableErrorInfo(reason, [], "TimeoutError"))
        pipeline.instance.report_engine_event("the run cannot be launched", run, error)
    pipeline.instance.report_engine_event("and is failed", run)
    pipeline.instance.report_run_failed(run)
    (shown,) = find_runs(pipeline.instance, pipeline.ledger, None, 1)
    assert shown.result.startswith("the code server")


def test_runs_without_a_dagster_home_creates_nothing(pipeline_settings, ledger, capsys):
    assert runs_command(None, settings=pipeline_settings, last=20, json=False) == 0
    assert capsys.readouterr().out == "no runs\n"
    assert not dagster_home(pipeline_settings).exists()
    with pytest.raises(SettingsError, match="'other'"):
        runs_command("other", settings=pipeline_settings, last=20, json=False)


def test_a_run_that_ends_during_the_query_is_shown_once(pipeline, monkeypatch):
    run_id = start_run(pipeline, ARCHIVE, DagsterRunStatus.STARTED)
    ask = runs.read_runs

    def end_after(instance, statuses, *rest):
        yield from ask(instance, statuses, *rest)
        if statuses is UNFINISHED:
            instance.report_run_failed(instance.get_run_by_id(run_id))

    monkeypatch.setattr(runs, "read_runs", end_after)
    assert [run.status for run in find_runs(pipeline.instance, pipeline.ledger, None, 20)] == [
        "failure"
    ]
