"""How often Python looks for garbage in cycles."""

import atexit
import gc
import sys
from collections.abc import Iterator, Mapping
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

    Dagster's daemon starts a process for each run, of whose loading a tenth was these looks.
    """
    looked = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looked:
            gc.enable()


def look_rarely() -> None:
    """Let this process look rarely, and not at its end; what is in no cycle is freed at once, as ever.

    The looks that the interpreter takes while it ends, at what ends with the process, were a sixth of the CPU time of `caf get`.
    DuckDB needs them: nanobind, which it is built with, tells on stderr of each of its objects that is left in the end. What was
    loaded before it is left out of them all the same, which saves a process that loads Dagster a third of a second.
    """
    _, *older = _THRESHOLDS
    gc.set_threshold(_LOADED, *older)
    gc.callbacks.append(_looked)
    atexit.register(_pass_over)


def _looked(phase: str, _: Mapping[str, int]) -> None:
    """Let the looks after the first one be as often as they shall be, and pass over what this one has left."""
    if phase == "stop":
        gc.callbacks.remove(_looked)
        gc.set_threshold(*_THRESHOLDS)
        _pass_over()


def _pass_over() -> None:
    if "duckdb" not in sys.modules:
        gc.freeze()
