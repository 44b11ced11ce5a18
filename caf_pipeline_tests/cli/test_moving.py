"""Moving the staging folder, and changing the wallet, while chunks are under way."""

import shutil
import signal
import time

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline_tests.support.command_line import KEYS, CommandLine, source_text
from caf_pipeline_tests.support.jackal_command_line import (
    jackal_command_line,
    wallet_with_space,
    with_wallet,
)

pytest_plugins = ["caf_pipeline_tests.support.jackal_network"]


@pytest.fixture
def bodies(new_bucket):
    """Put objects for three chunks into the bucket."""
    bodies = {f"key-{number}": bytes([number]) * 400_000 for number in range(8)}
    for key, body in bodies.items():
        new_bucket.put(key, body)
    return bodies


@pytest.fixture
def text(s3_server, new_bucket):
    """Settings with at most four objects a chunk."""
    return source_text(s3_server, new_bucket.name, target_size="1600000B")


def get_all(caf, bodies):
    for key, body in bodies.items():
        done = caf("get", "src", key)
        assert (done.status, done.out) == (0, body), (key, done.err)


@pytest.mark.thorough
def test_the_staging_folder_can_be_moved(tmp_path, database_url, ledger, text, bodies):
    caf = CommandLine(
        tmp_path, KEYS | {"CAF_DATABASE_URL": database_url, "CAF_STORE__KIND": "directory"}
    )
    caf.settings(text)
    process = caf.start("run", "--source", "src", "--workers", "1")
    staging, moved = tmp_path / ".caf" / "staging", tmp_path / "elsewhere"
    while not any(path.stat().st_size > 500_000 for path in staging.glob("*.part")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    shutil.move(staging, moved)
    (tmp_path / "caf.toml").write_text(
        "staging = 'elsewhere'\n" + (tmp_path / "caf.toml").read_text()
    )
    done = caf("run", "--source", "src")
    assert done.status == 0, done.err
    assert {chunk.state for chunk in ledger.chunks.list()} == {ChunkState.LOCATED}
    assert not staging.exists()
    assert not list(moved.glob("*.part"))
    get_all(caf, bodies)
    assert caf("doctor", "--dry-run").status == 0


@pytest.mark.thorough
@pytest.mark.usefixtures("bodies")
def test_another_wallet_continues_the_archive_of_the_first(
    tmp_path, network, database_url, text, new_bucket
):
    first, second = wallet_with_space(network), wallet_with_space(network)
    before = jackal_command_line(tmp_path, network, first.words, CAF_DATABASE_URL=database_url)
    before.settings(text)
    assert before("run", "--source", "src").status == 0
    after = with_wallet(before, second.words)
    new_bucket.put("late", b"late" * 1000)
    done = after("run", "--source", "src")
    assert done.status == 0, done.err
    get_all(after, {"key-0": bytes(400_000), "late": b"late" * 1000})
    files = after("jackal", "files")
    assert files.status == 0, files.out
    assert b"src: 4 chunks on the chain, 0 missing, 0 foreign" in files.out
    owners = [file["owner"] for file in network.state()["files"]]
    assert (owners.count(first.address), owners.count(second.address)) == (3, 1)
