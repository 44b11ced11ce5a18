"""A run of a chunk that stops itself by SIGSTOP while packing, or after taking files over.

`python -m caf_pipeline_tests.support.pausing_run …`. After SIGCONT it continues. It prints the name
of the error that ended it.
"""

import os
import signal
import sys
from pathlib import Path

from caf_pipeline.errors import CafError
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.packing import pack_chunk, packer
from caf_pipeline_tests.support.dying_runs import OFTEN, SteadySource, a_steady_source
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_chunk


class PausingSource(SteadySource):
    """Stops the process at a read of this key."""

    pause_at = ""

    def read(self, obj, start_byte, end_byte):
        if obj.key.decode() == self.pause_at:
            self.pause_at = ""
            stop()
        return super().read(obj, start_byte, end_byte)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_behind_taking_over() -> None:
    take_over = pack_chunk.take_over

    def taken(*args, **named):
        files = take_over(*args, **named)
        stop()
        return files

    pack_chunk.take_over = taken


def main(folder: str, url: str, chunk: str, pause_at: str, lease_seconds: str) -> None:
    packer.pace_of = lambda settings: OFTEN
    source = PausingSource(a_steady_source().bodies)
    source.pause_at = pause_at
    if pause_at == "taking over":
        stop_behind_taking_over()
    ledger = Ledger(Database(url), lease_seconds=float(lease_seconds))
    context = a_run_context(Path(folder), source, ledger, run="paused", target="8MiB")
    try:
        archive_chunk(context, chunk)
    except CafError as error:
        print(type(error).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
