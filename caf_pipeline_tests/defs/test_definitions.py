"""Dagster's tools load the definitions in a process of their own."""

import subprocess
import sys

import pytest
from dagster import AssetKey

from caf_pipeline.automation.asset_keys import DEFAULT_KEYS
from caf_pipeline.defs.asset_checks import source_checks
from caf_pipeline.defs.build import build_defs
from caf_pipeline.defs.naming import ASSETS, CHUNK_IS_PROVEN, LOCATION_NAME
from caf_pipeline.settings import Settings, SourceSettings


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
    specs = {
        spec.name: spec
        for check in source_checks("a", DEFAULT_KEYS, on_jackal=on_jackal)
        for spec in check.check_specs
    }
    assert ("chain" in specs[CHUNK_IS_PROVEN].description) is on_jackal


def test_all_that_a_code_server_loads_is_loaded():
    sources = {"a": SourceSettings(bucket="b"), "b-c": SourceSettings(bucket="b")}
    build_defs(Settings(sources=sources)).get_repository_def().load_all_definitions()


def test_the_locations_name_is_the_same_everywhere():
    import tomllib
    from pathlib import Path

    import yaml

    root = Path(__file__).parents[2]
    (loaded,) = yaml.safe_load((root / "workspace.yaml").read_text())["load_from"]
    project = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["dg"]["project"]
    assert loaded["python_module"] == {
        "module_name": "caf_pipeline.definitions",
        "location_name": LOCATION_NAME,
    }
    assert project["code_location_name"] == LOCATION_NAME
