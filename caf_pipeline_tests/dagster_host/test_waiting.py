"""Waits of a run are shown on the terminal, in its log, and to other processes."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from caf_pipeline.dagster_host.run_source import run_source
from caf_pipeline.errors import ChainUnreachable, SourceUnreachable
from caf_pipeline.source.s3 import errors as s3_errors
from caf_pipeline.source.s3.source import open_s3_source
from caf_pipeline.store.jackal import nodes as nodes_module
from caf_pipeline.store.jackal import posting, upload
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.nodes import Nodes
from caf_pipeline.waits import Announcer, Waits
from caf_pipeline_tests.support.command_line import CommandLine, source_text
from caf_pipeline_tests.support.jackal_command_line import S3_KEYS
from caf_pipeline_tests.support.jackal_network import ADDRESS, SPACE, jackal_settings
from caf_pipeline_tests.support.jackal_stores import open_jackal_store
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything
from caf_pipeline_tests.support.s3_server import settings_for
from caf_pipeline_tests.support.tiers import sampled

pytestmark = pytest.mark.thorough

pytest_plugins = [
    "caf_pipeline_tests.support.dagster_home",
    "caf_pipeline_tests.support.jackal_network",
]

SOURCE = "my-source"
PAUSED = "for the end of a pause (network maintenance); 'caf resume' ends it"


def until(holds, what="it"):
    """Wait for a condition that another thread or process fulfils."""
    while not holds():
        time.sleep(0.05)


class Running:
    """Run `caf run` in a thread of this process."""

    def __init__(self, settings):
        self.printed = io.StringIO()
        self.summaries = []
        console = Console(file=self.printed, width=200)
        self._thread = threading.Thread(
            target=run_source,
            args=(SOURCE,),
            kwargs={"settings": settings, "console": console, "done": self.summaries},
        )
        self._thread.start()

    def end(self):
        self._thread.join()
        (summary,) = self.summaries
        return summary


def test_a_paused_run_reports_its_wait_everywhere(pipeline):
    pipeline.put(2)
    pipeline.ledger.controls.set("paused", "network maintenance")
    run = Running(pipeline.settings)
    try:
        until(lambda: PAUSED in run.printed.getvalue())
        (item,) = pipeline.ledger.progress.live()
        assert "network maintenance" in item.work.waits[0].what
        (plan,) = pipeline.instance.get_runs()
        assert item.holder.run == plan.run_id
        log = [entry.user_message for entry in pipeline.instance.all_logs(plan.run_id)]
        assert any(PAUSED in line for line in log)
    finally:
        pipeline.ledger.controls.set("paused", None)
        summary = run.end()
    assert summary.exit_status == 0
    assert pipeline.ledger.progress.live() == []


# --- the terminal, and Ctrl-C
# -----------------------------------------------------------------------------------------


@pytest.fixture
def caf(tmp_path, database_url, s3_server, new_bucket):
    for number in range(3):
        new_bucket.put(f"key-{number}", os.urandom(1000))
    caf = CommandLine(tmp_path, S3_KEYS | {"CAF_DATABASE_URL": database_url})
    caf.settings(source_text(s3_server, new_bucket.name))
    return caf


def lines_until(process, words):
    """Read a process's output up to a line with these words; return all of it."""
    output = []
    for line in process.stderr:
        output.append(line.decode())
        if words in output[-1]:
            return output
    raise AssertionError("".join(output))


def test_status_shows_a_paused_run_that_ctrl_c_ends(caf):
    assert caf("pause", "network maintenance").status == 0
    process = caf.start("run")
    lines_until(process, PAUSED)
    machine = json.loads(caf("status", "--json").out.splitlines()[0])
    shown = caf("status").out.decode()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=PATIENCE_SECONDS)
    assert PAUSED in shown
    assert [wait["ends_by"] for wait in machine["waiting"]] == ["'caf resume' ends it"]
    assert process.returncode == 130, rest
    assert rest.decode().splitlines()[-1].startswith("caf: interrupted")
    assert b"Traceback" not in rest
    assert json.loads(caf("status", "--json").out.splitlines()[0])["waiting"] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_a_run_is_its_exit_status(caf, number):
    assert caf("pause", "network maintenance").status == 0
    process = caf.start("run", "--json")
    lines_until(process, PAUSED)
    process.send_signal(number)
    out, rest = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 128 + number, rest
    assert b"Traceback" not in rest
    assert json.loads(out.splitlines()[-1])["exit_status"] == 128 + number


LOADED = [
    "caf_pipeline.errors",
    "typer",
    "psycopg",
    "sqlalchemy",
    "dagster",
    "caf_pipeline.dagster_host.progress_bar",
    "botocore.httpsession",
]
"""Modules that a run loads, in this order; each marks the same moment on every machine."""


@pytest.mark.parametrize("loaded", sampled(LOADED, every=6))
def test_ctrl_c_at_any_moment_is_status_130(caf, loaded):
    process = caf.start("run", PYTHONPROFILEIMPORTTIME="1")  # which says on stderr what is loaded
    assert any(line.decode().rpartition("|")[2].strip() == loaded for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, err
    assert err.decode().count("caf: interrupted") == 1
    assert b"Traceback" not in err


def interrupted_while(body: str) -> subprocess.CompletedProcess[str]:
    """Run the command line's entry point with a command that is these statements."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    script = (
        "import atexit, signal, sys, time, weakref\n"
        "import caf_pipeline.cli as cli\n"
        f"def command():\n{lines}"
        "cli.main = command\nfrom caf_pipeline.entry import main\nsys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )


def test_ctrl_c_during_startup_is_status_130():
    done = interrupted_while(
        "atexit.register(print, 'closed what was opened')\nraise KeyboardInterrupt"
    )
    assert done.stdout.startswith("closed")
    assert done.returncode == 130
    (line,) = done.stderr.splitlines()
    assert line.startswith("caf: interrupted")


def test_ctrl_c_that_python_drops_is_status_130():
    done = interrupted_while(
        "thing = set()\n"
        "watch = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))\n"
        "del thing\n"
        "time.sleep(30)"
    )
    assert done.returncode == 130
    (line,) = done.stderr.splitlines()
    assert line.startswith("caf: interrupted")


# --- servers that do not answer
# ---------------------------------------------------------------------------------------


def test_a_wait_for_s3_names_its_address(monkeypatch):
    monkeypatch.setattr(s3_errors, "UNANSWERED_SECONDS", 0.0)
    output = []
    waits = Waits(Announcer(output.append))
    source = open_s3_source("src", settings_for("http://127.0.0.1:9", "b"), attempts=2, waits=waits)
    with pytest.raises(SourceUnreachable):
        list(source.list_pages())
    first, last = output
    assert "bucket 'b' at http://127.0.0.1:9" in first
    assert "2 attempts" in first
    assert last.startswith("waited ")


def test_a_wait_for_the_chain_names_its_address(monkeypatch):
    monkeypatch.setattr(nodes_module, "UNANSWERED_SECONDS", 0.0)
    output = []
    chain = Chain(
        Nodes(
            ["http://127.0.0.1:9"],
            "jackal-1",
            seen_height=lambda: 0,
            see_height=lambda height: None,
            attempts=2,
            waits=Waits(Announcer(output.append)),
        )
    )
    with pytest.raises(ChainUnreachable), chain:
        chain.height()
    assert "http://127.0.0.1:9" in output[0]


def test_waits_for_a_block_and_a_proof_are_reported(tmp_path, ledger, network, monkeypatch):
    monkeypatch.setattr(posting, "BRIEF_SECONDS", 0.0)
    monkeypatch.setattr(upload, "BRIEF_SECONDS", 0.0)
    output = []
    waits = Waits(Announcer(output.append))
    network.grant(ADDRESS, SPACE)
    context = a_run_context(
        tmp_path,
        MemorySource({"key": os.urandom(40_000)}),
        ledger,
        store=lambda settings, ledger, holder: open_jackal_store(settings, ledger, holder, waits),
        jackal=jackal_settings(network, proof_seconds=8),
    )
    archive_everything(context)
    context.store.close()
    assert any("a block with transaction" in line for line in output)
    assert any("prove the file" in line for line in output)
