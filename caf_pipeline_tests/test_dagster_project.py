"""The component in a whole Dagster project, by the commands of `dg`."""

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.naming import ASSETS, DEAD_RUNS_SENSOR, LAUNCH_SENSOR, job_name
from caf_pipeline_tests.support.command_line import KEYS, CommandLine, opened_context
from caf_pipeline_tests.support.dagster_project import make_project
from caf_pipeline_tests.support.dagster_versions import (
    find_uv,
    install_dagster,
    oldest_dagster,
    supported_dagster,
)

pytestmark = pytest.mark.thorough

TYPE = "caf_pipeline.S3ArchiveComponent"


@pytest.fixture(scope="module", params=["installed", "oldest", "newest"])
def project(tmp_path_factory, request):
    """A project with the component, scaffolded for the bucket of the source `photos`.

    Its Dagster is the installed version, the oldest that the package allows, and the newest that
    the registry has.
    """
    packages = None
    if request.param != "installed":
        packages = tmp_path_factory.mktemp("packages")
        requirement = oldest_dagster() if request.param == "oldest" else supported_dagster()
        install_dagster(requirement, packages)
    project = make_project(tmp_path_factory.mktemp("project"), packages)
    options = ("--bucket", "my-photos", "--source", "photos", "--store-folder", "kept")
    project.dg("scaffold", "defs", TYPE, "archive", *options)
    return project


def test_scaffolded_component_is_checked_and_listed(project):
    project.dg("check", "defs")
    listed = json.loads(project.dg("list", "defs", "--json").stdout)
    names = {item.get("asset_key") or item["key"] for item in listed["assets"]}  # "key" in 1.12
    assert names == {"numbers", *(f"photos/{name}" for name in ASSETS)}
    assert {"archive_photos", job_name("photos", "archive")} <= {
        item["name"] for item in listed["jobs"]
    }


def test_component_is_listed_once(project):
    assert project.dg("list", "components").stdout.count("S3ArchiveComponent") == 1


def test_existing_definitions_still_run(project):
    assert "RUN_SUCCESS" in project.dg("launch", "--job", "archive_photos").stderr
    assert "RUN_SUCCESS" in project.dg("launch", "--assets", "numbers").stderr


def test_bucket_is_archived_in_the_project(project, new_bucket):
    new_bucket.put("a.txt", b"an object")
    settings = project.root / "caf.toml"
    settings.write_text(
        settings.read_text().replace('"my-photos"', f'"{new_bucket.name}"')
        + f'public = true\nendpoint_url = "{new_bucket.endpoint}"\n'
    )
    project.dg("launch", "--job", job_name("photos", "plan"))
    caf = CommandLine(project.defs, KEYS)  # which finds caf.toml in a folder above
    with opened_context(caf, "photos") as context:
        (chunk,) = context.ledger.chunks.list("photos")
    project.dg("launch", "--job", job_name("photos", "archive"), "--partition", chunk.name)
    with opened_context(caf, "photos") as context:
        assert context.ledger.chunks.get(chunk.name).state is ChunkState.LOCATED
    assert caf("get", "photos", "a.txt").out == b"an object"
    new_bucket.put("b.txt", b"another object")
    project.dg("launch", "--assets", "photos/s3_inventory,photos/chunk_plan")
    for sensor in (LAUNCH_SENSOR, DEAD_RUNS_SENSOR):
        shown = project.dg("sensor", "preview", sensor, "-m", "team.definitions", program="dagster")
        assert "Exception" not in shown.stdout + shown.stderr


def test_two_components_of_one_file_are_checked(project):
    second = project.defs / "archive2" / "defs.yaml"
    second.parent.mkdir()
    written = {"type": TYPE, "attributes": {"config": "caf.toml", "sources": ["videos"]}}
    second.write_text(json.dumps(written))  # which is YAML, too
    settings = project.root / "caf.toml"
    before = settings.read_text()
    settings.write_text(f'{before}\n[sources.videos]\nbucket = "my-videos"\n')
    try:
        project.dg("check", "defs")
        listed = json.loads(project.dg("list", "defs", "--json").stdout)
    finally:
        settings.write_text(before)
        shutil.rmtree(second.parent)
    keys = {item.get("asset_key") or item["key"] for item in listed["assets"]}
    assert keys >= {f"{source}/caf_chunk" for source in ("photos", "videos")}
    sensors = [item["name"] for item in listed["sensors"]]
    assert (sensors.count(LAUNCH_SENSOR), sensors.count(DEAD_RUNS_SENSOR)) == (1, 1)


def locked_versions(folder):
    packages = tomllib.loads((folder / "uv.lock").read_text())["package"]
    return {package["name"]: package["version"] for package in packages}


def test_adding_the_package_keeps_locked_versions(tmp_path):
    uv, dagster = find_uv(), oldest_dagster()
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "team"\nversion = "0"\nrequires-python = ">=3.11,<3.15"\n'
        f'dependencies = ["{dagster}"]\n'
    )

    def run(*arguments):
        return subprocess.run(
            [uv, *arguments, "--quiet"], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    locked = run("lock")
    if locked.returncode:
        pytest.skip(f"no package registry answers: {locked.stderr[-500:]}")
    before = locked_versions(tmp_path)
    root = Path(__file__).parents[1]
    assert run("build", "--wheel", "--out-dir", str(tmp_path / "dist"), str(root)).returncode == 0
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    added = run("add", "--no-sync", str(wheel), dagster)
    assert added.returncode == 0, added.stderr
    after = locked_versions(tmp_path)
    assert {name: after[name] for name in before} == before
    assert "caf-pipeline" in after
