"""The demo's programs: their key, their ports, and the end of every process that they started."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from caf_pipeline.encryption.identities import Identities
from caf_pipeline.ledger.embedded import embedded_server
from caf_pipeline.settings import load_settings
from caf_pipeline_tests.support.free_ports import free_port
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.sessions import in_session

pytestmark = pytest.mark.thorough

DEMO = Path(__file__).parents[1] / "demo"

# Stands for `dg dev` in `make ui`. It starts a process that uses the embedded Postgres and ignores
# signals, and another process whose parent ends.
PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import processes
home = Path(__file__).parent
sleep = "import time; time.sleep(600)"
if len(sys.argv) == 2:
    with processes.ending_all(home):
        processes.run([sys.executable, __file__, sys.argv[1], "as dg"], os.environ)
signal.signal(signal.SIGINT, signal.default_int_handler)
processes.end_with_parent(signal.SIGINT)
try:
    uses = "from pathlib import *; from caf_pipeline.ledger.embedded import *; "
    uses += f"embedded_server(Path({str(home / 'postgres')!r})); "
    deaf = uses + "from signal import *; signal(SIGTERM, SIG_IGN); signal(SIGINT, SIG_IGN); print('deaf', flush=True);" + sleep
    subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE).stdout.readline()
    subprocess.run([sys.executable, "-c", f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}])"])
    print("begun", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("in order", flush=True)
"""  # noqa: E501


@pytest.fixture
def program(tmp_path):
    """The running program in its own session. It ignores SIGINT, like a shell's background jobs."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            [sys.executable, str(file), str(DEMO)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        assert process.stdout.readline() == "begun\n"
        yield process
    finally:
        for member in in_session(process.pid):
            member.kill()
        process.wait()
        process.stdout.close()
        embedded_server(tmp_path / "postgres").close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_children_in_order_then_the_rest(program, number, tmp_path):
    assert len(in_session(program.pid)) == 4
    program.send_signal(number)
    assert (tmp_path / "postgres" / "data" / "postmaster.pid").exists()
    assert program.wait(PATIENCE_SECONDS) == 128 + number
    assert in_session(program.pid) == []
    assert not (tmp_path / "postgres" / "data" / "postmaster.pid").exists()
    assert program.stdout.read() == "in order\n"


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux signals a process when its parent ends"
)
def test_children_stop_in_order_if_the_parent_is_killed(program):
    program.kill()
    program.wait()
    assert program.stdout.readline() == "in order\n"


@pytest.mark.parametrize("port", ["abc", "0", "65536", "-1"])
def test_invalid_ui_port_is_one_sentence(port):
    run = subprocess.run(
        [sys.executable, DEMO / "ui.py", f"--port={port}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (
        1,
        f"PORT is {port!r}: it must be a number from 1 to 65535\n",
    )


@pytest.fixture
def taken_port():
    """A port on which another program listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("program", "taken"),
    [
        ("run.py", "bucket"),
        ("run.py", "chain"),
        ("ui.py", "bucket"),
        ("ui.py", "chain"),
        ("ui.py", "ui"),
        ("network.py", "chain"),
    ],
)
def test_a_taken_port_is_one_sentence_and_starts_nothing(tmp_path, taken_port, program, taken):
    ports = {name: free_port() for name in ("bucket", "chain", "ui")} | {taken: taken_port}
    text = (
        (DEMO.parent / "caf.toml")
        .read_text()
        .replace(":5055", f":{ports['bucket']}")
        .replace(":5056", f":{ports['chain']}")
    )
    (tmp_path / "caf.toml").write_text(text)
    command = [
        sys.executable,
        DEMO / program,
        *([f"--port={ports['ui']}"] if program == "ui.py" else ()),
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=PATIENCE_SECONDS
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert f"needs port {taken_port} of 127.0.0.1, which is not free" in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["caf.toml"]


RECIPIENTS = "CAF_ENCRYPTION__RECIPIENTS"


def test_the_demo_makes_its_key_once(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DEMO)
    from identity import use

    (tmp_path / "caf.toml").write_text((DEMO.parent / "caf.toml").read_text())
    monkeypatch.setenv(RECIPIENTS, "[]")
    settings = load_settings(tmp_path / "caf.toml")
    use(settings)
    key = settings.encryption.identity_file
    assert key.stat().st_mode & 0o777 == 0o600
    made = key.read_bytes()
    use(settings)
    assert key.read_bytes() == made
    (identity,) = Identities(settings.encryption).get()
    assert json.loads(os.environ[RECIPIENTS]) == [str(identity.recipient)]


def test_the_demo_makes_no_key_for_a_real_network(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DEMO)
    from identity import use

    text = (DEMO.parent / "caf.toml").read_text().replace("loopback-1", "jackal-1")
    (tmp_path / "caf.toml").write_text(text)
    use(load_settings(tmp_path / "caf.toml"))
    assert not (tmp_path / ".caf").exists()
