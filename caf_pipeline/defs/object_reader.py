"""A resource with which other Dagster projects read archived objects."""

import io
import os
import threading
from pathlib import Path
from typing import ClassVar

from dagster import ConfigurableResource, InitResourceContext
from pydantic import Field, PrivateAttr

from caf_pipeline.retrieval.archive import Archive
from caf_pipeline.settings import load_settings
from caf_pipeline.wiring import open_archive


class ObjectReader(ConfigurableResource["ObjectReader"]):
    """Reads archived objects by source and key.

    The archive is opened on first use and closed after the run; a forked process opens its own.
    Secrets come from the environment or from files, as for `caf`. The methods raise the errors of
    `Archive`.
    """

    settings_file: str = Field(
        default="",
        description="Path of caf.toml. Default: the path in CAF_CONFIG, or caf.toml in the working "
        "directory.",
    )
    _archives: dict[int, Archive] = PrivateAttr(default_factory=dict)  # by process
    # By process, since a process may be forked while another thread holds the lock.
    _locks: ClassVar[dict[int, threading.Lock]] = {}

    @property
    def archive(self) -> Archive:
        """The open archive. Raises SettingsError, LedgerUnreachable or LedgerError."""
        pid = os.getpid()
        with self._locks.setdefault(pid, threading.Lock()):
            if pid not in self._archives:
                self._archives[pid] = open_archive(
                    load_settings(Path(self.settings_file) if self.settings_file else None)
                )
            return self._archives[pid]

    def read(self, source: str, key: str, version: str | None = None) -> bytes:
        return self.archive.read(source, key, version)

    def open(self, source: str, key: str, version: str | None = None) -> io.BufferedReader:
        return self.archive.open(source, key, version)

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        if opened := self._archives.pop(os.getpid(), None):
            opened.close()
