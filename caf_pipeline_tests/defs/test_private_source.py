"""What the UI shows of a private source, with and without the identity."""

import pytest
from dagster import AssetCheckSeverity, AssetKey

from caf_pipeline.defs.build import build_decrypting_defs, build_defs
from caf_pipeline.formats import age
from caf_pipeline.settings import EncryptionSettings, Settings, SourceSettings
from caf_pipeline_tests.support.pipeline_runs import ARCHIVE, with_settings, with_source

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

IDENTITY = age.new_identity()
RECIPIENT = str(IDENTITY.recipient)


def private(pipeline, **encryption):
    """The pipeline with a private source."""
    return with_settings(with_source(pipeline, public=False), encryption=encrypted(**encryption))


def encrypted(**values):
    return EncryptionSettings.model_validate({"recipients": [RECIPIENT], **values})


def archived(pipeline):
    """Archive a chunk; return the run's result and the check that reads members."""
    pipeline.put(5)
    (chunk,) = pipeline.plan()
    result = pipeline.execute(ARCHIVE, partition_key=chunk)
    assert result.success
    evaluations = {check.check_name: check for check in result.get_asset_check_evaluations()}
    assert evaluations["caf_chunk_accounts_for_plan"].passed
    return result, evaluations["caf_chunk_reads_back"]


def test_without_an_identity_no_member_is_compared(pipeline):
    _, check = archived(private(pipeline))
    assert (check.passed, check.severity) == (True, AssetCheckSeverity.WARN)
    assert "identity" in check.description
    assert not check.metadata


def test_with_the_identity_members_are_compared(pipeline):
    _, check = archived(private(pipeline, identity=IDENTITY.reveal()))
    assert (check.passed, check.description) == (True, None)
    assert check.metadata["tried"].value == 5


def test_another_identity_compares_no_member(pipeline):
    _, check = archived(private(pipeline, identity=age.new_identity().reveal()))
    assert (check.passed, check.severity) == (True, AssetCheckSeverity.WARN)
    assert not check.metadata


def test_pages_show_short_recipients_and_no_identity(pipeline):
    result, _ = archived(private(pipeline, identity=IDENTITY.reveal()))
    shown = [
        result.asset_materializations_for_node(f"caf_my_source__{asset}")[0].metadata["recipients"]
        for asset in ("caf_chunk", "stored_chunk", "file_locations")
    ]
    assert {item.value for item in shown} == {f"{RECIPIENT[:16]}…{RECIPIENT[-8:]}"}
    (chunk,) = pipeline.chunks()
    assert pipeline.ledger.chunks.recipients(chunk) == [RECIPIENT]


def test_pages_of_a_plain_chunk_say_public(pipeline):
    result, _ = archived(pipeline)
    shown = result.asset_materializations_for_node("caf_my_source__caf_chunk")[0].metadata
    assert shown["recipients"].value == "public"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"public": True}, "**Public:**"),
        ({}, "1 recipient"),
        ({"recipients": (RECIPIENT, str(age.new_identity().recipient))}, "2 recipients"),
    ],
)
def test_descriptions_say_who_can_read(source, expected):
    settings = Settings(sources={"a": {"bucket": "b", **source}}, encryption=encrypted())
    graph = build_defs(settings).resolve_asset_graph()
    for name in ("s3_inventory", "caf_chunk", "stored_chunk"):
        assert expected in graph.get(AssetKey(["a", name])).description


# --- jobs that decrypt


def job_names(settings, build=build_defs):
    return {job.name for job in build(settings).resolve_all_job_defs()}


def test_only_a_process_with_an_identity_loads_the_restore():
    private = {"a": SourceSettings(bucket="b")}
    worker = Settings(sources=private, encryption=encrypted())
    reader = Settings(sources=private, encryption=encrypted(identity=IDENTITY.reveal()))
    public = Settings(sources={"a": SourceSettings(bucket="b", public=True)})
    assert "caf_restore" in job_names(public)
    assert job_names(reader) - job_names(worker) == {"caf_restore"}


def test_a_second_code_location_has_only_the_restore():
    reader = Settings(
        sources={"a": SourceSettings(bucket="b")}, encryption=encrypted(identity=IDENTITY.reveal())
    )
    defs = build_decrypting_defs(reader)
    assert {job.name for job in defs.resolve_all_job_defs()} - {"__ASSET_JOB"} == {"caf_restore"}
    assert [*(defs.sensors or ()), *(defs.schedules or ()), *(defs.assets or ())] == []
