"""A pgbouncer in transaction mode in front of a test's database.

Clients share two connections to the server. Tests are skipped if the program is missing; `.ci/run`
installs it.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.sql_files import make_tables
from caf_pipeline_tests.support.free_ports import free_port

_LOOKS = 400


class Pooler:
    """A pgbouncer for one database.

    `url` is the database's address through it, which a kill does not change.
    """

    def __init__(self, folder: Path, database_url: str) -> None:
        program = shutil.which("pgbouncer")
        if program is None:
            pytest.skip("pgbouncer is not installed (apt-get install pgbouncer)")
        self._program, self._folder = program, folder
        self._process: subprocess.Popen[bytes] | None = None
        server, port = conninfo_to_dict(database_url), free_port()
        user, name = server["user"], server["dbname"]
        self.url = f"postgresql://{user}@127.0.0.1:{port}/{name}"
        (folder / "users.txt").write_text(f'"{user}" ""\n')
        (folder / "pgbouncer.ini").write_text(
            f"[databases]\n{name} = host={server['host']} dbname={name} user={user}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir "
            "=\nauth_type = any\n"
            f"auth_file = {folder}/users.txt\npool_mode = transaction\ndefault_pool_size = 2\n"
        )
        # Like Postgres it does not run as root. Only the server's user can use the embedded
        # server's socket.
        self._account = Path(server["host"]).stat()
        if os.geteuid() == 0:
            for path in (folder, *folder.iterdir()):
                os.chown(path, self._account.st_uid, self._account.st_gid)

    def start(self) -> None:
        """Start the program. Returns when it answers."""
        owner = {"user": self._account.st_uid, "group": self._account.st_gid, "extra_groups": []}
        account = owner if os.geteuid() == 0 else {}
        log = self._folder / "log"
        with log.open("a") as output:
            command = [self._program, "-q", str(self._folder / "pgbouncer.ini")]
            self._process = subprocess.Popen(command, stdout=output, stderr=output, **account)  # type: ignore[call-overload]
        for _ in range(_LOOKS):
            assert self._process.poll() is None, log.read_text()
            with (
                contextlib.suppress(psycopg.OperationalError),
                Database(self.url).connect() as connection,
            ):
                make_tables(connection)
                return
            time.sleep(0.05)
        raise AssertionError(log.read_text())

    def kill(self) -> None:
        """End the program by SIGKILL. Does nothing if it does not run."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def running_pooler(database_url: str) -> Iterator[Pooler]:
    """Run a pooler for the duration of the context."""
    with tempfile.TemporaryDirectory(prefix="caf-pgbouncer-") as name:
        pooler = Pooler(Path(name), database_url)
        try:
            pooler.start()
            yield pooler
        finally:
            pooler.kill()
