"""A durable Postgres of a single test, which can be killed and restarted."""

import contextlib
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Self

import psutil
import psycopg

from caf_pipeline.ledger.embedded import SUPERUSER, EmbeddedServer

_numbers = itertools.count(1)


class OwnPostgres:
    """The embedded server in a folder under /tmp, since socket paths must be short."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="caf-pg-"))
        self._server = EmbeddedServer(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def new_database(self) -> str:
        """Create a database; return its address, which a kill does not change."""
        name = f"test_{next(_numbers)}"
        with psycopg.connect(self._url(SUPERUSER), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self._url(name)

    def _url(self, database: str) -> str:
        return f"postgresql://{SUPERUSER}@/{database}?host={self._server.socket_folder}"

    def kill(self) -> None:
        """Kill all its processes by SIGKILL; return when they are gone."""
        pid = int((self._folder / "data" / "postmaster.pid").read_text().split()[0])
        postmaster = psutil.Process(pid)
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=30)

    def start(self) -> None:
        """Start it on the same data; return when it answers."""
        self._server.close()
        self._server = EmbeddedServer(self._folder)
