"""The component in a Dagster project: scaffold, load, translation, subset, subclass."""

import re
from pathlib import Path

import click
import pytest
import yaml
from dagster import AssetKey, AssetSpec, build_op_context
from dagster.components.testing import create_defs_folder_sandbox

from caf_pipeline import S3ArchiveComponent
from caf_pipeline.defs.translation import ArchiveAsset
from caf_pipeline.errors import SettingsError
from caf_pipeline.naming import ASSETS, LAUNCH_SENSOR, RUN

pytestmark = [  # Dagster's own warnings, at loading
    pytest.mark.filterwarnings("ignore::dagster.BetaWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

HOW_TO = Path(__file__).parents[1] / "docs" / "how-to" / "dagster-project.md"
TYPE = "caf_pipeline.S3ArchiveComponent"


@pytest.fixture
def project():
    with create_defs_folder_sandbox() as sandbox:
        yield sandbox


def scaffold(project, bucket="my-photos", folder="archive", **options):
    return project.scaffold_component(S3ArchiveComponent, folder, {"bucket": bucket, **options})


def load(project, folder, **attributes):
    """Write defs.yaml and return the definitions."""
    written = {"type": TYPE, "attributes": attributes}
    (folder / "defs.yaml").write_text(yaml.safe_dump(written))
    with project.load_component_and_build_defs(folder) as (_, defs):
        return defs


def nodes(defs):
    graph = defs.resolve_asset_graph()
    return {key.to_user_string(): graph.get(key) for key in graph.get_all_asset_keys()}


def test_scaffold_writes_defs_and_settings(project):
    folder = scaffold(project)
    written = yaml.safe_load((folder / "defs.yaml").read_text())
    assert written["attributes"] == {"config": "caf.toml"}
    assert "[sources.my-photos]" in (project.project_root / "caf.toml").read_text()


def test_scaffolded_bucket_loads_without_a_key(project):
    folder = scaffold(project)
    with project.load_component_and_build_defs(folder) as (component, defs):
        assert isinstance(component, S3ArchiveComponent)
        assert nodes(defs).keys() == {f"my-photos/{name}" for name in ASSETS}
        defs.get_repository_def().load_all_definitions()
        assert defs.executor is None


def test_second_scaffold_adds_its_source_alone(project):
    folder = scaffold(project)
    settings = project.project_root / "caf.toml"
    settings.write_text(f"# my comment\n{settings.read_text()}")
    with pytest.raises(SystemExit) as ended:
        scaffold(project, "other", "archive2", source="videos")
    assert (ended.value.code, folder.with_name("archive2").exists()) == (0, False)
    assert settings.read_text().startswith("# my comment\n")
    with project.load_component_and_build_defs(folder) as (_, defs):
        assert {key.partition("/")[0] for key in nodes(defs)} == {"my-photos", "videos"}


def test_scaffold_refuses_another_bucket_of_a_source(project):
    scaffold(project)
    with pytest.raises(click.ClickException, match="my-photos"):
        scaffold(project, "other", "archive2", source="my-photos")
    assert not (project.defs_folder_path / "archive2").exists()


def test_translation_changes_what_dagster_shows(project):
    defs = load(
        project,
        scaffold(project),
        translation={
            "key": "lake/{{ source }}/{{ asset }}",
            "group_name": "lake_{{ asset }}",
            "owners": ["team:platform"],
            "tags": {"tier": "cold"},
            "description": "of {{ source }}",
        },
    )
    shown = nodes(defs)
    chunk = shown["lake/my-photos/caf_chunk"]
    assert [key.to_user_string() for key in chunk.parent_keys] == ["lake/my-photos/chunk_plan"]
    assert (chunk.group_name, chunk.owners) == ("lake_caf_chunk", ["team:platform"])
    assert chunk.tags.items() >= {"tier": "cold", "dagster/kind/s3": ""}.items()
    assert chunk.description == "of my-photos"


def test_translated_checks_and_jobs_are_of_the_new_keys(project):
    defs = load(project, scaffold(project), translation={"key": "lake/{{ source }}/{{ asset }}"})
    keys = {check.asset_key.path[0] for check in defs.resolve_asset_graph().asset_check_keys}
    assert keys == {"lake"}
    for job in defs.jobs:
        assert defs.resolve_job_def(job.name)


def test_subset_of_the_sources_is_defined(project):
    folder = scaffold(project)
    with pytest.raises(SystemExit):
        scaffold(project, "other", "archive2")
    assert {key.partition("/")[0] for key in nodes(load(project, folder, sources=["other"]))} == {
        "other"
    }


@pytest.mark.parametrize("attributes", [{"sources": ["absent"]}, {"config": "absent.toml"}])
def test_missing_source_or_file_is_a_settings_error(project, attributes):
    folder = scaffold(project)
    with pytest.raises(Exception, match="archive") as caught:
        load(project, folder, **attributes)
    assert isinstance(caught.value.__cause__, SettingsError)
    assert "absent" in str(caught.value.__cause__)


def test_schedules_have_the_given_cron_expressions(project):
    crons = {"plan": "0 4 * * *", "look": "5 * * * *"}
    defs = load(project, scaffold(project), schedules=crons)
    assert {schedule.cron_schedule for schedule in defs.schedules} >= set(crons.values())


def write_two(project, first, second):
    """Write two components of a file with the sources `my-photos` and `other`."""
    folder = scaffold(project)
    with pytest.raises(SystemExit):
        scaffold(project, "other", "archive2")
    settings = project.project_root / "caf.toml"
    settings.with_name("copy.toml").write_text(settings.read_text())
    for name, attributes in (("archive", first), ("archive2", second)):
        written = {"type": TYPE, "attributes": attributes}
        folder.with_name(name).mkdir(exist_ok=True)
        (folder.with_name(name) / "defs.yaml").write_text(yaml.safe_dump(written))
    return folder


@pytest.mark.parametrize("second", [{"sources": ["other"]}, {}], ids=["named", "rest"])
def test_components_of_one_file_share_what_serves_all(project, second):
    folder = write_two(project, {"sources": ["my-photos"]}, second)
    with project.build_all_defs() as defs:
        defs.get_repository_def().load_all_definitions()
        assert {key.partition("/")[0] for key in nodes(defs)} == {"my-photos", "other"}
        assert [sensor.name for sensor in defs.sensors].count(LAUNCH_SENSOR) == 1
    with project.load_component_and_build_defs(folder.with_name("archive2")) as (_, defs):
        assert {key.partition("/")[0] for key in nodes(defs)} == {"other"}


def test_each_component_translates_and_executes_its_own_sources(project):
    key = {"key": "lake/{{ source }}/{{ asset }}"}
    write_two(project, {"sources": ["my-photos"], "translation": key}, {})
    with project.build_all_defs() as defs:
        assert {key.partition("/")[0] for key in nodes(defs)} == {"lake", "other"}
        executes = defs.resources[RUN].executes
        assert {name: execute.__self__.sources for name, execute in executes.items()} == {
            "my-photos": ["my-photos"],
            "other": None,
        }


@pytest.mark.parametrize(
    ("second", "named"), [({}, "my-photos"), ({"config": "copy.toml"}, "copy.toml")]
)
def test_components_that_do_not_merge_are_a_settings_error(project, second, named):
    write_two(project, {}, second)
    with pytest.raises(Exception, match="archive") as caught, project.build_all_defs():
        pass
    assert isinstance(caught.value.__cause__, SettingsError)
    assert named in str(caught.value.__cause__)


def example(containing):
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), re.DOTALL)
        if containing in block
    ]
    return code


def test_subclass_of_the_page_changes_specs_and_steps():
    names = {}
    exec(example("class PhotoArchive"), names)
    archive = names["PhotoArchive"]()
    spec = archive.get_asset_spec(AssetSpec("x"), ArchiveAsset("my-photos", "caf_chunk"))
    assert spec.metadata["runbook"].url.endswith("/my-photos")
    context = build_op_context()
    assert archive.execute(context, lambda: 7) == 7


def test_assets_of_the_page_follow_the_archive(project):
    folder = scaffold(project)
    (folder.with_name("mine.py")).write_text(example("def cover"))
    with project.build_all_defs() as defs:
        graph = defs.resolve_asset_graph()
        mine = graph.get(AssetKey("catalogued_chunk"))
        located = graph.get(AssetKey(["my-photos", "file_locations"]))
        assert mine.parent_keys == {located.key}
        assert mine.partitions_def == located.partitions_def
        defs.get_repository_def().load_all_definitions()
