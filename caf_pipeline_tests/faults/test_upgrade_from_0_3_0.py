"""Version 0.3.0 itself begins, is killed, and the present code goes on with its ledger, staging, Dagster home and settings."""

import os
import shutil
import signal
from collections import Counter

import pytest

from caf_pipeline.ledger.database import embedded_url
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.settings import Settings
from caf_pipeline_tests.faults import old_version
from caf_pipeline_tests.faults.world import COPIES, SOURCE
from caf_pipeline_tests.support.command_line import FOREIGN, CommandLine
from caf_pipeline_tests.support.jackal_command_line import S3_KEYS
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not old_version.history_has_it(), reason=f"the history does not reach back to {old_version.VERSION}"),
]

KILLED = -signal.SIGKILL
OBJECTS = 12
OBJECT_BYTES = 150_000  # three ranged GETs
TARGET_SIZE = 700_000  # a chunk of four of them

SETTINGS = """
home = "home"
[sources.{source}]
bucket = "{bucket}"
endpoint_url = "{endpoint}"
public = true
target_size = {target_size}
[store]
kind = "jackal"
[packing]
part_size = "64KiB"
window_size = "1MiB"
fetch_threads = 4
[jackal]
lcd = {lcd}
chain_id = "{chain_id}"
copies = {copies}
proof_seconds = 60
keep_staged_windows = 0
allow_private_addresses = true
"""
"""A caf.toml in the words of 0.3.0."""

MOMENTS = {
    "packing": ("caf_pipeline.s3:S3Source.read:before:18", "packing"),  # of the second chunk, behind a checkpoint
    "sealed": ("caf_pipeline.archive:post_file:before:2", "sealed"),
    "a post is signed": ("caf_pipeline.jackal.chain:Chain.broadcast:before:2", "posting"),
    "a post is sent": ("caf_pipeline.jackal.chain:Chain.broadcast:after:2", "posting"),
    "posted": ("caf_pipeline.archive:upload_chunk:before:2", "posted"),
    "uploading": ("caf_pipeline.jackal.uploads:Uploads.put:before:2", "uploading"),
    "verified": ("caf_pipeline.ledger:PostgresLedger.load_locations:before:2", "verified"),
}
"""When the old run is killed, and the state in which it leaves one of three chunks: the second, where none was tried again."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The code of 0.3.0."""
    return old_version.extract(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def old_caf(tree):
    """What runs the old `caf`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    with old_version.OldVersion(tree, environment) as running:
        yield running


@pytest.fixture
def old_world(new_world, empty_database_url):
    """A bucket of twelve objects, and a folder with a caf.toml of 0.3.0."""
    world = new_world(database_url=empty_database_url)
    for number in range(OBJECTS):
        world.put(f"object-{number:02d}", bytes([number]) * OBJECT_BYTES)
    return world


@pytest.fixture
def caf(old_world):
    """`caf` in that folder."""
    words = old_world.values["jackal"]["mnemonic"]
    caf = CommandLine(
        old_world.folder,
        S3_KEYS | {"JACKAL_MNEMONIC": words, "CAF_STORE__KIND": "jackal", "CAF_DATABASE_URL": old_world.database_url},
    )
    network, bucket = old_world.network, old_world.bucket
    caf.settings(
        SETTINGS.format(
            source=SOURCE,
            bucket=bucket.name,
            endpoint=bucket.endpoint,
            target_size=TARGET_SIZE,
            lcd=list(network.lcds),
            chain_id=network.chain_id,
            copies=COPIES,
        ).replace("'", '"')
    )
    return caf


@pytest.fixture
def run_old(old_caf, caf):
    """Run the old `caf run`; return its exit status and what it said."""

    def run(moment=""):
        environment, seconds = caf.variables(), PATIENCE_SECONDS
        return old_caf.run("run", "--source", SOURCE, moment=moment, folder=caf.folder, environment=environment, seconds=seconds)

    return run


def chunks_of(world):
    """Each chunk's state, Merkle root and start, by its name."""
    rows = world.query("SELECT name, state, merkle_root, start FROM caf_files ORDER BY name")
    return {name: (state, root, start) for name, state, root, start in rows}


def assert_gone_on_with(world, before):
    """All is located and right, nothing twice; what was sealed before has its root still, and what was posted its start."""
    world.check()
    after = chunks_of(world)
    assert {state for state, _, _ in after.values()} == {"located"}
    for name, (_, root, start) in before.items():
        assert root in (None, after[name][1]), name
        assert start in (None, after[name][2]), name
    state = world.network.state()
    assert int(state["accounts"][world.address]["sequence"]) == len(after)
    assert set(Counter(one["merkle"] for one in state["files"] if one["owner"] == world.address).values()) == {1}


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_version_0_3_0_left_when_it_was_killed_is_finished(tree, run_old, old_world, caf, moment):
    dagster_home = caf.folder / "home" / "dagster"
    dagster_home.mkdir(parents=True)
    shutil.copy(tree / "dagster.yaml", dagster_home)  # an operator's own: it names the classes where 0.3.0 had them
    fatal, state = MOMENTS[moment]
    status, said = run_old(fatal)
    assert status == KILLED, said
    before = chunks_of(old_world)
    assert state in {one for one, _, _ in before.values()}
    done = caf("run", "--source", SOURCE)
    assert done.status == 0, done.err
    assert "was killed earlier" in done.err
    assert_gone_on_with(old_world, before)


def test_the_embedded_database_and_dagster_home_of_version_0_3_0_are_gone_on_with(tree, run_old, old_world, caf):
    del caf.environment["CAF_DATABASE_URL"]
    home = caf.folder / "home"
    try:
        status, said = run_old(MOMENTS["a post is sent"][0])
        assert status == KILLED, said
        assert (home / "dagster" / "dagster.yaml").readlink().is_relative_to(tree)
        old_world.database_url = embedded_url(Settings(home=home))
        before = chunks_of(old_world)
        assert "posting" in {state for state, _, _ in before.values()}
        done = caf("run", "--source", SOURCE)
        assert done.status == 0, done.err
        assert_gone_on_with(old_world, before)
    finally:
        embedded_server(home / "postgres").close()


def test_what_version_0_3_0_archived_needs_no_work(run_old, old_world, caf):
    status, said = run_old()
    assert status == 0, said
    before = chunks_of(old_world)
    assert {state for state, _, _ in before.values()} == {"located"}
    done = caf("run", "--source", SOURCE)
    assert done.status == 0, done.err
    assert chunks_of(old_world) == before
    assert_gone_on_with(old_world, before)
