"""The embedded server: shared by processes, stopped by the last, and usable after a kill."""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest

from caf_pipeline.errors import LedgerError
from caf_pipeline.ledger import embedded
from caf_pipeline.ledger.embedded import EmbeddedServer, embedded_server
from caf_pipeline.settings import Settings
from caf_pipeline.wiring import open_ledger

pytestmark = pytest.mark.thorough

USER = """
import sys
from pathlib import Path
from caf_pipeline.ledger.embedded import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]), idle_seconds=float(sys.argv[2]))
print(server.socket_folder, flush=True)
sys.stdin.readline()
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root's server has a user of its own")


@pytest.fixture
def folder():
    """A short path: pytest's own folders would be too long for a socket."""
    name = Path(tempfile.mkdtemp(prefix="caf-pg-"))
    name.chmod(0o755)  # root's server has a user of its own
    yield name / "home" / "postgres"
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "postgres" and str(name) in " ".join(
            process.info["cmdline"] or ()
        ):
            process.kill()
    shutil.rmtree(name)


@contextmanager
def user(folder, idle_seconds=600, **account):
    """Another process that uses the server."""
    command = [sys.executable, "-c", USER, str(folder), str(idle_seconds)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **account
    )
    with process:
        process.socket_folder = process.stdout.readline().strip()
        yield process
        if process.poll() is None:
            process.communicate("\n")


def mode_of(path):
    return path.stat().st_mode & 0o777


def ask(server_or_folder, query="SELECT 1"):
    where = server_or_folder.socket_folder
    with psycopg.connect(
        host=str(where), user="postgres", dbname="postgres", autocommit=True
    ) as connection:
        cursor = connection.execute(query)
        return cursor.fetchall() if cursor.description else None


def postmaster(folder):
    """Return the running server's process, or None."""
    try:
        process = psutil.Process(int((folder / "data" / "postmaster.pid").read_text().split()[0]))
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None
    return process if process.status() != psutil.STATUS_ZOMBIE else None


@pytest.mark.parametrize(
    ("memory_gib", "expected"),
    [(1, ("128MB", "4MB")), (8, ("512MB", "16MB")), (1024, ("1GB", "64MB"))],
)
def test_memory_settings_follow_the_machine(folder, monkeypatch, memory_gib, expected):
    monkeypatch.setattr(embedded, "memory_bytes", lambda: memory_gib << 30)
    server = EmbeddedServer(folder)
    shown = "SELECT current_setting('shared_buffers'), current_setting('work_mem')"
    assert ask(server, shown) == [expected]
    server.close()


def test_the_last_of_two_processes_stops_the_server(folder):
    server = EmbeddedServer(folder)
    with user(folder) as other:
        assert other.socket_folder == str(server.socket_folder)
        running = postmaster(folder)
        server.close()
        assert ask(other) == [(1,)]
    assert not running.is_running() or running.status() == psutil.STATUS_ZOMBIE
    assert not (folder / "data" / "postmaster.pid").exists()


def test_a_killed_user_leaves_the_server_running(folder):
    server = EmbeddedServer(folder)
    with user(folder) as other:
        other.kill()
    assert ask(server) == [(1,)]
    server.close()
    assert postmaster(folder) is None


def test_a_server_without_users_serves_the_next_process(folder):
    with user(folder) as other:
        other.kill()
    running = postmaster(folder)
    server = EmbeddedServer(folder)
    assert postmaster(folder) == running
    server.close()
    assert postmaster(folder) is None


def test_a_server_ends_after_its_last_user_was_killed(folder):
    with user(folder, idle_seconds=0.2) as other:
        ask(other, "CREATE TABLE kept AS SELECT 7 AS seven")
        running = postmaster(folder)
        keeper = running.parent()
        other.kill()
    _, alive = psutil.wait_procs([running, keeper], timeout=60)
    assert not alive
    server = EmbeddedServer(folder)
    assert ask(server, "SELECT seven FROM kept") == [(7,)]
    server.close()
    assert "not properly shut down" not in (folder / "data" / "server.log").read_text()


def test_an_idle_server_does_not_end_under_a_user(folder):
    with user(folder, idle_seconds=0.1) as other:
        server = EmbeddedServer(folder)
        keeper = postmaster(folder).parent()
        other.kill()
        polls = keeper.num_ctx_switches().voluntary + 50
        while keeper.num_ctx_switches().voluntary < polls:
            time.sleep(0.05)
        assert ask(server) == [(1,)]
        server.close()


def test_a_killed_server_comes_back_with_what_was_committed(folder):
    server = EmbeddedServer(folder)
    ask(server, "CREATE TABLE kept AS SELECT 7 AS seven")
    postmaster(folder).kill()
    while postmaster(folder):
        time.sleep(0.01)
    again = EmbeddedServer(folder)
    assert ask(again, "SELECT seven FROM kept") == [(7,)]
    server.close()
    again.close()
    assert postmaster(folder) is None


def test_a_long_lived_process_starts_its_killed_server_again(folder):
    ledger = open_ledger(Settings(home=folder.parent))
    try:
        ledger.sources.register("src", "s3://src")
        killed = postmaster(folder)
        killed.kill()
        while postmaster(folder):
            time.sleep(0.01)
        assert ledger.sources.archives()[0].address == "s3://src"
        assert ledger.lookup.sources() == ["src"]
        assert postmaster(folder) != killed
    finally:
        ledger.close()
        embedded_server(folder).close()
    assert postmaster(folder) is None


def test_a_revived_server_keeps_its_ledger(folder):
    server = EmbeddedServer(folder)
    os.kill(postmaster(folder).pid, signal.SIGKILL)
    shutil.rmtree(folder / "data")
    with pytest.raises(LedgerError, match="is gone"):
        server.revive()
    server.close()
    assert not (folder / "data").exists()


def test_a_stale_pid_file_of_another_process_is_ignored(folder):
    EmbeddedServer(folder).close()
    content = f"{os.getpid()}\n{folder}/data\n1700000000\n5432\n{folder}/data\n\n  1  1\nready   \n"
    (folder / "data" / "postmaster.pid").write_text(content)
    server = EmbeddedServer(folder)
    assert ask(server) == [(1,)]
    server.close()


def test_a_truncated_pid_file_is_ignored(folder):
    EmbeddedServer(folder).close()
    for content in (b"", b"x\n", b"1\n", bytes(range(256)), b"9" * 99 + b"\n", b"1\n2\n3\n4\n\0\n"):
        (folder / "data" / "postmaster.pid").write_bytes(content)
        server = EmbeddedServer(folder)
        assert ask(server) == [(1,)]
        server.close()


def test_garbage_in_the_pid_file_starts_no_second_server(folder):
    server = EmbeddedServer(folder)
    running = postmaster(folder)
    (folder / "data" / "postmaster.pid").write_text("garbage\n")
    again = EmbeddedServer(folder)
    assert again.socket_folder == server.socket_folder
    assert running.is_running()
    assert ask(again) == [(1,)]


@as_root
def test_a_data_folder_of_root_is_refused(folder):
    EmbeddedServer(folder).close()
    os.chown(folder / "data", 0, 0)
    with pytest.raises(LedgerError, match="root"):
        EmbeddedServer(folder)


@as_root
@pytest.mark.parametrize("name", ["data", "data/postmaster.pid"])
def test_a_file_of_another_user_is_refused(folder, monkeypatch, name):
    monkeypatch.setattr(embedded, "_USERS", ("nobody",))
    EmbeddedServer(folder).close()
    (folder / "data" / "postmaster.pid").write_text("1\n")
    for path in (folder, *folder.iterdir()):
        shutil.chown(path, "nobody")
    os.chown(folder / name, 0, 0)
    error = refused_to_another_user(folder)
    assert f"{folder / name} " in error
    assert "root" in error


def refused_to_another_user(folder):
    """Return the last line of the error of a process that runs as another user."""
    script = (
        "import os; os.setuid(65534); from pathlib import Path; "
        f"EmbeddedServer(Path({str(folder)!r}))"
    )
    program = f"from caf_pipeline.ledger.embedded import EmbeddedServer; {script}"
    refused = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    error = refused.stderr.splitlines()[-1]
    assert "LedgerError: " in error
    return error


@as_root
def test_roots_folder_is_refused_in_roots_name(folder):
    EmbeddedServer(folder).close()
    assert f"{folder} belongs to the user root" in refused_to_another_user(folder)


@as_root
def test_private_parents_keep_their_modes(folder):
    folder.parents[1].chmod(0o700)
    server = EmbeddedServer(folder)
    ask(server, "CREATE TABLE kept AS SELECT 7 AS seven")
    server.close()
    assert [mode_of(path) for path in folder.parents[:2]] == [0o700, 0o700]
    assert (folder / "data").resolve().is_relative_to(os.environ["CAF_ROOT_POSTGRES"])
    server = EmbeddedServer(folder)
    assert ask(server, "SELECT seven FROM kept") == [(7,)]
    server.close()


@as_root
def test_others_pass_through_home_to_a_ledger_of_root(folder):
    EmbeddedServer(folder).close()
    assert [mode_of(path) for path in (folder.parent, folder)] == [0o711, 0o711]
    assert not (folder / "data").is_symlink()


@as_root
def test_a_home_with_an_open_file_stays_closed(folder):
    folder.parent.mkdir(mode=0o700)
    (folder.parent / "notes").write_text("open, but in a closed folder")
    EmbeddedServer(folder).close()
    assert mode_of(folder.parent) == 0o700
    assert (folder / "data").is_symlink()


@as_root
def test_a_closed_place_for_ledgers_of_root_is_refused(folder, monkeypatch):
    folder.parents[1].chmod(0o700)
    monkeypatch.setenv("CAF_ROOT_POSTGRES", str(folder.with_name("place")))
    with pytest.raises(LedgerError, match="cannot enter"):
        EmbeddedServer(folder)
    assert not (folder / "data.new").is_symlink()


@as_root
def test_no_operating_system_user_is_created(folder, monkeypatch):
    users = Path("/etc/passwd").read_bytes()
    monkeypatch.setattr(embedded, "_USERS", ("no-such-user", "nobody"))
    server = EmbeddedServer(folder)
    assert postmaster(folder).username() == "nobody"
    server.close()
    monkeypatch.setattr(embedded, "_USERS", ("no-such-user",))
    EmbeddedServer(folder).close()  # the data folder's owner
    with pytest.raises(LedgerError, match="no-such-user"):
        EmbeddedServer(folder.with_name("other"))
    assert Path("/etc/passwd").read_bytes() == users


@as_root
def test_a_ledger_whose_parents_were_closed_stays_in_its_place(folder):
    EmbeddedServer(folder).close()
    folder.parents[1].chmod(0o700)
    with pytest.raises(LedgerError, match="cannot enter") as refused:
        EmbeddedServer(folder)
    assert str(folder.parents[1]) in refused.value.hint
    assert not (folder / "data").is_symlink()


@as_root
def test_a_link_to_a_lost_ledger_starts_no_empty_one(folder):
    folder.parents[1].chmod(0o700)
    EmbeddedServer(folder).close()
    shutil.rmtree((folder / "data").resolve())
    with pytest.raises(LedgerError, match="is gone"):
        EmbeddedServer(folder)


@as_root
def test_a_copied_home_needs_its_own_ledger(folder):
    folder.parents[1].chmod(0o700)
    EmbeddedServer(folder).close()
    copied = folder.with_name("copied")
    shutil.copytree(folder, copied, symlinks=True)
    with pytest.raises(LedgerError, match=re.escape(f"ledger of {folder}")):
        EmbeddedServer(copied)
    folder.rename(folder.with_name("moved"))
    EmbeddedServer(folder.with_name("moved")).close()


@as_root
def test_a_linked_server_of_a_deleted_folder_is_ended(folder):
    folder.parents[1].chmod(0o700)
    EmbeddedServer(folder)
    old = postmaster(folder)
    shutil.rmtree(folder)
    server = EmbeddedServer(folder)
    assert not old.is_running() or old.status() == psutil.STATUS_ZOMBIE
    assert ask(server) == [(1,)]
    server.close()


@as_root
def test_private_programs_are_copied(folder, monkeypatch):
    folder.parent.mkdir()
    place = folder.parent / "place"
    monkeypatch.setenv("CAF_ROOT_POSTGRES", str(place))
    programs = embedded.wheel_programs()
    package = programs.parents[1]
    private = folder.parent / "private"
    private.mkdir(mode=0o700)
    for name in (f"{package.name}/{programs.parent.name}", f"{package.name}.libs"):
        shutil.copytree(package.parent / name, private / name, symlinks=True)
    (private / package.name / programs.parent.name / "bin" / "initdb").chmod(0o700)
    monkeypatch.setattr(
        embedded, "wheel_programs", lambda: private / programs.relative_to(package.parent)
    )
    server = EmbeddedServer(folder)
    assert Path(postmaster(folder).exe()).is_relative_to(place)
    server.close()
    assert private.stat().st_mode & 0o777 == 0o700
    assert [path.name[:9] for path in place.iterdir()] == ["programs-"]


def test_a_half_made_data_folder_is_made_again(folder):
    (folder / "data.new").mkdir(parents=True)
    (folder / "data.new" / "PG_VERSION").write_text("18\n")
    server = EmbeddedServer(folder)
    assert ask(server) == [(1,)]
    server.close()


def test_a_link_to_another_folder_deletes_nothing_there(folder):
    precious = folder.parent / "precious"
    precious.mkdir(parents=True)
    (precious / "file").write_text("kept")
    folder.mkdir()
    (folder / "data.new").symlink_to(precious / "data")
    with user(folder) as process:
        assert ask(process) == [(1,)]
    assert (precious / "file").read_text() == "kept"


def test_a_server_of_a_deleted_folder_is_ended(folder):
    EmbeddedServer(folder)
    old = postmaster(folder)
    # rm ignores a file that the dying server deletes first; shutil.rmtree fails.
    subprocess.run(["rm", "-rf", folder], check=True)
    server = EmbeddedServer(folder)
    assert postmaster(folder) != old
    assert not old.is_running() or old.status() == psutil.STATUS_ZOMBIE
    assert ask(server) == [(1,)]
    server.close()


@pytest.mark.parametrize(
    "name", ["deep folder/" * 20, "with 'quotes', commas, and spaces", "é\N{FILE CABINET}"]
)
def test_any_folder_name_works(folder, name):
    (folder / name).mkdir(parents=True)  # open, so that root's data is there, too
    server = EmbeddedServer(folder / name)
    assert ask(server) == [(1,)]
    server.close()


@pytest.mark.parametrize("character", '"$`\\')
def test_a_folder_that_pg_ctl_cannot_quote_is_refused(folder, character):
    path = folder / f"a{character}b"
    with pytest.raises(LedgerError, match=re.escape(repr(str(path)))):
        EmbeddedServer(path)


def test_only_the_servers_user_enters_a_separate_socket_folder(folder):
    (deep := folder / ("deep/" * 40)).mkdir(parents=True)
    server = EmbeddedServer(deep)
    assert server.socket_folder.parent == Path("/tmp")
    assert server.socket_folder.stat().st_mode & 0o777 == 0o700
    server.close()
    assert not server.socket_folder.exists()


def test_concurrent_processes_start_one_server(folder):
    commands = [[sys.executable, "-c", USER, str(folder), "600"]] * 4
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    assert [process.stdout.readline().strip() for process in processes] == [f"{folder}/data"] * 4
    for process in processes:
        process.communicate("\n")
        assert process.returncode == 0
    assert postmaster(folder) is None


def test_an_interrupt_from_the_terminal_does_not_reach_the_server(folder):
    command = [sys.executable, "-c", USER, str(folder), "600"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with process, user(folder) as other:
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        process.wait()
        assert ask(other) == [(1,)]


COUNTER = """
import ctypes, os, subprocess, sys
from pathlib import Path
from caf_pipeline.ledger.embedded import EmbeddedServer
prepared = []
handler = ctypes.CFUNCTYPE(None)(lambda: prepared.append(1))
assert ctypes.CDLL(None).__register_atfork(handler, None, None, None) == 0
EmbeddedServer(Path(sys.argv[1])).close()
print(len(prepared))
subprocess.run(["/bin/true"], check=True, preexec_fn=lambda: None)
print(len(prepared))
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "__register_atfork"), reason="pthread_atfork of glibc"
)
@pytest.mark.parametrize("closed", [False, True])
def test_no_fork_handler_runs_when_a_server_starts(folder, closed):
    if closed:
        folder.parents[1].chmod(0o700)
    counted = subprocess.run(
        [sys.executable, "-c", COUNTER, folder], capture_output=True, text=True, check=True
    )
    assert counted.stdout.split() == ["0", "1"]


def test_a_process_has_one_share(folder):
    assert embedded_server(folder) is embedded_server(folder.parent / "." / "postgres")
    embedded_server(folder).close()
    assert postmaster(folder) is None


def test_another_major_version_is_refused(folder):
    EmbeddedServer(folder).close()
    (folder / "data" / "PG_VERSION").write_text("17\n")
    with pytest.raises(LedgerError, match="made by Postgres 17"):
        EmbeddedServer(folder)


def test_a_server_that_cannot_start_says_why(folder):
    EmbeddedServer(folder).close()
    with (folder / "data" / "server.log").open("a") as file:
        file.write("FATAL:  an old line\n")
    with (folder / "data" / "postgresql.conf").open("a") as file:
        file.write("\nno_such_setting = 1\n")
    with pytest.raises(LedgerError, match=r"no_such_setting|configuration file") as refused:
        EmbeddedServer(folder)
    assert "server.log" in refused.value.hint
    assert "an old line" not in str(refused.value)
    assert "CAF_DATABASE_URL" not in refused.value.hint


def test_a_home_that_is_a_file_is_refused(folder):
    folder.parent.mkdir()
    folder.write_text("")
    with pytest.raises(LedgerError, match="cannot be started"):
        embedded_server(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without root's rights already")
def test_it_runs_without_roots_rights():
    account = {"user": "nobody", "group": "nogroup", "extra_groups": []}
    try:
        subprocess.run(
            [sys.executable, "-c", "import psutil"],
            check=True,
            capture_output=True,
            cwd="/",
            **account,
        )
    except (PermissionError, subprocess.CalledProcessError):
        pytest.skip("this Python can be run by root only")
    with tempfile.TemporaryDirectory(prefix="caf-pg-") as name:
        shutil.chown(name, "nobody", "nogroup")
        package = str(Path(__file__).parents[2])
        with user(
            Path(name) / "postgres", **account, cwd="/", env={"PYTHONPATH": package}
        ) as other:
            assert ask(other) == [(1,)]
            assert postmaster(Path(name) / "postgres").username() == "nobody"
