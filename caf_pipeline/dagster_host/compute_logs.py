"""Where the output of a run's steps is kept: Dagster's own files, shown in its terminal by a thread
of the run's process.

Dagster's own manager starts four programs for each run to show it there, which inherit the run's
keys and the wallet's words.
"""

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

from caf_pipeline.dagster_host.dagster_private import (
    CapturedLogContext,
    ConfigurableClassData,
    LocalComputeLogManager,
    redirect_to_file,
)
from caf_pipeline.dagster_host.storage import storage_folder

LOOK_SECONDS: Final = 0.5
END_SECONDS: Final = 5
"""A terminal that takes nothing more, e.g. a pipe that is not read, does not hold the run."""


class FollowedComputeLogs(LocalComputeLogManager):
    """Dagster's local manager, with a thread in the place of its programs."""

    @classmethod
    def config_type(cls) -> Mapping[str, Any]:
        """Return the config's schema: it has none."""
        return {}

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> "FollowedComputeLogs":
        """Return one over the folder that Dagster's would use."""
        return cls(base_dir=str(storage_folder() / "storage"), inst_data=inst_data)

    @contextmanager
    def capture_logs(self, log_key: Sequence[str]) -> Iterator[CapturedLogContext]:
        """Write standard output and error to the files of a step while the context lasts, and show
        them.
        """
        out, error, complete = (
            Path(self.get_captured_local_path(log_key, ending))
            for ending in ("out", "err", "complete")
        )
        with _kept(sys.stdout, out), _kept(sys.stderr, error):
            yield CapturedLogContext(log_key)
        complete.touch()


@contextmanager
def _kept(stream: TextIO, path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    try:
        terminal = os.dup(stream.fileno())
    except OSError:  # it is not a file, as under pytest
        with redirect_to_file(stream, str(path)):
            yield
        return
    ended = threading.Event()
    follower = threading.Thread(target=_follow, args=(path, terminal, ended), daemon=True)
    follower.start()
    try:
        with redirect_to_file(stream, str(path)):
            yield
    finally:
        ended.set()
        follower.join(END_SECONDS)


def _follow(path: Path, terminal: int, ended: threading.Event) -> None:
    """Write what is added to a file to the terminal; close it when all is written that was there at
    the end.
    """
    with path.open("rb") as file, os.fdopen(terminal, "wb", buffering=0) as shown:
        while True:
            last = ended.is_set()
            while piece := file.read(1 << 16):
                try:
                    shown.write(piece)
                except OSError:
                    return  # the terminal is gone; the file has everything
            if last:
                return
            ended.wait(LOOK_SECONDS)
