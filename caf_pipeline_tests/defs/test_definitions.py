"""Dagster's tools load the definitions in a process of their own."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from dagster import AssetKey

from caf_pipeline.defs.asset_checks import chunk_checks
from caf_pipeline.defs.build import build_defs
from caf_pipeline.naming import ASSETS, LOCATION_NAME
from caf_pipeline.settings import Settings, SourceSettings

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]


def load(tmp_path, toml: str, after: str = "") -> subprocess.CompletedProcess[str]:
    (tmp_path / "caf.toml").write_text(toml)
    script = f"from caf_pipeline.definitions import defs\n{after}"
    return subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )


@pytest.mark.thorough
def test_loading_asks_neither_network_nor_database_and_leaves_nothing_behind(tmp_path):
    no_network = "[sources.demo]\nbucket = 'b'\nendpoint_url = 'http://127.0.0.1:1'\n"
    done = load(tmp_path, no_network, "defs.get_repository_def()")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["caf.toml"]


def test_a_bad_setting_is_one_sentence_with_its_hint(tmp_path):
    done = load(tmp_path, "[sources.demo]\nbuckets = 'b'\n")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("caf_pipeline.errors.SettingsError: ")
    assert "sources.demo.buckets" in last
    assert "During handling" not in done.stderr


def test_each_source_has_its_own_group_of_the_same_assets():
    sources = {"a": SourceSettings(bucket="b", owner="team:x"), "b-c": SourceSettings(bucket="b")}
    graph = build_defs(Settings(sources=sources)).resolve_asset_graph()
    for source, group in (("a", "a"), ("b-c", "b_c")):
        for name in ASSETS:
            node = graph.get(AssetKey([source, name]))
            assert node.group_name == group
            assert node.kinds
            assert (
                node.description_or_default
                if hasattr(node, "description_or_default")
                else node.description
            )
    assert graph.get(AssetKey(["a", "caf_chunk"])).owners == ["team:x"]


@pytest.mark.parametrize("on_jackal", [True, False])
def test_the_proof_check_describes_its_store(on_jackal):
    _, proven, _ = chunk_checks("a", on_jackal=on_jackal)
    assert ("chain" in proven.description) is on_jackal


def test_all_that_a_code_server_loads_is_loaded():
    sources = {"a": SourceSettings(bucket="b"), "b-c": SourceSettings(bucket="b")}
    build_defs(Settings(sources=sources)).get_repository_def().load_all_definitions()


@pytest.mark.parametrize("store", ["jackal", "directory"])
def test_lists_of_the_ui_show_no_raw_markdown(store):
    settings = Settings(sources={"a": SourceSettings(bucket="b", inventory="s3://c/d/b/e/")})
    kind = settings.store.model_copy(update={"kind": store})
    defs = build_defs(settings.model_copy(update={"store": kind}))
    checks = [spec for item in [*defs.assets, *defs.asset_checks] for spec in item.check_specs]
    for item in [*checks, *defs.jobs, *defs.sensors, *defs.schedules]:
        assert item.description
        assert not {"`", "**"} & set(re.findall(r"`|\*\*", item.description))


def test_the_locations_name_is_the_same_everywhere():
    root = Path(__file__).parents[2]
    (loaded,) = yaml.safe_load((root / "workspace.yaml").read_text())["load_from"]
    project = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["dg"]["project"]
    assert loaded["python_module"] == {
        "module_name": "caf_pipeline.definitions",
        "location_name": LOCATION_NAME,
    }
    assert project["code_location_name"] == LOCATION_NAME


def sources_of_the_page():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "sizing.md"
    (code,) = re.findall(r"```toml\n(.*?photos-rest.*?)```", page.read_text(), re.DOTALL)
    return tomllib.loads(code)["sources"]


def test_sources_by_prefix_have_their_own_partitions():
    sources = {name: SourceSettings(**item) for name, item in sources_of_the_page().items()}
    graph = build_defs(Settings(sources=sources)).resolve_asset_graph()
    names = {graph.get(AssetKey([source, "caf_chunk"])).partitions_def.name for source in sources}
    assert len(names) == 3


def test_sources_by_prefix_plan_each_object_once(pipeline):
    for key in ("2025/a", "2026/b", "2027/c", "d"):
        pipeline.bucket.put(key, b"x")
    source_settings = pipeline.settings.sources["my-source"]
    names = ("bucket", "endpoint_url", "access_key_id", "secret_access_key", "public")
    same = {name: getattr(source_settings, name) for name in names}
    sources = {
        source: SourceSettings(**item | same) for source, item in sources_of_the_page().items()
    }
    settings = pipeline.settings.model_copy(update={"sources": sources})
    defs = build_defs(settings)
    for source in sources:
        job = defs.resolve_job_def(f"caf_plan_{source.replace('-', '_')}")
        assert job.execute_in_process(instance=pipeline.instance).success
    claimed = {name: pipeline.ledger.chunks.account(name).claimed_objects for name in sources}
    assert claimed == {"photos-2025": 1, "photos-2026": 1, "photos-rest": 2}
