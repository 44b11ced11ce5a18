"""The Dagster daemon is killed under runs of chunks and started again: alone, and with its runs as a machine's end does it."""

import os
import signal
from collections import Counter

import pytest
import yaml
from dagster import DagsterInstance, DagsterRunStatus

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host.home import HOME_VARIABLE
from caf_pipeline.defs.dagster_private import BulkActionStatus
from caf_pipeline.settings import Settings
from caf_pipeline_tests.faults.dagster_world import settings_of_world, submit_backfill
from caf_pipeline_tests.support.dagster_daemon import daemon, impatient_home, wait_for

BACKFILL = "a-backfill"


@pytest.fixture
def world(new_world):
    world = new_world()
    world.fill(small=6, large=2)
    return world


@pytest.fixture
def described(world, tmp_path):
    return settings_of_world(world, tmp_path)


@pytest.fixture
def home(world, monkeypatch):
    """A DAGSTER_HOME in which a run that was killed before it had begun is given up in a minute, not in five."""
    monkeypatch.setenv(HOME_VARIABLE, "to be put back")
    home = impatient_home(Settings.model_validate(world.values))
    described = yaml.safe_load((home / "dagster.yaml").read_text())
    described["run_monitoring"]["start_timeout_seconds"] = 60
    (home / "dagster.yaml").write_text(yaml.safe_dump(described))
    return home


@pytest.mark.filterwarnings("ignore:Function `AssetSelection.sources` is deprecated")  # Dagster's own call
def test_the_daemon_killed_under_runs_of_chunks_is_started_again_and_the_runs_end_well(fault, world, home, described, tmp_path):
    with (
        fault("A service is killed and started again", "the Dagster daemon, under runs of chunks") as case,
        DagsterInstance.from_config(str(home)) as instance,
    ):
        submit_backfill(world, instance, world.plan(), BACKFILL)

        def under_way():
            states = Counter(run.status for run in instance.get_runs())
            return states[DagsterRunStatus.STARTED] and not states[DagsterRunStatus.STARTING]

        def complete():
            return instance.get_backfill(BACKFILL).status is BulkActionStatus.COMPLETED_SUCCESS

        case.tried = 2
        with daemon("caf_pipeline.definitions", tmp_path, **described):
            wait_for(under_way)  # then its code server and its runs are killed with it
        with daemon("caf_pipeline.definitions", tmp_path, **described) as alone:
            wait_for(lambda: under_way() or complete())
            os.kill(alone.pid, signal.SIGKILL)  # its runs go on
            with daemon("caf_pipeline.definitions", tmp_path, **described):
                wait_for(complete)
        assert {chunk.state for chunk in world.chunks()} == {ChunkState.LOCATED}
        case.check(world)
