"""`caf backup`, and runs after an older backup was restored."""

import json

import pytest

from caf_pipeline_tests.support.command_line import CommandLine, expect_error, source_text
from caf_pipeline_tests.support.crashes import started
from caf_pipeline_tests.support.jackal_command_line import (
    S3_KEYS,
    jackal_command_line,
    wallet_with_space,
)

LONG = "600"  # seconds; a lease never expires during a test


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
    with started("lease", database_url, "plan/src", LONG):
        expect_error(caf("backup", "--restore", "--yes", "ledger.dump"), 10, "plan/src")
    expect_error(caf("backup", "ledger.dump"), 2, "exists")


def test_a_backup_of_another_archive_is_refused(caf, s3_server):
    caf("run", "--source", "src")
    assert caf("backup", "ledger.dump").status == 0
    caf.settings(source_text(s3_server, "another-bucket"))
    expect_error(caf("backup", "--restore", "--yes", "ledger.dump"), 2, "another archive")


@pytest.mark.thorough
def test_run_after_an_older_backup_posts_nothing_twice(
    tmp_path, network, database_url, s3_server, new_bucket
):
    wallet = wallet_with_space(network)
    caf = jackal_command_line(tmp_path, network, wallet.words, CAF_DATABASE_URL=database_url)
    caf.settings(source_text(s3_server, new_bucket.name))
    for number in range(5):
        new_bucket.put(f"key-{number}", b"%d" % number * 1000)
    assert caf("run", "--source", "src").status == 0
    assert caf("backup", "older.dump").status == 0
    new_bucket.put("since", b"since")
    assert caf("run", "--source", "src").status == 0
    new_bucket.put("since", b"overwritten")
    assert caf("backup", "--restore", "--yes", "older.dump").status == 0
    assert caf("resume").status == 0
    refused = caf("run", "--source", "src")
    assert refused.status != 0
    assert "caf doctor" in refused.err
    assert caf("doctor").status == 0
    assert caf("run", "--source", "src").status == 0
    assert len([file for file in network.state()["files"] if file["owner"] == wallet.address]) == 3
    assert caf("get", "src", "since").out == b"overwritten"
