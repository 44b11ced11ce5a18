"""`caf status --watch`: the rate, and the end by Ctrl-C."""

import json
import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from caf_pipeline.cli import watch
from caf_pipeline_tests.support.chunk_rows import set_state
from caf_pipeline_tests.support.command_line import KEYS, CommandLine, archive_source, source_text
from caf_pipeline_tests.support.postgres import connected


@pytest.fixture
def caf(tmp_path, database_url, s3_server, new_bucket):
    for number in range(5):
        new_bucket.put(f"k{number}", bytes(700_000))  # one chunk for each object
    caf = CommandLine(tmp_path, KEYS | {"CAF_DATABASE_URL": database_url})
    caf.settings(source_text(s3_server, new_bucket.name))
    return caf


def change(ledger, statement, **facts):
    with connected(ledger.database) as connection:
        connection.execute(statement, facts)


def locate(ledger, minutes_ago):
    """Pretend that chunks were located so long ago; plan the others."""
    names = sorted(chunk.name for chunk in ledger.chunks.list("src"))
    with connected(ledger.database) as connection:
        set_state(connection, "planned")
    change(ledger, "UPDATE caf_files SET located_at = NULL")
    for name, minutes in zip(names, minutes_ago, strict=False):
        with connected(ledger.database) as connection:
            set_state(connection, "located", f"name = '{name}'")
        statement = (
            "UPDATE caf_files SET located_at = now() - %(m)s * interval '1 minute' WHERE "
            "name = %(name)s"
        )
        change(ledger, statement, m=minutes, name=name)


def test_the_rate_covers_the_last_hour_and_needs_two_chunks(caf, ledger):
    archive_source(caf)

    def seen():
        return ledger.progress.of(["src"])[0]

    locate(ledger, [])
    assert (seen().bytes_per_second, seen().seconds_left) == (None, None)
    locate(ledger, [90, 70, 40])  # one chunk has no rate, and older ones do not count
    assert (seen().recent.chunks, seen().bytes_per_second) == (0, None)
    locate(ledger, [90, 40, 20])
    assert seen().recent.chunks == 1
    assert seen().bytes_per_second == pytest.approx(
        700_000 / (40 * 60), rel=0.01
    )  # until now, not until the last chunk
    assert seen().seconds_left == pytest.approx(2 * 40 * 60, rel=0.01)
    locate(ledger, [50, 40, 30, 20, 10])
    assert seen().seconds_left == 0.0
    change(ledger, "UPDATE caf_files SET attempts = 0")  # as after a rebuild, which packs nothing
    assert seen().recent.chunks == 0


def test_a_damaged_chunk_is_not_counted_as_well(caf, ledger):
    archive_source(caf)
    assert "src: 5 of 5 chunks located; " in watch._line(ledger.progress.of(["src"])[0])
    with connected(ledger.database) as connection:
        set_state(connection, "damaged", "caf_file_id = (SELECT max(caf_file_id) FROM caf_files)")
    line = watch._line(ledger.progress.of(["src"])[0])
    assert line.startswith("src: 5 of 5 chunks located (1 of them ")


@pytest.mark.thorough
def test_watch_prints_progress_until_interrupted(caf, ledger):
    archive_source(caf)
    locate(ledger, [40, 20])
    change(
        ledger,
        "UPDATE caf_files SET state = 'parked' WHERE caf_file_id = (SELECT max(caf_file_id) FROM "
        "caf_files)",
    )
    watching = caf.start("status", "src", "--watch", "--interval", "0.1")
    lines = [watching.stdout.readline().decode() for _ in range(2)]
    watching.send_signal(signal.SIGINT)
    _, output = watching.communicate()
    for line in lines:
        assert "src: 2 of 5 chunks located, 1 parked; 1.3 MiB of 3.3 MiB, 2 of 5 objects; " in line
        assert " last 0:40:0" in line
        assert line.rstrip().endswith(" left")
    assert watching.returncode == 130
    assert output.decode().startswith("caf: interrupted; ")

    watching = caf.start("status", "--watch", "--json")
    progress = json.loads(watching.stdout.readline())
    watching.send_signal(signal.SIGINT)
    watching.communicate()
    assert progress["chunks"] == {"located": 2, "planned": 2, "parked": 1}
    assert (progress["window_chunks"], progress["window_bytes"]) == (1, 700_000)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_embedded_server_behind(tmp_path, number):
    caf = CommandLine(tmp_path, {})
    caf.settings('[sources.src]\nbucket = "b"\n')
    watching = caf.start("status", "--watch", "--interval", "0.1")
    watching.stdout.readline()
    pid_file = tmp_path / ".caf" / "postgres" / "data" / "postmaster.pid"
    assert pid_file.exists()
    watching.send_signal(number)
    _, errors = watching.communicate()
    assert watching.returncode == 128 + number
    assert b"Traceback" not in errors
    assert not pid_file.exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments", [("status", "--watch", "--interval", "0.1"), ("metrics", "--serve", "127.0.0.1:0")]
)
def test_a_closed_terminal_leaves_no_embedded_server_behind(tmp_path, arguments):
    (tmp_path / "caf.toml").write_text('[sources.src]\nbucket = "b"\n')
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(Path(sys.executable).with_name("caf"), ["caf", *arguments])
    shown = b""
    while b"nothing is planned" not in shown and b"http://" not in shown:
        shown += os.read(terminal, 4096)
    pid_file = tmp_path / ".caf" / "postgres" / "data" / "postmaster.pid"
    assert pid_file.exists()
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert not pid_file.exists()
