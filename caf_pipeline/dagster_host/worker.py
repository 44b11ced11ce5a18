"""A process that archives chunks of one source, one after the other, as `workers` tells it through
a pipe.

Each of its messages is a name, arguments, and named ones. It ends with the command that started it,
however that ends.
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

READY: Final = "ready"  # to begin, and to be interrupted
BROKEN: Final = "broken"  # by the error that follows: no chunk can be archived
ARCHIVED: Final = "archived"  # how the run of the chunk ended, as the fields of `Archived`
SEALED: Final = "sealed"
"""What it tells beside what `source_runs.RunListener` has; SEALED is one of those."""

TELL_SECONDS: Final = 0.1
"""Between two tellings of progress, which is counted thousands of times a second."""

LOOK_SECONDS: Final = 0.5
"""Between two looks whether the command that started this process still lives."""


class _Teller:
    """Tells through the pipe what a source's runs tell; see `source_runs.RunListener`.

    Safe for several threads.
    """

    def __init__(self, connection: "Connection[object, object]") -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._packed = (0, 0)
        self._sent_bytes = 0
        self._told_at = 0.0

    def tell(self, name: str, *arguments: object, **named: object) -> None:
        """Tell something, after all that was counted before it."""
        with self._lock:
            self._tell_counted()
            self._send(name, *arguments, **named)

    def begin(self, chunk: str) -> None:
        self.tell("begin", chunk)

    def packed(self, objects: int, size_bytes: int, *, resumed: bool) -> None:
        if resumed:
            self.tell("packed", objects, size_bytes, resumed=True)
            return
        with self._lock:
            self._packed = self._packed[0] + objects, self._packed[1] + size_bytes
            self._tell_seldom()

    def sent(self, size_bytes: int) -> None:
        with self._lock:
            self._sent_bytes += size_bytes
            self._tell_seldom()

    def sealed(self) -> None:
        self.tell(SEALED)

    def waiting(self, waits: Sequence[Wait]) -> None:
        self.tell("waiting", tuple(waits))

    def say(self, line: str, style: str | None = None) -> None:
        self.tell("say", line, style)

    def _tell_seldom(self) -> None:
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            self._tell_counted()

    def _tell_counted(self) -> None:
        if any(self._packed):
            self._send("packed", *self._packed, resumed=False)
        if self._sent_bytes:
            self._send("sent", self._sent_bytes)
        self._packed, self._sent_bytes, self._told_at = (0, 0), 0, time.monotonic()

    def _send(self, name: str, *arguments: object, **named: object) -> None:
        try:
            self._connection.send((name, arguments, named))
        except OSError:
            os._exit(1)  # who listened is dead


def main(descriptor: int, command: int) -> int:
    """Archive chunks until there is no further one; return the exit status.

    Args:
        descriptor: of this end of the pipe.
        command: the process id of the command that listens at the other.
    """
    threading.Thread(target=_die_with, args=(command,), daemon=True).start()
    connection: Connection[object, object] = Connection(descriptor)
    teller = _Teller(connection)
    settings, source = cast("tuple[Settings, str]", connection.recv())
    try:
        _archive(connection, teller, settings, source)
    except CafError as error:
        teller.tell(BROKEN, error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _archive(
    connection: "Connection[object, object]", teller: _Teller, settings: Settings, source: str
) -> None:
    from dagster import DagsterExecutionInterruptedError  # noqa: PLC0415

    from caf_pipeline.dagster_host.sigint import InterruptWatch  # noqa: PLC0415
    from caf_pipeline.dagster_host.source_runs import SourceRuns, open_instance  # noqa: PLC0415
    from caf_pipeline.run_wiring import open_ledger  # noqa: PLC0415

    with InterruptWatch() as watch:
        try:
            waits = Waits(teller.waiting)
            with (
                open_instance(settings, waits) as instance,
                closing(open_ledger(settings, waits)) as ledger,
            ):
                runs = SourceRuns(settings, instance, ledger, source, watch=watch, told=teller)
                teller.tell(READY)
                while (chunk := connection.recv()) is not None:
                    archived = runs.archive(str(chunk))
                    teller.tell(ARCHIVED, archived.error, archived.holder, archived.ended)
        except DagsterExecutionInterruptedError as interrupt:
            raise KeyboardInterrupt from interrupt
        except EOFError:  # the command is dead
            return
        except Exception:
            watch.raise_seen()
            raise


def _die_with(command: int) -> None:
    """End this process at once where the command is dead: the next one finds all as after a kill,
    and resumes.
    """
    while os.getppid() == command:
        time.sleep(LOOK_SECONDS)
    os._exit(1)
