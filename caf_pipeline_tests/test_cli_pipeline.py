"""`caf run`, `get`, `status` and an operator's commands, as a user meets them; bad input above all."""

import json
import os
import signal
import time

import pytest

from caf_pipeline.lifecycle import ChunkState
from caf_pipeline_tests.command_line import CommandLine, source_text
from caf_pipeline_tests.s3_server import s3_error


@pytest.fixture
def caf(tmp_path, database_url):
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "hush-hush", "AWS_DEFAULT_REGION": "us-east-1"}
    return CommandLine(tmp_path, keys | {"CAF_DATABASE_URL": database_url})


@pytest.fixture
def filled(caf, s3_server, new_bucket):
    """A command line whose source has some objects, and their bodies."""
    bodies = {f"some/key-{number:02d}": os.urandom(100_000) for number in range(25)} | {"empty": b"", "a/": b""}
    for key, body in bodies.items():
        new_bucket.put(key, body)
    caf.settings(source_text(s3_server, new_bucket.name))
    return caf, bodies


def one_sentence(done, status, *words):
    """The command ended with this status, and said why in one sentence and a hint, without a traceback."""
    assert done.status == status, done.err
    errors = [line for line in done.err.splitlines() if line.startswith("caf: error: ")]
    assert len(errors) == 1, done.err
    for word in words:
        assert word in done.err
    assert "Traceback" not in done.err
    assert "hush" not in done.err


def test_what_was_run_can_be_got_and_is_shown(filled, tmp_path):
    caf, bodies = filled
    assert caf("run", "--source", "src").status == 0
    for key in ("some/key-07", "empty", "a/"):
        assert caf("get", "src", key).out == bodies[key]
    assert caf("get", "src", "some/key-00", "-o", "out").status == 0
    assert (tmp_path / "out").read_bytes() == bodies["some/key-00"]
    lines = [json.loads(line) for line in caf("status", "--json").out.splitlines()]
    assert lines[0]["located_objects"] == len(bodies)
    assert {line["state"] for line in lines[1:]} == {"located"}
    assert b"located" in caf("status").out


def test_a_second_run_archives_only_what_is_new(filled, new_bucket):
    caf, _bodies = filled
    assert caf("run", "--source", "src").status == 0
    chunks = len(caf("status", "--json").out.splitlines())
    new_bucket.put("later", b"later")
    assert caf("run").status == 0
    assert len(caf("status", "--json").out.splitlines()) == chunks + 1
    assert caf("get", "src", "later").out == b"later"


def test_a_run_that_is_killed_is_finished_by_the_next(filled, ledger):
    caf, bodies = filled
    process = caf.start("run", "--source", "src")
    while not any(chunk.state is ChunkState.LOCATED for chunk in ledger.chunks()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert caf("run", "--source", "src").status == 0
    assert {chunk.state for chunk in ledger.chunks()} == {ChunkState.LOCATED}
    assert ledger.account("src").located_objects == len(bodies)


def test_ctrl_c_ends_a_run_and_the_next_goes_on(filled, ledger):
    caf, bodies = filled
    process = caf.start("run", "--source", "src")
    while not ledger.chunks():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"Traceback" not in err
    assert caf("run", "--source", "src").status == 0
    assert ledger.account("src").located_objects == len(bodies)


def test_a_key_that_is_not_archived_is_said_to_be_so(filled):
    caf, _ = filled
    caf("run")
    one_sentence(caf("get", "src", "nowhere"), 11, "'nowhere'", "not archived")


def test_damaged_bytes_are_exit_status_9_and_leave_no_file(filled, ledger, tmp_path):
    caf, _ = filled
    caf("run")
    location = ledger.locate("src", "some/key-03")
    (file,) = tmp_path.glob(f"**/{location.posting.merkle_root.hex()}.caf")
    data = bytearray(file.read_bytes())
    data[location.row.start_byte + 5] ^= 0xFF
    file.write_bytes(data)
    one_sentence(caf("get", "src", "some/key-03", "-o", "out"), 9, "SHA-256")
    assert not (tmp_path / "out").exists()


def test_no_such_bucket(caf, s3_server):
    caf.settings(source_text(s3_server, "there-is-no-such-bucket"))
    one_sentence(caf("run", "--source", "src"), 5, "there-is-no-such-bucket")


def test_wrong_credentials(caf, scripted_s3):
    scripted_s3.answer = lambda request: s3_error(403, "InvalidAccessKeyId")
    caf.settings(source_text(scripted_s3.endpoint, "b"))
    one_sentence(caf("run", "--source", "src"), 5)


def test_an_unreachable_endpoint(caf):
    caf.settings("[packing]\nrequest_attempts = 1\n" + source_text("http://127.0.0.1:9", "b"))
    one_sentence(caf("run", "--source", "src"), 5, "127.0.0.1:9")


def test_a_database_that_is_away(caf, s3_server):
    caf.settings(source_text(s3_server, "b"))
    for arguments in (("run",), ("status",), ("get", "src", "a")):
        one_sentence(caf(*arguments, CAF_DATABASE_URL="postgresql://u:hush@127.0.0.1:9/d"), 6, "127.0.0.1")


def test_a_bad_setting(caf):
    caf.settings('[sources.src]\nbucket = "b"\ntarget_size = "1XB"\n')
    for arguments in (("run",), ("status",), ("get", "src", "a")):
        one_sentence(caf(*arguments), 3, "sources.src.target_size")


def test_an_unknown_source(caf):
    caf.settings('[sources.src]\nbucket = "b"\n')
    one_sentence(caf("run", "--source", "other"), 3, "'other'", "src")


def test_a_full_staging_disk_leaves_it_as_it_was(filled, small_disk, s3_server, new_bucket):
    caf, _bodies = filled
    caf.settings(f'staging = "{small_disk}"\n' + source_text(s3_server, new_bucket.name, target_size="3MiB"))
    one_sentence(caf("run", "--source", "src"), 8, str(small_disk))
    assert list(small_disk.iterdir()) == []
    caf.settings(source_text(s3_server, new_bucket.name, target_size="3MiB"))
    assert caf("run", "--source", "src").status == 0


def test_a_withdrawn_chunk_is_planned_again(filled, ledger):
    caf, bodies = filled
    caf("run", CAF_STAGING="/dev/null/nowhere")
    for chunk in ledger.chunks():
        assert caf("withdraw", chunk.name).status == 0
    assert caf("run").status == 0
    assert ledger.account("src").located_objects == len(bodies)


def test_an_unknown_chunk_is_said_to_be_unknown(filled):
    caf, _ = filled
    one_sentence(caf("unpark", "src-00000000-00001"), 11, "src-00000000-00001")


def test_a_password_is_in_no_output(filled):
    caf, _ = filled
    done = caf("run")
    assert "hush" not in done.err + done.out.decode()
