"""The resource with which assets of other Dagster projects read archived objects."""

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

    The archive is opened when the first one is asked for, and closed after the run.

    A process that an asset forks opens its own: two on one connection would read each other's
    answers.

    Secrets are no fields: they come from the environment or from files, as for `caf`. Methods raise
    what `Archive`'s do.
    """

    settings_file: str = Field(
        default="",
        description="The path of caf.toml; by default what CAF_CONFIG names, else that of the "
        "working directory.",
    )
    _archives: dict[int, Archive] = PrivateAttr(default_factory=dict)  # by process
    _locks: ClassVar[
        dict[int, threading.Lock]
    ] = {}  # by process: a fork may come while another thread has it

    @property
    def archive(self) -> Archive:
        """The open archive, for what this resource has no method for.

        Raises: SettingsError: a setting cannot be used. LedgerUnreachable, LedgerError: the
            database cannot.
        """
        pid = os.getpid()
        with self._locks.setdefault(pid, threading.Lock()):
            if pid not in self._archives:
                self._archives[pid] = open_archive(
                    load_settings(Path(self.settings_file) if self.settings_file else None)
                )
            return self._archives[pid]

    def read(self, source: str, key: str, version: str | None = None) -> bytes:
        """Return an object's bytes, which were compared with its SHA-256; see `Archive.read`."""
        return self.archive.read(source, key, version)

    def open(self, source: str, key: str, version: str | None = None) -> io.BufferedReader:
        """Return an object as a binary file that can be sought; see `Archive.open`."""
        return self.archive.open(source, key, version)

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        """Close the archive."""
        if opened := self._archives.pop(os.getpid(), None):
            opened.close()
