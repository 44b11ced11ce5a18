"""Captures the output of steps in Dagster's files, and copies it to the terminal by a thread.

Dagster's own manager starts four programs per run, which would inherit access keys and the wallet's
words.
"""

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

from caf_pipeline.dagster_host.storage import storage_folder
from caf_pipeline.dagster_private import (
    CapturedLogContext,
    ConfigurableClassData,
    LocalComputeLogManager,
    redirect_to_file,
)

POLL_SECONDS: Final = 0.5
END_SECONDS: Final = 5
"""Wait at a run's end for a terminal that accepts no output, e.g. a pipe."""


class FollowedComputeLogs(LocalComputeLogManager):
    """Dagster's local manager, with a thread instead of programs."""

    @classmethod
    def config_type(cls) -> Mapping[str, Any]:
        return {}

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]
    ) -> "FollowedComputeLogs":
        return cls(base_dir=str(storage_folder() / "storage"), inst_data=inst_data)

    @contextmanager
    def capture_logs(self, log_key: Sequence[str]) -> Iterator[CapturedLogContext]:
        out, error, complete = (
            Path(self.get_captured_local_path(log_key, ending))
            for ending in ("out", "err", "complete")
        )
        with _captured(sys.stdout, out), _captured(sys.stderr, error):
            yield CapturedLogContext(log_key)
        complete.touch()


@contextmanager
def _captured(stream: TextIO, path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    try:
        terminal = os.dup(stream.fileno())
    except OSError:  # the stream is not a file, e.g. under pytest
        with redirect_to_file(stream, str(path)):
            yield
        return
    ended = threading.Event()

    def follow() -> None:
        with path.open("rb") as file, os.fdopen(terminal, "wb", buffering=0) as screen:
            while True:
                last = ended.is_set()
                while piece := file.read(1 << 16):
                    try:
                        screen.write(piece)
                    except OSError:
                        return  # the terminal is gone; the file has the output
                if last:
                    return
                ended.wait(POLL_SECONDS)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        with redirect_to_file(stream, str(path)):
            yield
    finally:
        ended.set()
        follower.join(END_SECONDS)
