"""The work of live runs in the ledger: visible to every process, for live processes only."""

import subprocess
import sys
from datetime import UTC, datetime

from caf_pipeline.system.processes import Holder, boot_id, this_process
from caf_pipeline.waits import Wait, Work
from caf_pipeline_tests.support.postgres import connected

WAIT = Wait("rain", "June ends it", datetime(2026, 5, 1, tzinfo=UTC), "src-1-1")
WORK = Work("src-1-1", 3, 300, 200, 600, (WAIT,))


def live(ledger):
    return [(item.source, item.holder.run, item.work) for item in ledger.progress.live()]


def test_work_is_read_as_it_was_recorded(ledger):
    ledger.progress.record(this_process("run-1"), "src", WORK)
    assert live(ledger) == [("src", "run-1", WORK)]


def test_work_is_replaced_and_removed_by_run(ledger):
    ledger.progress.record(this_process("run-1"), "src", WORK)
    ledger.progress.record(this_process("run-2"), "src", Work("src-1-2", 1, 1))
    ledger.progress.record(this_process("run-2"), "src", Work("src-1-2", 2, 2))
    ledger.progress.record(this_process("run-1"), "src", Work())
    assert live(ledger) == [("src", "run-2", Work("src-1-2", 2, 2))]


def test_work_of_a_dead_process_is_not_shown(ledger):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.communicate()
    ledger.progress.record(Holder("run-1", boot_id(), process.pid, 1.0), "src", WORK)
    assert live(ledger) == []


def test_work_that_was_not_renewed_is_not_shown(ledger, database):
    ledger.progress.record(this_process("run-1"), "src", WORK)
    with connected(database) as connection:
        connection.execute("UPDATE run_progress SET expires_at = clock_timestamp()")
    assert live(ledger) == []


def test_rows_of_killed_processes_are_removed(ledger, database):
    ledger.progress.record(this_process("run-1"), "src", WORK)
    with connected(database) as connection:
        connection.execute("UPDATE run_progress SET expires_at = now() - interval '2 days'")
    ledger.progress.record(this_process("run-2"), "src", Work())
    with connected(database) as connection:
        assert connection.execute("SELECT count(*) FROM run_progress").scalar_one() == 0
