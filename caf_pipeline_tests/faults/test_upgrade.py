"""A run of an older version is killed; the present code continues with its files."""

import signal
from collections import Counter

import pytest

from caf_pipeline.errors import ObjectReadFailed
from caf_pipeline.packing.journal import format as journal
from caf_pipeline.steps import chunk_steps
from caf_pipeline_tests.faults import old_version
from caf_pipeline_tests.faults.world import COPIES, SOURCE
from caf_pipeline_tests.support.command_line import CommandLine
from caf_pipeline_tests.support.jackal_command_line import S3_KEYS
from caf_pipeline_tests.support.run_contexts import archive_chunk

GROUP = "An upgrade with runs in flight"
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
[jackal]
lcd = {lcd}
chain_id = "{chain_id}"
copies = {copies}
proof_seconds = 60
keep_staged_windows = 0
allow_private_addresses = true
"""

MOMENTS = {
    "sealed": ("caf_pipeline.ledger.chunk_moves:ChunkMoves.seal:after:2", "sealed"),
    "a post is sent": ("caf_pipeline.store.jackal.chain:Chain.broadcast:after:2", "posting"),
    "verified": ("caf_pipeline.ledger.chunk_moves:ChunkMoves.load_locations:before:2", "verified"),
}
"""When the old run is killed, and the second chunk's state then."""


@pytest.fixture(scope="module")
def old_tree(tmp_path_factory):
    return old_version.extract(tmp_path_factory.mktemp("old"))


@pytest.fixture
def old_world(new_world, empty_database_url):
    """A bucket of twelve objects, and a folder with a caf.toml."""
    world = new_world(database_url=empty_database_url)
    for number in range(OBJECTS):
        world.put(f"object-{number:02d}", bytes([number]) * OBJECT_BYTES)
    return world


@pytest.fixture
def caf(old_world):
    words = old_world.values["jackal"]["mnemonic"]
    variables = {
        "JACKAL_MNEMONIC": words,
        "CAF_STORE__KIND": "jackal",
        "CAF_DATABASE_URL": old_world.database_url,
    }
    caf = CommandLine(old_world.folder, S3_KEYS | variables)
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


def chunks_of(world):
    """Return each chunk's state, Merkle root and start, by name."""
    rows = world.query("SELECT name, state, merkle_root, start FROM chunks ORDER BY name")
    return {name: (state, root, start) for name, state, root, start in rows}


@pytest.mark.skipif(
    not old_version.can_be_upgraded(), reason="the SQL files of the last commit are others"
)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_of_an_older_version_is_finished(fault, old_tree, old_world, caf, moment):
    fatal, state = MOMENTS[moment]
    with fault(GROUP, "a run of an older version is killed") as case:
        finish_killed_run(old_tree, old_world, caf, fatal, state)
        case.check(old_world)


def finish_killed_run(old_tree, old_world, caf, fatal, state):
    """Kill the old run at a moment; let the present `caf` finish it."""
    status, output = old_version.run_killed(
        old_tree, "run", SOURCE, moment=fatal, folder=caf.folder, environment=caf.variables()
    )
    assert status == -signal.SIGKILL, output
    before = chunks_of(old_world)
    assert state in {state for state, _, _ in before.values()}
    done = caf("run", SOURCE)
    assert done.status == 0, done.err
    after = chunks_of(old_world)
    assert {state for state, _, _ in after.values()} == {"located"}
    for name, (_, root, start) in before.items():
        assert root in (None, after[name][1]), name
        assert start in (None, after[name][2]), name
    network = old_world.network.state()
    assert int(network["accounts"][old_world.address]["sequence"]) == len(after)
    assert set(
        Counter(
            file["merkle"] for file in network["files"] if file["owner"] == old_world.address
        ).values()
    ) == {1}


@pytest.fixture
def small_world(new_world, unruly_s3, new_bucket):
    """Two chunks of three objects each."""
    world = new_world(
        bucket=unruly_s3.in_front_of(new_bucket),
        source={"target_size": 70_000},
        packing={"max_requests": 1, "request_attempts": 1},
    )
    for number in range(2):
        for part in range(3):
            world.put(f"chunk-{number:02d}/{part}", bytes([number, part]) * 10_000)
    return world


@pytest.mark.parametrize(
    "version",
    [0, pytest.param(journal.JOURNAL_FORMAT + 1, marks=pytest.mark.sample), 2**63],
)
def test_a_journal_of_another_format_is_not_resumed(
    fault, small_world, unruly_s3, monkeypatch, version
):
    (name, *_) = small_world.plan()
    with fault(GROUP, "a journal of another format") as case:
        unruly_s3.fail(500, "InternalError", key="chunk-00/2")
        with monkeypatch.context() as patched, small_world.run_context() as context:
            patched.setattr(journal, "JOURNAL_FORMAT", version)
            with pytest.raises(ObjectReadFailed):
                archive_chunk(context, name)
        assert list(small_world.staging.glob("*.journal"))
        unruly_s3.well_behaved()
        with small_world.run_context() as context:
            archive_chunk(context, name, until=chunk_steps.load_batch)
            chunk_steps.pack_chunk(context, name)
            report = chunk_steps.seal_chunk(context, name)
            assert report.resumed_bytes == 0
            assert report.not_resumed
        small_world.finish()
        case.check(small_world)
