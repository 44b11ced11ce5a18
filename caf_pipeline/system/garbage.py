"""How often Python looks for garbage in cycles."""

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

_LOADED: Final = 250_000
"""New containers before the first look, nearly all of them modules', which stay: a look-up has 145,000 when it is done, a process
that loads Dagster has more than these before it comes to DuckDB."""

_THRESHOLDS: Final = (50_000, 20, 20)
"""New containers before a look at the young ones, and looks before one at older ones. With Python's own 700, the half a million
that modules are made of were looked at 745 times: a sixth of the CPU time of a run with nothing to do."""


@contextmanager
def no_looks() -> Iterator[None]:
    """Look for no garbage while the context lasts, in a process of somebody else's: for modules, which stay.

    Later looks pass over what is loaded by then, if DuckDB is not. Dagster's daemon starts a process for each run: these looks
    were a tenth of its loading, and those at Dagster's modules afterwards three tenths of a second.
    """
    looked = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _pass_over()
        if looked:
            gc.enable()


def look_rarely() -> None:
    """Let this process look rarely; what is in no cycle is freed at once, as ever."""
    _, *older = _THRESHOLDS
    gc.set_threshold(_LOADED, *older)
    gc.callbacks.append(_looked)


def _looked(phase: str, _: Mapping[str, int]) -> None:
    """Let the looks after the first one be as often as they shall be, and pass over what this one has left."""
    if phase == "stop":
        gc.callbacks.remove(_looked)
        gc.set_threshold(*_THRESHOLDS)
        _pass_over()


def _pass_over() -> None:
    # DuckDB's objects must not be passed over by the interpreter's own last looks: nanobind, which it is built with, tells on
    # stderr of each that is left in the end.
    if "duckdb" not in sys.modules:
        gc.freeze()


def end_without_looks() -> Callable[[int], int]:
    """Let this process end without the interpreter's own end: its looks, and the taking apart of all modules.

    They were a tenth of the CPU time of a command that loads Dagster, a fifth of one that loads DuckDB. Threads are waited for
    and the functions of `atexit` are called before, as ever; those that were registered before this one was called are left out.

    Returns:
        What takes the exit status and returns it, when the process has nothing more to do. Without it the end is the usual one.
    """
    told: list[int] = []

    def leave() -> None:
        if told:
            sys.stdout.flush()
            os._exit(told[0])

    def ends_with(status: int) -> int:
        told.append(status)
        return status

    atexit.register(leave)
    return ends_with
