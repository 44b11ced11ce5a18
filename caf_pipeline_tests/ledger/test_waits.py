"""Waits in the ledger: visible to every process, for live processes only."""

import subprocess
import sys
from datetime import UTC, datetime

from caf_pipeline.ledger.processes import boot_id, this_process
from caf_pipeline.ledger.records import Holder
from caf_pipeline.waits import Wait
from caf_pipeline_tests.support.postgres import connected

WAIT = Wait("rain", "June ends it", datetime(2026, 5, 1, tzinfo=UTC), "src-1-1")


def test_a_wait_is_read_as_it_was_written(ledger):
    ledger.waits.record(this_process("run-1"), "src", [WAIT])
    (row,) = ledger.waits.list()
    assert (row.source, row.run, row.wait) == ("src", "run-1", WAIT)


def test_later_waits_replace_only_the_runs_own(ledger):
    ledger.waits.record(this_process("run-1"), "src", [WAIT])
    ledger.waits.record(this_process("run-2"), "src", [WAIT])
    ledger.waits.record(this_process("run-1"), "src", [])
    assert [row.run for row in ledger.waits.list()] == ["run-2"]


def test_a_wait_of_a_dead_process_is_not_shown(ledger):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.communicate()
    ledger.waits.record(Holder("run-1", boot_id(), process.pid, 1.0), "src", [WAIT])
    assert ledger.waits.list() == []


def test_a_wait_that_was_not_renewed_is_not_shown(ledger, database):
    ledger.waits.record(this_process("run-1"), "src", [WAIT])
    with connected(database) as connection:
        connection.execute("UPDATE waits SET expires_at = clock_timestamp()")
    assert ledger.waits.list() == []


def test_rows_of_killed_processes_are_removed(ledger, database):
    ledger.waits.record(this_process("run-1"), "src", [WAIT])
    with connected(database) as connection:
        connection.execute("UPDATE waits SET expires_at = now() - interval '2 days'")
    ledger.waits.record(this_process("run-2"), "src", [])
    with connected(database) as connection:
        assert connection.execute("SELECT count(*) FROM waits").scalar_one() == 0
