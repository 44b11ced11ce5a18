"""The output of a run's steps is kept and shown, and no program is started for it."""

import subprocess
import sys

import pytest

KEY = ["run", "compute_logs", "step"]

SCRIPT = """
import os, sys, psutil
from caf_pipeline_tests.support.dagster_private import ComputeIOType
from caf_pipeline.dagster_host.compute_logs import FollowedComputeLogs
logs = FollowedComputeLogs(sys.argv[1])
key = ["run", "compute_logs", "step"]
with logs.capture_logs(key):
    started = psutil.Process().children()
    print("by Python")
    print("an error", file=sys.stderr)
    os.system("echo by another program")
assert started == []
assert logs.is_capture_complete(key)
kept = [logs.get_log_data_for_type(key, kind, 0, None)[0] for kind in (ComputeIOType.STDOUT, ComputeIOType.STDERR)]
assert [sorted(each.decode().splitlines()) for each in kept] == [["by Python", "by another program"], ["an error"]]
"""


@pytest.fixture
def said(tmp_path):
    return subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True)


def test_what_a_step_says_is_kept_and_shown(said):
    assert sorted(said.stdout.splitlines()) == ["by Python", "by another program"]
    assert "an error" in said.stderr


def test_our_instance_keeps_output_in_this_way(monkeypatch, tmp_path):
    from dagster import DagsterInstance

    from caf_pipeline.dagster_host.compute_logs import FollowedComputeLogs
    from caf_pipeline.dagster_host.home import HOME_VARIABLE, prepare_dagster_home
    from caf_pipeline.settings import Settings

    monkeypatch.setenv(HOME_VARIABLE, "")
    home = prepare_dagster_home(Settings(home=tmp_path))
    with DagsterInstance.from_config(str(home)) as instance:
        assert isinstance(instance.compute_log_manager, FollowedComputeLogs)
        assert instance.compute_log_manager.get_captured_local_path(KEY, "out").startswith(str(home / "storage"))
