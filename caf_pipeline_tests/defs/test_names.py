"""Our definitions share a project with others, so that their names begin with `caf_`."""

from collections.abc import Iterator

import pytest
from dagster import (
    AssetKey,
    Definitions,
    GraphDefinition,
    OpDefinition,
    ResourceDefinition,
    ScheduleDefinition,
    asset,
    define_asset_job,
    job,
    op,
)

from caf_pipeline.defs.build import build_defs
from caf_pipeline.naming import S3_POOL, UPLOAD_POOL
from caf_pipeline.settings import Settings, SourceSettings, StoreSettings

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

SOURCES = ("photos", "my-logs")


@pytest.fixture(scope="module")
def defs() -> Definitions:
    sources = {name: SourceSettings(bucket="b", public=True) for name in SOURCES}
    return build_defs(Settings(sources=sources, store=StoreSettings(kind="jackal")))


def jobs(defs: Definitions) -> Iterator[str]:
    return (item.name for item in defs.resolve_all_job_defs() if item.name != "__ASSET_JOB")


def nodes(defs: Definitions) -> list[OpDefinition | GraphDefinition]:
    return [node for item in defs.resolve_all_job_defs() for node in item.all_node_defs]


def ops(defs: Definitions) -> Iterator[str]:
    for node in nodes(defs):
        yield node.name
        if isinstance(node, GraphDefinition):
            yield from (inner.name for inner in node.nodes)


def pools(defs: Definitions) -> Iterator[str]:
    return (node.pool for node in nodes(defs) if isinstance(node, OpDefinition) and node.pool)


def partitions(defs: Definitions) -> Iterator[str]:
    graph = defs.resolve_asset_graph()
    specs = [*graph.asset_nodes, *(graph.get(key) for key in graph.asset_check_keys)]
    return (item.partitions_def.name for item in specs if item.partitions_def)


NAMES = {
    "jobs": jobs,
    "ops": ops,
    "pools": pools,
    "partitions": partitions,
    "sensors": lambda defs: (item.name for item in defs.sensors),
    "schedules": lambda defs: (item.name for item in defs.schedules),
    "resources": lambda defs: iter(defs.resources),
    "checks": lambda defs: (key.name for key in defs.resolve_asset_graph().asset_check_keys),
}


@pytest.mark.parametrize("kind", NAMES)
def test_each_name_begins_with_caf(defs, kind):
    names = set(NAMES[kind](defs))
    assert names
    assert {name for name in names if not name.startswith("caf_")} == set()


def test_pools_and_partitions_are_all_listed(defs):
    assert set(pools(defs)) == {S3_POOL, UPLOAD_POOL}
    assert set(partitions(defs)) == {"caf_photos_chunks", "caf_my-logs_chunks"}


def test_jobs_and_sensors_name_their_source(defs):
    assert {"caf_archive_photos", "caf_plan_my_logs"} <= set(jobs(defs))
    assert {"caf_launch_chunks", "caf_new_objects_my_logs"} <= set(NAMES["sensors"](defs))
    assert "caf_reconcile_photos_daily" in set(NAMES["schedules"](defs))


def theirs() -> Definitions:
    """A project that has names like ours would be without the prefix."""

    @op(name="load_batch", required_resource_keys={"store"})
    def load_batch(context):
        return context.resources.store

    @job(name="archive_photos")
    def archive_photos():
        load_batch()

    @asset(key=["photos", "thumbnails"], deps=[AssetKey(["photos", "file_locations"])])
    def thumbnails(): ...

    @asset(key=["photos__s3_inventory"])
    def inventory(): ...

    return Definitions(
        assets=[thumbnails, inventory],
        jobs=[archive_photos, define_asset_job("plan_photos", [inventory])],
        schedules=[
            ScheduleDefinition(
                name="reconcile_photos_daily", job=archive_photos, cron_schedule="0 3 * * *"
            )
        ],
        resources={"store": ResourceDefinition.hardcoded_resource("their store")},
    )


@pytest.fixture
def merged(defs) -> Definitions:
    merged = Definitions.merge(theirs(), defs)
    merged.get_repository_def().load_all_definitions()
    return merged


def test_a_project_with_similar_names_keeps_its_job(merged):
    result = merged.resolve_job_def("archive_photos").execute_in_process()
    assert result.output_for_node("load_batch") == "their store"


def test_a_project_with_similar_names_keeps_its_schedule(merged):
    assert merged.resolve_schedule_def("reconcile_photos_daily").job_name == "archive_photos"


def test_our_jobs_load_beside_similar_names(merged, defs):
    assert set(jobs(merged)) == {*jobs(defs), "archive_photos", "plan_photos"}
