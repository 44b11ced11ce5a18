"""`caf ui`: what it refuses. The tests of the tutorial open a UI with it."""

import os
import socket

import pytest

from caf_pipeline.dagster_host.team_project import team_project
from caf_pipeline.dagster_host.ui import HOST
from caf_pipeline.system.child_environment import child_environment
from caf_pipeline_tests.support.command_line import CommandLine, expect_error
from caf_pipeline_tests.support.free_ports import free_port

PROJECT = '[tool.dg.project]\nroot_module = "{}"\n'


@pytest.fixture
def caf(tmp_path):
    command_line = CommandLine(tmp_path, {})
    command_line.settings('[sources.src]\nbucket = "b"\npublic = true\n')
    return command_line


def test_a_project_has_its_own_ui(caf, tmp_path):
    (tmp_path / "pyproject.toml").write_text(PROJECT.format("team"))
    expect_error(caf("ui"), 2, str(tmp_path), "dg dev")


@pytest.mark.parametrize(
    ("text", "is_other"),
    [
        (PROJECT.format("team"), True),
        (PROJECT.format("caf_pipeline"), False),
        ("[tool.ruff]\n", False),
        ("[", False),
    ],
    ids=["another", "ours", "no project", "not TOML"],
)
def test_nearest_project_counts(tmp_path, text, is_other):
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "archive").mkdir()
    project = team_project(tmp_path / "archive")
    assert (project and project.root) == (tmp_path if is_other else None)


def test_a_port_in_use_is_refused(caf, tmp_path):
    with socket.create_server((HOST, 0)) as server:
        port = str(server.getsockname()[1])
        expect_error(caf("ui", "--port", port), 2, port, "--port")
    assert not (tmp_path / ".caf").exists()


def test_processes_of_dagster_have_no_fork_handlers_of_grpc(caf, monkeypatch):
    environments = []
    monkeypatch.setattr(
        os, "execv", lambda *_: environments.extend([dict(os.environ), child_environment()])
    )
    assert caf("ui", "--port", str(free_port())).status == 0
    assert [variables["GRPC_ENABLE_FORK_SUPPORT"] for variables in environments] == ["0", "0"]


def test_missing_extra_is_named(caf, monkeypatch):
    monkeypatch.setattr("caf_pipeline.dagster_host.ui.find_spec", lambda _: None)
    expect_error(caf("ui"), 1, "dagster-webserver", "pip install 'caf-pipeline[host]'")
