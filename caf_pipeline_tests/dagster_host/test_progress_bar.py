"""The progress of `caf run`, with and without a terminal."""

import io
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from rich.console import Console

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.dagster_host.progress_bar import ChunkProgress, Rate
from caf_pipeline.ledger.records import LiveWork
from caf_pipeline.system.processes import this_process
from caf_pipeline.waits import Wait, Work
from caf_pipeline_tests.support.chunk_rows import a_chunk


@dataclass
class Works:
    """The work that the ledger has of the command's processes, by chunk."""

    items: dict[str, LiveWork] = field(default_factory=dict)

    def __call__(self):
        return list(self.items.values())

    def set(self, name, *counts, waits=()):
        self.items[name] = LiveWork("src", this_process(name), Work(name, *counts, waits=waits))


@pytest.fixture
def out():
    return io.StringIO()


@pytest.fixture
def works():
    return Works()


@pytest.fixture
def progress(out, works):
    return ChunkProgress(Console(file=out, width=200), "src", works)


@pytest.fixture
def packed(progress, works):
    """Record what is packed of a chunk, and look."""

    def record(name, objects, size_bytes, read_bytes=0):
        works.set(name, objects, size_bytes, read_bytes)
        progress.look()

    return record


def of(name, **more):
    fields = {"state": ChunkState.PLANNED, "object_count": 10, "object_bytes": 1000} | more
    return a_chunk(name, **fields)


def located(name, members=10):
    return of(
        name,
        state=ChunkState.LOCATED,
        member_count=members,
        member_bytes=100 * members,
        skipped_count=10 - members,
    )


def test_what_was_packed_of_a_failed_chunk_stays_counted(progress, works, packed):
    progress.plan([of("src-1-1"), of("src-1-2")])
    packed("src-1-1", 10, 1000)
    progress.end("src-1-1", located("src-1-1"))
    packed("src-1-2", 4, 400)
    progress.end("src-1-2", None)
    works.items.clear()
    progress.look()
    assert "14/20 objects" in progress.line()
    assert "1.4 KiB of 2.0 KiB" in progress.line()
    assert "1/2 chunks, 1 failed" in progress.line()


def test_the_time_left_is_shown_until_everything_is_sent(progress, works, packed):
    progress.plan([of("src-1-1")])
    packed("src-1-1", 5, 500)  # by an earlier run
    assert " left" not in progress.line()
    packed("src-1-1", 10, 1000, 500)
    assert " left" in progress.line()
    works.set("src-1-1", 10, 1000, 500, 1000)
    progress.look()
    assert " left" not in progress.line()


def shown_bytes(progress) -> int:
    return int(progress.line().removeprefix("src: ").split(" B of")[0])


def test_progress_never_goes_backwards_and_is_true_at_the_end(out, works):
    sizes = []
    with ChunkProgress(Console(file=out, width=200), "src", works) as progress:
        progress.plan([of("src-1-1", object_bytes=500), of("src-1-2", object_bytes=500)])
        # An object is read in part and skipped, then packing begins again.
        for objects, size_bytes in ((3, 300), (3, 400), (4, 300), (0, 0), (3, 300)):
            works.set("src-1-1", objects, size_bytes)
            progress.look()
            sizes.append(shown_bytes(progress))
        progress.end("src-1-1", None)
        sizes.append(shown_bytes(progress))
    assert sizes == [300, 400, 400, 400, 400, 400]
    assert "src: 300 B of 1000 B, 3/20 objects, 0/2 chunks, 1 failed" in out.getvalue()


def test_the_rate_has_no_bytes_that_an_earlier_run_packed(progress, packed):
    progress.plan([of("src-1-1", object_bytes=2_000_000)])
    packed("src-1-1", 8, 1_000_000, 0)
    assert "/s" not in progress.line()
    packed("src-1-1", 8, 1_000_300, 300)
    assert "/s" in progress.line()


def test_a_held_chunk_is_not_counted_as_failed(progress, packed):
    progress.plan([of("src-1-1"), of("src-1-2")])
    packed("src-1-2", 3, 300)
    progress.end("src-1-2", None, held=True)
    assert "0/2 chunks, 1 held" in progress.line()
    assert "failed" not in progress.line()


def test_objects_that_were_skipped_are_done_and_named(progress, packed):
    progress.plan([of("src-1-1")])
    packed("src-1-1", 10, 700)
    progress.end("src-1-1", located("src-1-1", members=7))
    assert "1000 B of 1000 B" in progress.line()
    assert "10/10 objects, 3 skipped" in progress.line()


def part_of(number, **more):
    """Return the chunk of one of two parts of an object."""
    return of(f"src-1-{number}", number=number, object_count=1, part=number, part_count=2, **more)


def archive_part(progress, packed, number, **more):
    packed(f"src-1-{number}", 1, 1000)
    done = {"state": ChunkState.LOCATED, "member_count": 1, "member_bytes": 1000} | more
    progress.end(f"src-1-{number}", part_of(number, **done))


def test_an_object_in_parts_counts_with_its_last_part(progress, packed):
    progress.plan([part_of(1), part_of(2), of("src-1-3", number=3)])
    archive_part(progress, packed, 2)
    assert "0/11 objects, 1/3 chunks" in progress.line()
    packed("src-1-1", 1, 1000)
    assert "0/11 objects" in progress.line()
    progress.end("src-1-1", None)
    assert "0/11 objects, 1/3 chunks, 1 failed" in progress.line()
    archive_part(progress, packed, 1)
    assert "1/11 objects, 2/3 chunks" in progress.line()


def test_an_object_counts_when_its_missing_part_is_archived(progress, packed):
    progress.plan([part_of(1)], located=[part_of(2, state=ChunkState.LOCATED), located("src-1-3")])
    assert "0/1 objects" in progress.line()
    archive_part(progress, packed, 1)
    assert "1/1 objects, 1/1 chunks" in progress.line()


def test_an_object_with_a_missing_part_does_not_count(progress, packed):
    progress.plan([part_of(2)])
    archive_part(progress, packed, 2)
    assert "0/1 objects, 1/1 chunks" in progress.line()


@pytest.mark.parametrize("given_up", [{"part_abandoned": True}, {"state": ChunkState.WITHDRAWN}])
def test_an_object_whose_parts_were_given_up_does_not_count(progress, given_up, packed):
    progress.plan([part_of(1), part_of(2)])
    archive_part(progress, packed, 1)
    archive_part(progress, packed, 2, **given_up)
    assert "0/1 objects" in progress.line()


def test_bytes_packed_twice_never_exceed_the_total(progress, packed):
    progress.plan([of("src-1-1")])
    packed("src-1-1", 20, 2000)
    assert "1000 B of 1000 B" in progress.line()


def test_of_chunks_that_go_on_side_by_side_each_counts(progress, packed):
    progress.plan([of("src-1-1"), of("src-1-2")])
    for name in ("src-1-1", "src-1-2"):
        packed(name, 4, 400)
    assert "8/20 objects" in progress.line()
    progress.end("src-1-2", None)
    assert "8/20 objects" in progress.line()
    progress.end("src-1-1", located("src-1-1"))
    assert "14/20 objects, 1/2 chunks" in progress.line()


def test_a_finished_chunk_in_staging_is_not_shown(progress):
    progress.plan([of("src-1-1"), located("src-1-2")])
    assert "0/10 objects" in progress.line()


def test_the_rate_covers_only_the_time_of_transfers():
    rate = Rate()
    assert rate.per_second is None
    rate.add(1000, 10)
    rate.add(0, 500)
    rate.add(1000, 10)
    assert rate.per_second == 100


def test_without_a_terminal_lines_show_progress_and_waits(out, works):
    progress = ChunkProgress(Console(file=out, width=40), "src", works, line_seconds=0.01)
    works.set("", waits=(Wait("rain", "June ends it", datetime(2026, 5, 1, tzinfo=UTC)),))
    with progress:
        while "June ends it" not in out.getvalue():
            time.sleep(0.01)
        progress.plan([of("src-1-1")])
        while "0/10 objects" not in out.getvalue():
            time.sleep(0.01)
    assert out.getvalue().startswith("src: ")
    assert "rain; June" in out.getvalue()


def test_a_failure_leaves_the_bar_unchanged(out, works):
    console = Console(file=out, width=120, force_terminal=True)
    with ChunkProgress(console, "src", works) as progress:
        progress.plan([of("src-1-1"), of("src-1-2")])
        progress.end("src-1-1", located("src-1-1"))
        progress.end("src-1-2", None)
    assert "10/20 objects" in out.getvalue()
    assert "20/20" not in out.getvalue()


def test_no_look_goes_on_after_an_interrupt(out):
    begun, ended = threading.Event(), threading.Event()

    def live():
        begun.set()
        time.sleep(0.1)
        ended.set()
        return []

    with (
        suppress(KeyboardInterrupt),
        ChunkProgress(Console(file=out), "src", live, line_seconds=0.01),
    ):
        begun.wait()
        raise KeyboardInterrupt
    assert ended.is_set()
