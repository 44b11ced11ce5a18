"""`caf status --watch`."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, NoReturn

from rich.live import Live
from rich.text import Text

from caf_pipeline.chunk_state import IN_GOOD_STANDING, UNDER_WAY, ChunkState
from caf_pipeline.cli.opening import opened_ledger, require_source
from caf_pipeline.cli.terminal import counted, note, print_json, show_size, show_time
from caf_pipeline.errors import CafError
from caf_pipeline.ledger.records import SourceProgress
from caf_pipeline.settings import Settings

_SHOWN: Final = frozenset({*UNDER_WAY, *IN_GOOD_STANDING, ChunkState.PARKED})
"""The objects of abandoned chunks are in other chunks."""

_NOTHING: Final = "nothing is planned yet"


def watch(settings: Settings, source: str | None, *, interval: float, json: bool) -> NoReturn:
    """Print progress every `interval` seconds until interrupted, even if the database fails later.

    Raises:
        SettingsError: There is no such source.
    """
    with opened_ledger(settings) as ledger, _printer(json) as show:
        if source is not None:
            require_source(settings, ledger.lookup, source)
        while True:
            try:
                show(ledger.progress.of([source] if source else ledger.lookup.sources()))
            except CafError as error:
                if error.permanent:
                    raise
                note(f"{error}; trying again in {interval:g} s")
            time.sleep(interval)


@contextmanager
def _printer(json: bool) -> Iterator[Callable[[Sequence[SourceProgress]], None]]:
    if json:
        yield _print_json
    elif not sys.stdout.isatty():
        yield lambda sources: print(
            "\n".join(f"{show_time(progress.at)} {_line(progress)}" for progress in sources)
            or _NOTHING,
            flush=True,
        )
    else:
        with Live(auto_refresh=False) as live:
            yield lambda sources: live.update(
                Text("\n".join(map(_line, sources)) or _NOTHING), refresh=True
            )


def _line(progress: SourceProgress) -> str:
    done, total = progress.sums(IN_GOOD_STANDING), progress.sums(_SHOWN)
    parked = progress.sums([ChunkState.PARKED]).chunks
    damaged = progress.sums([ChunkState.DAMAGED]).chunks
    line = f"{progress.source}: {done.chunks:,} of {counted(total.chunks, 'chunk')} located"
    line += f" ({damaged:,} of them damaged since)" if damaged else ""
    line += f", {parked:,} parked" if parked else ""
    line += f"; {show_size(done.size_bytes)} of {show_size(total.size_bytes)}"
    line += f", {done.objects:,} of {counted(total.objects, 'object')}"
    if not progress.live.is_empty:
        packed, sent = show_size(progress.live.packed_bytes), show_size(progress.live.sent_bytes)
        line += f"; live runs have {packed} packed and {sent} sent"
    if not progress.sums(UNDER_WAY).chunks:
        return f"{line}; nothing under way"
    if progress.bytes_per_second is None or progress.seconds_left is None:
        return f"{line}; no rate yet"
    window = timedelta(seconds=round(progress.window_seconds))
    recent = f"{counted(progress.recent.chunks, 'chunk')} in the last {window}"
    rate = f"{show_size(round(progress.bytes_per_second))} a second ({recent})"
    return f"{line}; {rate}; about {timedelta(seconds=round(progress.seconds_left))} left"


def _print_json(sources: Sequence[SourceProgress]) -> None:
    for progress in sources:
        states = progress.states.items()
        print_json(
            source=progress.source,
            at=progress.at,
            chunks={state: sums.chunks for state, sums in states},
            objects={state: sums.objects for state, sums in states},
            bytes={state: sums.size_bytes for state, sums in states},
            window_seconds=round(progress.window_seconds, 3),
            window_chunks=progress.recent.chunks,
            window_objects=progress.recent.objects,
            window_bytes=progress.recent.size_bytes,
            packed_objects=progress.live.packed_objects,
            packed_bytes=progress.live.packed_bytes,
            sent_bytes=progress.live.sent_bytes,
            bytes_per_second=progress.bytes_per_second,
            seconds_left=progress.seconds_left,
        )
    sys.stdout.flush()
