"""Where the processes of this project begin. All tricks with the interpreter are here.

Each has its gain in user and system CPU time: the medians of ten runs with it and ten without it,
in turn. The machine had two cores and was busy (2026-11-27, Python 3.11).
"""

import atexit
import gc
import os
import signal
import sys
from types import FrameType, TracebackType

# `errors.INTERRUPTED`: while that module is loaded, or `typing`, Ctrl-C would still leave a
# traceback
_INTERRUPTED = 130
_SENTENCE = b"caf: interrupted; the same command goes on where it stopped\n"


def main() -> int:
    """Run the command of this process's arguments; return its exit status."""
    signal.signal(signal.SIGINT, _leave)
    end_early()
    leave_out_unused()
    from caf_pipeline.cli import main as command  # noqa: PLC0415  loading is what may be interrupted
    from caf_pipeline.system.ending import end_in_order, ignore_further, interrupted_status  # noqa: PLC0415

    look_rarely()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end_in_order()
        status = command()
        atexit.register(ignore_further)
        return ends_with(status)
    except (
        KeyboardInterrupt
    ):  # the command line says it itself but for its first lines and its last
        os.write(2, _SENTENCE)
        atexit.register(ignore_further)
        return ends_with(
            interrupted_status()
        )  # what a command opened is closed before, an embedded Postgres, say


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process: nothing was begun."""
    os.write(2, _SENTENCE)
    os._exit(_INTERRUPTED)


def archive_chunks() -> int:
    """Run a process that archives chunks for `caf run`; return its exit status.

    The arguments are those of `worker.main`.
    """
    end_early()
    leave_out_unused()
    look_rarely()
    from caf_pipeline.dagster_host.worker import main as archive  # noqa: PLC0415

    return ends_with(archive(*map(int, sys.argv[1:])))


# --- fewer looks for garbage in cycles
# -------------------------------------------------------------------------------

_LOADED = 250_000
"""New containers before the first look, nearly all of them modules', which stay: a look-up has
145,000 when it is done, a process that loads Dagster has more than these before it comes to DuckDB.
"""

_THRESHOLDS = (50_000, 20, 20)
"""New containers before a look at the young ones, and looks before one at older ones.

Python's own are (700, 10, 10).
"""


def look_rarely() -> None:
    """Let this process look rarely; what is in no cycle is freed at once, as ever.

    Gain: 0.4 s of the 3.0 s of a `caf run` with nothing to do, 0.04 s of a `caf get`.
    """
    gc.set_threshold(_LOADED, *_THRESHOLDS[1:])
    gc.callbacks.append(_looked)


def _looked(phase: str, _: object) -> None:
    """Let the looks after the first one be as often as they shall be, and pass over what this one
    has left.
    """
    if phase == "stop":
        gc.callbacks.remove(_looked)
        gc.set_threshold(*_THRESHOLDS)
        _pass_over()


def _pass_over() -> None:
    # DuckDB's objects must not be passed over by the interpreter's own last looks: nanobind, which
    # it is built with, tells on stderr of each that is left in the end.
    if "duckdb" not in sys.modules:
        gc.freeze()


class NoLooks:
    """Look for no garbage while the context lasts, in a process of somebody else's: for modules,
    which stay.

    Later looks pass over what is loaded by then, if DuckDB is not.

    Gain: 0.7 s of the 2.8 s that loading the definitions takes; Dagster's daemon starts a process
    for each run.
    """

    def __enter__(self) -> None:
        self._looked = gc.isenabled()
        gc.disable()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _pass_over()
        if self._looked:
            gc.enable()


# --- no end of the interpreter's own
# ---------------------------------------------------------------------------------

_statuses: list[int] = []


def end_early() -> None:
    """Let this process end, after `ends_with`, without the interpreter's own end: its looks, and
    taking all modules apart.

    Threads are waited for and the functions of `atexit` are called before, as ever; those that were
    registered before this function was called are left out.

    Gain: 0.5 s of the 3.0 s of a `caf run` with nothing to do, 0.04 s of a `caf get`.
    """
    atexit.register(_end)


def ends_with(status: int) -> int:
    """Return the exit status of a process that has nothing more to do.

    Without it the end is the usual one.
    """
    _statuses.append(status)
    return status


def _end() -> None:
    if _statuses:
        sys.stdout.flush()
        os._exit(_statuses[0])


# --- modules that are not loaded
# -------------------------------------------------------------------------------------


class _NoPandas:
    """Fails the import of pandas, as where it is not installed: who imports it can do without."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is left out of this process", name=name)


def leave_out_unused() -> None:
    """Let this process, which runs no code but this project's, load no pandas. pyarrow does, for
    the first array of a list.

    Gain: 0.3 s of each process that packs or plans, if pandas is installed.
    """
    sys.meta_path.insert(0, _NoPandas)


if __name__ == "__main__":  # started by `dagster_host.workers`
    sys.exit(archive_chunks())
