"""The output of steps is stored and shown, without starting a program."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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
kinds = (ComputeIOType.STDOUT, ComputeIOType.STDERR)
logged = [logs.get_log_data_for_type(key, kind, 0, None)[0] for kind in kinds]
output, errors = (sorted(text.decode().splitlines()) for text in logged)
assert output == ["by Python", "by another program"]
assert errors == ["an error"]
"""


@pytest.fixture
def process(tmp_path):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True
    )


@pytest.mark.thorough
def test_the_output_of_a_step_is_stored_and_shown(process):
    assert sorted(process.stdout.splitlines()) == ["by Python", "by another program"]
    assert "an error" in process.stderr


def test_our_instance_keeps_output_in_this_way(monkeypatch, tmp_path):
    from dagster import DagsterInstance

    from caf_pipeline.dagster_host.compute_logs import FollowedComputeLogs
    from caf_pipeline.dagster_host.home import prepare_dagster_home
    from caf_pipeline.dagster_host.team_project import HOME_VARIABLE
    from caf_pipeline.settings import Settings

    monkeypatch.setenv(HOME_VARIABLE, "")
    home = prepare_dagster_home(Settings(home=tmp_path))
    with DagsterInstance.from_config(str(home)) as instance:
        assert isinstance(instance.compute_log_manager, FollowedComputeLogs)
        assert instance.compute_log_manager.get_captured_local_path(KEY, "out").startswith(
            str(home / "storage")
        )


S3_SCRIPT = """
from dagster import DagsterInstance, job, op
@op
def speak():
    print("said by a step")
@job
def speaking():
    speak()
with DagsterInstance.get() as instance:
    speaking.execute_in_process(instance=instance)
"""


@pytest.mark.thorough
def test_compute_logs_in_s3_work_as_documented(tmp_path, new_bucket):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "dagster.md").read_text(
        encoding="utf-8"
    )
    (block,) = re.findall(r"```yaml\n(compute_logs:.*?)```", page, re.DOTALL)
    shown = yaml.safe_load(block)
    place = {
        "bucket": new_bucket.name,
        "endpoint_url": new_bucket.endpoint,
        "local_dir": str(tmp_path / "local"),
    }
    shown["compute_logs"]["config"] |= place
    (tmp_path / "dagster.yaml").write_text(
        yaml.safe_dump(shown | {"telemetry": {"enabled": False}})
    )
    keys = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    environment = os.environ | keys | {"DAGSTER_HOME": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", S3_SCRIPT], env=environment, capture_output=True, check=True
    )
    listed = new_bucket.client.list_objects_v2(Bucket=new_bucket.name)["Contents"]
    (out,) = [item["Key"] for item in listed if item["Key"].endswith(".out")]
    assert re.fullmatch(r"caf-pipeline/storage/[0-9a-f-]{36}/compute_logs/\w+\.out", out)
    assert (
        b"said by a step"
        in new_bucket.client.get_object(Bucket=new_bucket.name, Key=out)["Body"].read()
    )
