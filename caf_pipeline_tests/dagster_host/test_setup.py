"""`caf setup`: what it creates and leaves alone, and the limits for a machine."""

import json

import pytest
from dagster import DagsterInstance
from pydantic import SecretStr

from caf_pipeline.dagster_host.home import dagster_home
from caf_pipeline.dagster_host.setup import Machine, computed_limits, setup_command, this_machine
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.naming import S3_POOL, UPLOAD_POOL
from caf_pipeline.settings import JackalSettings, PackingSettings, Settings, SourceSettings

pytest_plugins = ["caf_pipeline_tests.support.dagster_home"]

GIB = 1 << 30
LARGE = Machine(cores=16, memory_bytes=64 * GIB, staging_bytes=10_000 * GIB)


def limits_of(instance: DagsterInstance) -> dict[str, int]:
    return {item.name: item.limit for item in instance.event_log_storage.get_pool_limits()}


def done(capsys, settings, **options):
    """Run setup; return the change of the home, and the change and limit of each pool."""
    assert setup_command(settings=settings, json=True, **options) == 0
    output = json.loads(capsys.readouterr().out)
    return output["change"], {
        item["pool"]: (item["change"], item["limit"]) for item in output["pools"]
    }


def test_setup_is_idempotent(home_settings, capsys):
    settings = home_settings.model_copy(update={"packing": PackingSettings(staging_limit=60 * GIB)})
    expected = {
        pool: limit
        for pool, (limit, _) in computed_limits(this_machine(settings), settings, 8).items()
    }
    would = done(capsys, settings, dry_run=True)
    assert not dagster_home(settings).exists()
    assert (
        would
        == ("made", {pool: ("set", limit) for pool, limit in expected.items()})
        == done(capsys, settings)
    )
    with open_instance(settings) as instance:
        assert limits_of(instance) == expected
    assert done(capsys, settings) == (
        "unchanged",
        {pool: ("unchanged", limit) for pool, limit in expected.items()},
    )
    assert setup_command(settings=settings) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == f"left {dagster_home(settings)} unchanged"
    assert output[1].startswith(f"left pool caf_s3 at {expected[S3_POOL]} (")


@pytest.mark.parametrize(
    ("cpu", "cores"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", None)]
)
def test_the_limits_of_a_container_count(home_settings, tmp_path, cpu, cores):
    whole = this_machine(home_settings, cgroup=tmp_path)
    assert whole == this_machine(home_settings)
    (tmp_path / "cpu.max").write_text(f"{cpu}\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert this_machine(home_settings, cgroup=tmp_path).memory_bytes == whole.memory_bytes
    (tmp_path / "memory.max").write_text(f"{1 << 20}\n")
    limited = this_machine(home_settings, cgroup=tmp_path)
    assert (limited.memory_bytes, limited.cores) == (1 << 20, cores or whole.cores)


def test_custom_limits_and_dagster_yaml_stay_unless_reset(instance, home_settings, capsys):
    original = dagster_home(home_settings) / "dagster.yaml"
    text = original.read_text()
    original.unlink()
    original.write_text(text.replace("max_concurrent_runs: 8", "max_concurrent_runs: 1"))
    instance.event_log_storage.set_concurrency_slots(S3_POOL, 3)
    instance.event_log_storage.initialize_concurrency_limit_to_default(
        UPLOAD_POOL
    )  # as the first step in it does
    assert done(capsys, home_settings) == ("kept", {S3_POOL: ("kept", 3), UPLOAD_POOL: ("set", 1)})
    assert limits_of(instance) == {S3_POOL: 3, UPLOAD_POOL: 1}
    assert setup_command(settings=home_settings) == 0
    out = capsys.readouterr().out
    assert "left pool caf_s3 at 3" in out
    assert "1 (1 concurrent run" in out
    would = done(capsys, home_settings, reset=True, dry_run=True)
    assert limits_of(instance)[S3_POOL] == 3
    assert (
        would
        == done(capsys, home_settings, reset=True)
        == ("kept", {S3_POOL: ("set", 1), UPLOAD_POOL: ("unchanged", 1)})
    )
    assert limits_of(instance)[S3_POOL] == 1
    assert not original.is_symlink()


@pytest.mark.parametrize(
    ("machine", "runs", "limits"),
    [
        (LARGE, 0, (16, 4)),
        (LARGE, 8, (8, 4)),
        (LARGE, 2, (2, 2)),
        (Machine(2, 64 * GIB, 10_000 * GIB), 8, (2, 4)),
        (Machine(16, 2 * GIB, 10_000 * GIB), 8, (3, 3)),
        (Machine(16, 64 * GIB, 100 * GIB), 8, (3, 3)),
        (Machine(1, GIB // 4, GIB), 8, (1, 1)),
    ],
)
def test_the_scarcest_resource_sets_the_limit(machine, runs, limits):
    result = computed_limits(machine, Settings(), runs)
    assert (result[S3_POOL][0], result[UPLOAD_POOL][0]) == limits


@pytest.mark.parametrize(("mib", "limit"), [(0, 4), (1_000, 4), (500, 3), (300, 1), (20, 1)])
def test_bandwidth_limits_concurrent_uploads(mib, limit):
    jackal = JackalSettings(
        bandwidth=mib << 20, copies=3, upload_seconds=600, mnemonic=SecretStr("")
    )
    sources = {
        "small": SourceSettings(bucket="b", target_size=GIB),
        "large": SourceSettings(bucket="b", target_size=30 * GIB),
    }
    result = computed_limits(LARGE, Settings(jackal=jackal, sources=sources), 8)
    assert (result[S3_POOL][0], result[UPLOAD_POOL][0]) == (8, limit)
