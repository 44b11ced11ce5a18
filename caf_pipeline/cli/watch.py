"""`caf status --watch`: how far sources are, again and again, until it is interrupted."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, NoReturn

from rich.live import Live
from rich.text import Text

from caf_pipeline.chunk_state import IN_GOOD_STANDING, UNDER_WAY, ChunkState
from caf_pipeline.cli.opened_ledger import opened_ledger
from caf_pipeline.cli.opening import require_source
from caf_pipeline.cli.terminal import counted, note, print_json, show_size, show_time
from caf_pipeline.errors import CafError
from caf_pipeline.ledger.records import SourceProgress
from caf_pipeline.settings import Settings

_SHOWN: Final = frozenset({*UNDER_WAY, *IN_GOOD_STANDING, ChunkState.PARKED})
"""What is archived, or is to be.

Chunks that were given up are not part of the whole: their objects are in others.
"""

_NOTHING: Final = "nothing is planned yet"


def watch(settings: Settings, source: str | None, *, interval: float, json: bool) -> NoReturn:
    """Say how far a source is, or all, every `interval` seconds.

    A database that does not answer is said and asked again, once it was opened.

    Raises:
        SettingsError: there is no such source. KeyboardInterrupt: the only way in which it ends.
    """
    with opened_ledger(settings) as ledger, _shown(json) as show:
        if source is not None:
            require_source(settings, ledger.lookup, source)
        while True:
            try:
                show(ledger.progress.of([source] if source else ledger.lookup.sources()))
            except CafError as error:
                if error.permanent:
                    raise
                note(f"{error}; asked again in {interval:g} s")
            time.sleep(interval)


@contextmanager
def _shown(json: bool) -> Iterator[Callable[[Sequence[SourceProgress]], None]]:
    """Give what shows one look: JSON lines; lines, one a source, with the time; or on a terminal
    lines that are replaced.
    """
    if json:
        yield _print_json
    elif not sys.stdout.isatty():
        yield _print_lines
    else:
        with Live(auto_refresh=False) as live:
            yield lambda found: live.update(
                Text("\n".join(map(_line, found)) or _NOTHING), refresh=True
            )


def _print_lines(found: Sequence[SourceProgress]) -> None:
    print("\n".join(f"{show_time(one.at)} {_line(one)}" for one in found) or _NOTHING, flush=True)


def _line(one: SourceProgress) -> str:
    done, whole, left = one.sums(IN_GOOD_STANDING), one.sums(_SHOWN), one.sums(UNDER_WAY)
    parked, damaged = one.sums([ChunkState.PARKED]).chunks, one.sums([ChunkState.DAMAGED]).chunks
    said = f"{one.source}: {done.chunks:,} of {counted(whole.chunks, 'chunk')} located"
    said += f" ({damaged:,} of them damaged since)" if damaged else ""
    said += f", {parked:,} parked" if parked else ""
    said += f"; {show_size(done.size_bytes)} of {show_size(whole.size_bytes)}"
    said += f", {done.objects:,} of {counted(whole.objects, 'object')}"
    if not left.chunks:
        return f"{said}; nothing under way"
    if one.bytes_per_second is None or one.seconds_left is None:
        return f"{said}; no rate yet"
    over = (
        f"{counted(one.recent.chunks, 'chunk')} in the last "
        f"{timedelta(seconds=round(one.window_seconds))}"
    )
    rate = f"{show_size(round(one.bytes_per_second))} a second ({over})"
    return f"{said}; {rate}; about {timedelta(seconds=round(one.seconds_left))} left"


def _print_json(found: Sequence[SourceProgress]) -> None:
    for one in found:
        print_json(
            {
                "source": one.source,
                "at": one.at.isoformat(),
                "chunks": {str(state): sums.chunks for state, sums in one.states.items()},
                "objects": {str(state): sums.objects for state, sums in one.states.items()},
                "bytes": {str(state): sums.size_bytes for state, sums in one.states.items()},
                "window_seconds": round(one.window_seconds, 3),
                "window_chunks": one.recent.chunks,
                "window_objects": one.recent.objects,
                "window_bytes": one.recent.size_bytes,
                "bytes_per_second": one.bytes_per_second,
                "seconds_left": one.seconds_left,
            }
        )
    sys.stdout.flush()
