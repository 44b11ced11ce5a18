"""A worker process that archives chunks of one source, one after the other.

`workers` sends it chunks' names through a pipe. It answers with tuples of a name, arguments and
keyword arguments. It ends with its command, even if that is killed.
"""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Final, cast

from caf_pipeline.errors import INTERRUPTED, CafError
from caf_pipeline.settings import Settings
from caf_pipeline.waits import Wait, Waits

READY: Final = "ready"  # the worker can begin, and can be interrupted
BROKEN: Final = "broken"  # no chunk can be archived; the argument is the error
ARCHIVED: Final = "archived"  # the run of a chunk ended; the arguments are those of `ChunkOutcome`
SEALED: Final = "sealed"
"""All other messages, and SEALED, are methods of `source_runs.RunListener`."""

SEND_SECONDS: Final = 0.1
"""Seconds between two messages; progress changes thousands of times per second."""

POLL_SECONDS: Final = 0.5
"""Seconds between two checks whether the command still lives."""


class _PipeListener:
    """Sends the progress of runs through the pipe. Thread-safe."""

    def __init__(self, connection: "Connection[object, object]") -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._packed = (0, 0)
        self._sent_bytes = 0
        self._flushed_at = 0.0

    def send(self, name: str, *arguments: object, **named: object) -> None:
        """Send a message, after all progress that was counted before it."""
        with self._lock:
            self._flush()
            self._write(name, *arguments, **named)

    def begin(self, chunk: str) -> None:
        self.send("begin", chunk)

    def packed(self, objects: int, size_bytes: int, *, resumed: bool) -> None:
        if resumed:
            self.send("packed", objects, size_bytes, resumed=True)
            return
        with self._lock:
            self._packed = self._packed[0] + objects, self._packed[1] + size_bytes
            self._flush(throttle=True)

    def sent(self, size_bytes: int) -> None:
        with self._lock:
            self._sent_bytes += size_bytes
            self._flush(throttle=True)

    def sealed(self) -> None:
        self.send(SEALED)

    def waiting(self, waits: Sequence[Wait]) -> None:
        self.send("waiting", tuple(waits))

    def say(self, line: str, style: str | None = None) -> None:
        self.send("say", line, style)

    def _flush(self, *, throttle: bool = False) -> None:
        if throttle and time.monotonic() - self._flushed_at < SEND_SECONDS:
            return
        if any(self._packed):
            self._write("packed", *self._packed, resumed=False)
        if self._sent_bytes:
            self._write("sent", self._sent_bytes)
        self._packed, self._sent_bytes, self._flushed_at = (0, 0), 0, time.monotonic()

    def _write(self, name: str, *arguments: object, **named: object) -> None:
        try:
            self._connection.send((name, arguments, named))
        except OSError:
            os._exit(1)  # the command is dead


def main(descriptor: int, command: int) -> int:
    """Archive chunks until the pipe sends None.

    `descriptor` is this end of the pipe, `command` the process id at the other end.
    """

    def exit_with_command() -> None:
        # Like a kill: the next command finds everything resumable.
        while os.getppid() == command:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=exit_with_command, daemon=True).start()
    connection: Connection[object, object] = Connection(descriptor)
    listener = _PipeListener(connection)
    settings, source = cast("tuple[Settings, str]", connection.recv())
    try:
        _archive(connection, listener, settings, source)
    except CafError as error:
        listener.send(BROKEN, error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _archive(
    connection: "Connection[object, object]",
    listener: _PipeListener,
    settings: Settings,
    source: str,
) -> None:
    from dagster import DagsterExecutionInterruptedError  # noqa: PLC0415

    from caf_pipeline.dagster_host.code_location import code_location  # noqa: PLC0415
    from caf_pipeline.dagster_host.sigint import InterruptWatch  # noqa: PLC0415
    from caf_pipeline.dagster_host.source_runs import SourceRuns, open_instance  # noqa: PLC0415
    from caf_pipeline.wiring import open_ledger  # noqa: PLC0415

    with InterruptWatch() as watch:
        try:
            waits = Waits(listener.waiting)
            with (
                open_instance(settings, waits) as instance,
                closing(open_ledger(settings, waits)) as ledger,
            ):
                runs = SourceRuns(
                    settings,
                    instance,
                    ledger,
                    source,
                    location=code_location(settings, [source]),
                    watch=watch,
                    listener=listener,
                )
                listener.send(READY)
                while (chunk := connection.recv()) is not None:
                    outcome = runs.archive(str(chunk))
                    listener.send(ARCHIVED, outcome.error, outcome.holder, outcome.ended)
        except DagsterExecutionInterruptedError as interrupt:
            raise KeyboardInterrupt from interrupt
        except EOFError:  # the command is dead
            return
        except Exception:
            watch.raise_seen()
            raise
