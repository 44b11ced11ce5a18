"""Resources hold no secrets, open on first use, and close after the run."""

import pytest
from botocore import UNSIGNED
from dagster import build_init_resource_context, job, op, serialize_value
from dagster_aws.s3 import S3Resource
from pydantic import SecretStr

from caf_pipeline.defs.build import build_defs
from caf_pipeline.defs.resources import build_resources
from caf_pipeline.defs.source_resource import S3SourceResource
from caf_pipeline.settings import Settings, SourceSettings
from caf_pipeline_tests.support.dagster_private import RepositorySnap

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

KEYS = {
    "access_key_id": SecretStr("AKIA-VISIBLE"),
    "secret_access_key": SecretStr("secret-visible"),
}
MINE = SourceSettings(bucket="b", endpoint_url="http://127.0.0.1:1", region="eu-south-9", **KEYS)


def in_a_step(resource):
    return resource.create_resource(build_init_resource_context())


def test_each_source_has_an_s3_resource_with_its_settings():
    resources = build_defs(
        Settings(sources={"a": MINE, "b-c": SourceSettings(bucket="b", anonymous=True)})
    ).resources
    assert set(resources) == {"caf_ledger", "caf_store", "caf_run", "caf_s3_a", "caf_s3_b_c"}
    s3 = in_a_step(resources["caf_s3_a"])
    assert isinstance(s3, S3Resource)
    assert (s3.endpoint_url, s3.region_name) == ("http://127.0.0.1:1", "eu-south-9")
    assert s3.path_style
    assert resources["caf_s3_b_c"].use_unsigned_session


def test_the_values_of_an_s3_resource_make_its_client():
    values = {
        "region_name": "af-north-7",
        "path_style": False,
        "max_attempts": 4,
        "use_unsigned_session": True,
    }
    resource = S3SourceResource(source=MINE, endpoint_url="http://127.0.0.1:2", **values)
    client = in_a_step(resource).get_client()
    assert (client.meta.endpoint_url, client.meta.region_name) == (
        "http://127.0.0.1:2",
        "af-north-7",
    )
    assert client.meta.config.s3["addressing_style"] == "auto"
    assert client.meta.config.retries["total_max_attempts"] == 4
    assert client.meta.config.signature_version is UNSIGNED


@pytest.mark.filterwarnings(
    "ignore:Property `ScheduleDefinition.environment_vars`:DeprecationWarning"
)  # of the snapshot itself
def test_dagster_shows_no_access_keys():
    resource = S3SourceResource.of(MINE)
    assert in_a_step(resource).get_client()._get_credentials().secret_key == "secret-visible"
    assert not {name for name in type(resource).model_fields if "key" in name or "token" in name}
    shown = serialize_value(
        RepositorySnap.from_def(build_defs(Settings(sources={"a": MINE})).get_repository_def())
    )
    assert "eu-south-9" in shown  # or this looks in the wrong place
    assert "visible" not in shown.lower()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("http://minio:9000", "eu-1", True, 1)),
        ({"max_attempts": 5}, ("http://minio:9000", "eu-1", True, 5)),
        ({"region_name": "eu-2"}, ("http://minio:9000", "eu-2", True, 1)),
        ({"endpoint_url": "http://other"}, ("http://other", "eu-1", True, 1)),
        ({"path_style": False}, ("http://minio:9000", "eu-1", False, 1)),
    ],
)
def test_a_value_at_launch_keeps_the_other_settings(instance, given, expected):
    state = []

    @op(required_resource_keys={"s3_x"})
    def look(context):
        source = context.resources.s3_x
        state.append(
            (source.endpoint_url, source.region_name, source.path_style, source.max_attempts)
        )
        assert source.get_client().meta.endpoint_url == source.endpoint_url

    source = SourceSettings(bucket="b", endpoint_url="http://minio:9000", region="eu-1")

    @job(resource_defs={"s3_x": S3SourceResource.of(source)})
    def looks():
        look()

    assert looks.execute_in_process(
        instance=instance, run_config={"resources": {"s3_x": {"config": given}}}
    ).success
    assert state == [expected]


@pytest.mark.thorough
def test_a_value_given_at_launch_holds_for_that_run(pipeline):
    pipeline.put(1)
    away = {"resources": {"caf_s3_my_source": {"config": {"endpoint_url": "http://127.0.0.1:1"}}}}
    result = pipeline.execute("caf_plan_my_source", run_config=away)
    (failed,) = [
        event
        for event in result.all_events
        if event.is_step_failure and "s3_inventory" in event.step_key
    ]
    assert "127.0.0.1:1" in failed.step_failure_data.user_failure_data.description


def test_only_definitions_that_read_the_bucket_require_s3():
    graph = build_defs(Settings(sources={"a": MINE})).get_repository_def().assets_defs_by_key
    needs = {
        key.path[1]: set(item.required_resource_keys) - {"io_manager"}
        for key, item in graph.items()
    }
    assert {name for name, keys in needs.items() if "caf_s3_a" in keys} == {
        "s3_inventory",
        "chunk_plan",
        "caf_chunk",
    }
    assert all({"caf_ledger", "caf_store"} <= keys for keys in needs.values())


def test_nothing_is_opened_before_a_step_asks(instance):
    @op(required_resource_keys={"caf_ledger", "caf_store", "caf_run", "caf_s3_a"})
    def asks_for_nothing():
        return None

    @job(
        resource_defs=build_resources(
            Settings(database_url=SecretStr("postgresql://127.0.0.1:1/none"), sources={"a": MINE})
        )
    )
    def idle():
        asks_for_nothing()

    assert idle.execute_in_process(instance=instance).success
