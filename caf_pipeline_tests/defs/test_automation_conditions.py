"""Declarative automation beside the sensors."""

import re
from pathlib import Path

import pytest
from dagster import (
    AssetKey,
    AssetMaterialization,
    AssetSpec,
    AutomationCondition,
    DagsterInstance,
    Definitions,
    evaluate_automation_conditions,
    with_source_code_references,
)

from caf_pipeline.defs.build import build_defs
from caf_pipeline.defs.partitions import chunk_partitions
from caf_pipeline.naming import ASSETS, DATA_VERSION_TAG
from caf_pipeline.settings import Settings, SourceSettings
from caf_pipeline_tests.support.pipeline_runs import SOURCE, with_source

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "dagster-project.md"


def conditions(*, automatic):
    sources = {SOURCE: SourceSettings(bucket="b", automatic=automatic)}
    graph = build_defs(Settings(sources=sources)).resolve_asset_graph()
    nodes = {name: graph.get(AssetKey([SOURCE, name])) for name in ASSETS}
    return {name for name, node in nodes.items() if node.automation_condition}


def test_manual_sources_have_no_condition():
    assert conditions(automatic=False) == set()


def test_automatic_sources_have_a_condition_on_plans():
    assert conditions(automatic=True) == {"chunk_plan"}


@pytest.fixture
def automatic(pipeline):
    """The pipeline with `automatic = true`, and one evaluation of its conditions."""
    pipeline = with_source(pipeline, automatic=True)
    first = evaluate_automation_conditions(pipeline.defs, pipeline.instance)
    assert first.total_requested == 0
    return pipeline, first.cursor


def requested(defs, instance, cursor, asset):
    result = evaluate_automation_conditions(defs, instance, cursor=cursor)
    return result.cursor, result.get_num_requested(asset)


def test_inventory_taken_alone_is_planned_once(automatic):
    pipeline, cursor = automatic
    plan = AssetKey([SOURCE, "chunk_plan"])
    pipeline.put(1)
    job = pipeline.defs.resolve_implicit_global_asset_job_def()
    taken = job.execute_in_process(
        instance=pipeline.instance, asset_selection=[AssetKey([SOURCE, "s3_inventory"])]
    )
    assert taken.success
    cursor, first = requested(pipeline.defs, pipeline.instance, cursor, plan)
    _, second = requested(pipeline.defs, pipeline.instance, cursor, plan)
    assert (first, second) == (1, 0)


def test_plan_of_the_sensor_is_not_repeated(automatic):
    pipeline, cursor = automatic
    pipeline.put(1)
    pipeline.plan()
    for _ in range(2):
        cursor, count = requested(
            pipeline.defs, pipeline.instance, cursor, AssetKey([SOURCE, "chunk_plan"])
        )
        assert count == 0


def example():
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), re.DOTALL)
        if "def catalogued_chunk" in block
    ]
    names = {}
    exec(code, names)
    return names["catalogued_chunk"]


@pytest.fixture
def downstream():
    """An instance with one archived chunk, and the page's asset, evaluated once."""
    mine = example()
    partitions = chunk_partitions("my-photos")
    located = AssetSpec(["my-photos", "file_locations"], partitions_def=partitions)
    defs = Definitions(assets=[located, mine])
    with DagsterInstance.ephemeral() as instance:
        archive(instance, "my-photos-1a2b3c4d-00001")
        result = evaluate_automation_conditions(defs, instance)
        yield defs, instance, result


def archive(instance, chunk):
    instance.add_dynamic_partitions(chunk_partitions("my-photos").name, [chunk])
    key = AssetKey(["my-photos", "file_locations"])
    root = {DATA_VERSION_TAG: chunk}
    instance.report_runless_asset_event(AssetMaterialization(key, partition=chunk, tags=root))


def test_example_follows_each_new_chunk_once(downstream):
    defs, instance, first = downstream
    mine = AssetKey("catalogued_chunk")
    archive(instance, "my-photos-1a2b3c4d-00002")
    second = evaluate_automation_conditions(defs, instance, cursor=first.cursor)
    assert second.get_requested_partitions(mine) == {"my-photos-1a2b3c4d-00002"}
    archive(instance, "my-photos-1a2b3c4d-00002")  # as a run of an asset backfill does
    third = evaluate_automation_conditions(defs, instance, cursor=second.cursor)
    assert third.get_num_requested(mine) == 0


def test_example_waits_until_a_planned_chunk_is_archived(downstream):
    defs, instance, first = downstream
    chunk = "my-photos-1a2b3c4d-00003"
    instance.add_dynamic_partitions(chunk_partitions("my-photos").name, [chunk])
    planned = evaluate_automation_conditions(defs, instance, cursor=first.cursor)
    assert planned.total_requested == 0
    archive(instance, chunk)
    archived = evaluate_automation_conditions(defs, instance, cursor=planned.cursor)
    assert archived.get_requested_partitions(AssetKey("catalogued_chunk")) == {chunk}


def test_example_leaves_earlier_chunks_to_a_backfill(downstream):
    _, _, first = downstream
    assert first.total_requested == 0


def test_code_references_of_a_project_cover_our_assets():
    defs = build_defs(Settings(sources={SOURCE: SourceSettings(bucket="b")}))
    for asset in with_source_code_references(defs.assets):
        for key in asset.keys:
            assert "dagster/code_references" in asset.metadata_by_key[key]


def test_a_condition_can_be_translated():
    always = AutomationCondition.missing()
    defs = build_defs(
        Settings(sources={SOURCE: SourceSettings(bucket="b")}),
        translate=lambda spec, _: spec.replace_attributes(automation_condition=always),
    )
    nodes = defs.resolve_asset_graph()
    assert nodes.get(AssetKey([SOURCE, "caf_chunk"])).automation_condition == always
