"""A worker process that archives chunks of one source, one after the other.

`workers` sends it chunks' names through a pipe. It answers READY, then SEALED and a `ChunkOutcome`
for each chunk, or the CafError that keeps it from archiving any. Its progress is in the ledger. It
ends with its command, even if that is killed.
"""

import os
import threading
import time
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Final, cast

from caf_pipeline.errors import INTERRUPTED, CafError
from caf_pipeline.settings import Settings

READY: Final = "ready"  # the worker can begin, and can be interrupted
SEALED: Final = "sealed"  # the chunk is packed

POLL_SECONDS: Final = 0.5
"""Seconds between two checks whether the command still lives."""


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
    settings, source = cast("tuple[Settings, str]", connection.recv())
    try:
        _archive(connection, settings, source)
    except CafError as error:
        _send(connection, error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _send(connection: "Connection[object, object]", message: object) -> None:
    try:
        connection.send(message)
    except OSError:
        os._exit(1)  # the command is dead


def _archive(connection: "Connection[object, object]", settings: Settings, source: str) -> None:
    from dagster import DagsterExecutionInterruptedError  # noqa: PLC0415

    from caf_pipeline.dagster_host.code_location import code_location  # noqa: PLC0415
    from caf_pipeline.dagster_host.sigint import InterruptWatch  # noqa: PLC0415
    from caf_pipeline.dagster_host.source_runs import SourceRuns, open_instance  # noqa: PLC0415
    from caf_pipeline.wiring import open_ledger  # noqa: PLC0415

    with InterruptWatch() as watch:
        try:
            with open_instance(settings) as instance, closing(open_ledger(settings)) as ledger:
                runs = SourceRuns(
                    settings,
                    instance,
                    ledger,
                    source,
                    location=code_location(settings, [source]),
                    watch=watch,
                    sealed=lambda: _send(connection, SEALED),
                )
                _send(connection, READY)
                while (chunk := connection.recv()) is not None:
                    _send(connection, runs.archive(str(chunk)))
        except DagsterExecutionInterruptedError as interrupt:
            raise KeyboardInterrupt from interrupt
        except EOFError:  # the command is dead
            return
        except Exception:
            watch.raise_seen()
            raise
