"""`caf backup`, and runs after an older backup was restored."""

import json

import psycopg
import pytest

from caf_pipeline_tests.support.command_line import CommandLine, expect_error, source_text
from caf_pipeline_tests.support.doctors import holding
from caf_pipeline_tests.support.jackal_command_line import S3_KEYS


@pytest.fixture
def caf(tmp_path, database_url, s3_server, new_bucket) -> CommandLine:
    for number in range(5):
        new_bucket.put(f"key-{number}", b"%d" % number * 1000)
    caf = CommandLine(tmp_path, S3_KEYS | {"CAF_DATABASE_URL": database_url})
    caf.settings(source_text(s3_server, new_bucket.name))
    return caf


def test_a_backup_is_restored_and_everything_paused(caf):
    assert caf("backup", "ledger.dump").status == 0
    assert caf("backup", "--restore", "--yes", "ledger.dump").status == 0
    limits = json.loads(caf("limit", "--json").out)
    assert "caf doctor" in limits["paused"]
    assert "caf resume" in limits["paused"]


def test_a_restore_needs_a_confirmation_and_no_run(caf, database_url):
    assert caf("backup", "ledger.dump").status == 0
    refused = caf("backup", "--restore", "ledger.dump")
    assert refused.status == 2
    assert "--yes" in refused.err
    with holding(database_url, "plan/src"):
        expect_error(caf("backup", "--restore", "--yes", "ledger.dump"), 10, "plan/src")
    expect_error(caf("backup", "ledger.dump"), 2, "exists")


def test_a_backup_of_another_archive_is_refused(caf, s3_server):
    caf("run", "--source", "src")
    assert caf("backup", "ledger.dump").status == 0
    caf.settings(source_text(s3_server, "another-bucket"))
    expect_error(caf("backup", "--restore", "--yes", "ledger.dump"), 2, "another archive")


HASH_LINE_BYTES = 84


@pytest.fixture
def without_hash(caf, tmp_path):
    """Archive the source, and return the name of a backup without its hash."""
    assert caf("run", "--source", "src").status == 0
    assert caf("backup", "ledger.dump").status == 0
    whole = (tmp_path / "ledger.dump").read_bytes()
    (tmp_path / "cut.dump").write_bytes(whole[:-HASH_LINE_BYTES])
    return "cut.dump"


@pytest.fixture
def unverified(caf, without_hash):
    restored = caf("backup", "--restore", "--unverified", "--yes", without_hash)
    assert restored.status == 0, restored.err


def test_damaged_backup_is_refused(caf, without_hash, tmp_path):
    whole = bytearray((tmp_path / "ledger.dump").read_bytes())
    whole[len(whole) // 2] ^= 1
    (tmp_path / "damaged.dump").write_bytes(whole)
    expect_error(caf("backup", "--restore", "--yes", "damaged.dump"), 9, "damaged")
    expect_error(caf("backup", "--restore", "--yes", without_hash), 2, "--unverified")
    assert json.loads(caf("limit", "--json").out)["paused"] is None


def test_only_the_doctor_ends_the_pause_of_an_unverified_backup(caf, unverified):
    expect_error(caf("resume"), 1, "caf doctor")
    for arguments in (["src"], ["--dry-run"]):
        assert caf("doctor", *arguments).status == 1
        expect_error(caf("resume"), 1, "caf doctor")
    caf("pause", "another reason")
    expect_error(caf("resume"), 1, "caf doctor")
    checked = caf("doctor")
    assert (checked.status, b"caf resume" in checked.out) == (0, True)
    assert json.loads(caf("limit", "--json").out)["paused"] == "another reason"
    assert caf("resume").status == 0
    assert caf("run", "--source", "src").status == 0


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM file_locations WHERE file_path = 'key-1'",
        "UPDATE sources SET archive_id = repeat('0', 32)",
        "DELETE FROM orders WHERE name = 'paused'; DELETE FROM file_locations",
    ],
)
def test_pause_goes_on_if_a_ledger_does_not_fit(caf, unverified, database_url, damage):
    with psycopg.connect(database_url) as connection:
        connection.execute(damage)
    assert caf("doctor").status == 1
    expect_error(caf("resume"), 1, "caf doctor")
    assert json.loads(caf("limit", "--json").out)["paused"]


def test_pause_goes_on_while_the_store_is_away(caf, unverified, tmp_path):
    store = tmp_path / ".caf" / "store"
    store.rename(tmp_path / "away")
    assert caf("doctor").status == 7
    expect_error(caf("resume"), 1, "caf doctor")
    (tmp_path / "away").rename(store)
    assert caf("doctor").status == 0
    assert caf("resume").status == 0
