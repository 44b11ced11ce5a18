"""ChunkIO: files of the original, damaged files, and bounded work for forged files."""

import hashlib
import json
import os
import random
import tracemalloc
import zlib
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from siphash24 import siphash24

from caf_pipeline.errors import MalformedArchive, UsageError
from caf_pipeline.formats.chunkio import (
    BLOCK_BYTES,
    MAX_CONTENT_BYTES,
    MAX_POSITION,
    METER_BYTES,
    LogDamage,
    LogEntry,
    LogReader,
    LogWriter,
    end_of,
    inflated,
)

VECTORS = Path(__file__).parents[1] / "vectors" / "chunkio"
FILES = json.loads((VECTORS / "manifest.json").read_text())
DAMAGE = json.loads((VECTORS / "corrupt.json").read_text())
LOOK_UPS = json.loads((VECTORS / "queries.json").read_text())
BUFFERED = json.loads((VECTORS / "buffered.json").read_text())

_deflater = zlib.compressobj(wbits=-15)
DEFLATED = _deflater.compress(bytes(range(256)) * 40) + _deflater.flush()

BLOCK_PAYLOAD = BLOCK_BYTES - METER_BYTES
SIZES = (
    st.integers(0, 200)
    | st.integers(BLOCK_PAYLOAD - 120, BLOCK_PAYLOAD + 40)
    | st.sampled_from(
        [0, 1, BLOCK_PAYLOAD - 40, 2 * BLOCK_PAYLOAD - 40, 3 * BLOCK_PAYLOAD - 79, 150_000]
    )
)
ENTRIES = st.tuples(st.just("entry"), st.binary(min_size=16, max_size=16), SIZES)
STEPS = st.lists(ENTRIES | st.just(("open",)), max_size=12)
"""Steps to write a log: entries with user data and content size, and new writers."""


def sip(data) -> bytes:
    return siphash24(data, key=b"romkatv/chunkio1").digest()


def forged_header(
    size_bytes: int, *, user_data: bytes = bytes(16), content_hash: bytes = bytes(8)
) -> bytes:
    head = user_data + size_bytes.to_bytes(8, "little") + content_hash
    return head + sip(head)


def meter(begin: int) -> bytes:
    named = begin.to_bytes(8, "little")
    return named + sip(named)


def put(file: bytearray, position: int, data: bytes) -> None:
    file[position : position + len(data)] = data


def overwrite(file: bytearray, position: int, data: bytes) -> None:
    """Overwrite bytes of the file, without making it longer."""
    data = data[: max(0, len(file) - position)]
    put(file, position, data)


def content_of(seed: str, size_bytes: int) -> bytes:
    """Return a content as the vectors' scripts describe it."""
    if seed.startswith("="):
        return bytes([int(seed[1:], 16)]) * size_bytes
    if seed.startswith("@"):
        return (VECTORS / seed[1:]).read_bytes()
    return bytes((int(seed) * 31 + i * 7 + (i >> 8)) & 255 for i in range(size_bytes))


def replayed(script: list[str]) -> bytes:
    file, writer = bytearray(), LogWriter()
    for line in script:
        what, *rest = line.split()
        if what == "open":
            writer = LogWriter(len(file))
        elif what == "truncate":
            del file[int(rest[0]) :]
        elif what == "chunk":
            file += writer.entry(bytes.fromhex(rest[0]), content_of(rest[1], int(rest[2])))
            assert writer.position == len(file)
    return bytes(file)


def written(steps) -> tuple[bytes, list[tuple[LogEntry, bytes]]]:
    """Write a log; return it with its entries and their contents."""
    file, writer, fresh, entries = bytearray(), LogWriter(), True, []
    for number, (what, *rest) in enumerate(steps):
        if what == "open":
            writer, fresh = LogWriter(len(file)), True
            continue
        user_data, size_bytes = rest
        content = random.Random(number).randbytes(size_bytes)
        begin = line_at_or_after(len(file)) if fresh else len(file)
        file += writer.entry(user_data, content)
        fresh = False
        assert writer.position == len(file)
        entries.append((LogEntry(begin, len(file), user_data, size_bytes), content))
    return bytes(file), entries


def line_at_or_after(position: int) -> int:
    return -(-position // BLOCK_BYTES) * BLOCK_BYTES


def reader_of(file: bytes) -> LogReader:
    return LogReader(lambda start, end: file[start:end], len(file))


def reading(file: bytes) -> list[tuple[LogEntry, bytes | None]]:
    reader = reader_of(file)
    return [(entry, reader.content(entry)) for entry in reader.entries()]


def damaged(case: dict) -> bytes:
    file = bytearray((VECTORS / case["base"]).read_bytes())
    for operation in case["ops"]:
        if "truncate" in operation:
            del file[operation["truncate"] :]
        elif "append" in operation:
            file += bytes.fromhex(operation["append"])
        else:
            put(file, operation["set"][0], bytes.fromhex(operation["set"][1]))
    assert hashlib.sha256(file).hexdigest() == case["sha256"]
    return bytes(file)


def forward(real: dict) -> list[dict]:
    """Return the entries of the original's forward scan by `begin + 1`."""
    return real["all_walks"] if "all_walks" in real else real["forward_begin_plus_1"]


def assert_reads_as(file: bytes, wanted: list[dict]) -> None:
    found = reading(file)
    assert [(e.begin, e.end, e.content_size_bytes) for e, _ in found] == [
        (w["begin"], w["end"], w["length"]) for w in wanted
    ]
    for (entry, content), want in zip(found, wanted, strict=True):
        assert (content is not None) == want["content_ok"]
        if "user_data" in want:
            assert entry.user_data.hex() == want["user_data"]
        if "sha256" in want:
            assert hashlib.sha256(content).hexdigest() == want["sha256"]


def read_by_the_rules(file: bytes) -> list[tuple[LogEntry, bytes | None]]:
    """Read the log by the rules alone, byte by byte and in memory."""

    def payload(place: int, count: int) -> tuple[bytes, int]:
        """Return up to `count` bytes from `place` on, without meters, and their end."""
        taken = bytearray()
        while len(taken) < count:
            place += METER_BYTES if place % BLOCK_BYTES == 0 else 0
            step = min(count - len(taken), BLOCK_BYTES - place % BLOCK_BYTES)
            taken += file[place : place + step]
            place += step
            if place > len(file) + 4 * BLOCK_BYTES:
                break  # certainly outside of the file
        return bytes(taken), place

    def named_at(line: int) -> int | None:
        begin = int.from_bytes(file[line : line + 8], "little")
        right = (
            len(file) >= line + METER_BYTES
            and sip(file[line : line + 8]) == file[line + 8 : line + 16]
        )
        return (
            begin if right and begin <= line and begin % BLOCK_BYTES not in range(1, 17) else None
        )

    found: dict[int, tuple[LogEntry, bytes | None]] = {}
    ways = [
        0,
        *(
            begin
            for line in range(BLOCK_BYTES, len(file), BLOCK_BYTES)
            if (begin := named_at(line)) is not None
        ),
    ]
    while ways:
        begin = ways.pop()
        header, after = payload(begin, 40)
        size_bytes = int.from_bytes(header[16:24], "little")
        if (
            begin in found
            or after > len(file)
            or size_bytes > 2**31 - 57
            or sip(header[:32]) != header[32:]
        ):
            continue
        content, end = payload(after, size_bytes)
        right = end <= len(file) and sip(content) == header[24:32]
        found[begin] = (
            LogEntry(begin, end_of(begin, size_bytes), header[:16], size_bytes),
            content if right else None,
        )
        last_line = (end - 1) // BLOCK_BYTES * BLOCK_BYTES
        named = named_at(last_line)
        if last_line <= begin or (named == begin if named is not None else right):
            ways.append(end)
    return [found[begin] for begin in sorted(found)]


class Counting:
    """A file that counts reads, and refuses those beyond its end."""

    def __init__(self, file: bytes) -> None:
        self.file = file
        self.asked_bytes = 0
        self.largest = 0

    def read(self, start: int, end: int) -> bytes:
        assert 0 <= start < end <= len(self.file)
        self.asked_bytes += end - start
        self.largest = max(self.largest, end - start)
        return self.file[start:end]


# The original's files and readings


@pytest.mark.parametrize("vector", FILES, ids=lambda v: v["name"])
def test_the_writer_writes_the_originals_bytes(vector):
    assert replayed(vector["script"]) == (VECTORS / vector["file"]).read_bytes()


@pytest.mark.parametrize("vector", FILES, ids=lambda v: v["name"])
def test_the_reader_reads_the_originals_files(vector):
    assert_reads_as((VECTORS / vector["file"]).read_bytes(), forward(vector["real"]))


@pytest.mark.parametrize("case", DAMAGE, ids=lambda v: v["name"])
def test_every_damaged_file_gives_the_right_entries(case):
    assert case["model_equal_to_real"]["forward_begin_plus_1"]
    wanted = forward(case["real"])
    assert (len(wanted), sum(w["content_ok"] for w in wanted)) == (
        case["model_reachable"],
        case["model_content_ok"],
    )
    assert_reads_as(damaged(case), wanted)


@pytest.mark.parametrize("name", LOOK_UPS)
def test_look_ups_find_the_right_begin(name):
    reader = reader_of((VECTORS / f"{name}.chunkio").read_bytes())
    begins = [entry.begin for entry in reader.entries()]
    for query in LOOK_UPS[name]:
        found = getattr(reader, query["op"])(query["from"], query["to"])
        inside = [begin for begin in begins if query["from"] <= begin < query["to"]]
        if query["op"] == "middle":
            assert found.begin in inside if inside else found is None
        else:
            assert (found and found.begin) == query["model_begin"]
            assert (found and found.begin) == (
                inside[0 if query["op"] == "first" else -1] if inside else None
            )


def test_middle_is_the_entry_nearest_the_middle():
    writer = LogWriter()
    reader = reader_of(
        b"".join(writer.entry(bytes(16), b"x" * 59) for _ in range(10))
    )  # at 0, 115, 214, ... 907
    assert reader.middle().begin == 511
    assert reader.middle(-(2**63), 2**63).begin == 511
    assert reader.middle(0, 116).begin == 115
    assert reader.middle(1, 115) is None


# Stepping past an entry


@pytest.mark.parametrize("meter_is_damaged", [False, True])
def test_torn_entry_does_not_lead_into_later_content(
    meter_is_damaged,
):
    inner = LogWriter().entry(b"inner entry here", b"false")[METER_BYTES:]
    torn = LogWriter().entry(
        bytes(16), b"t" * (BLOCK_PAYLOAD + 100)
    )  # would end 156 bytes behind the line
    content = bytes(100) + inner  # begins 56 bytes behind the line
    file = bytearray(
        torn[:BLOCK_BYTES] + LogWriter(BLOCK_BYTES).entry(b"the later writer", content)
    )
    assert file[len(torn) : len(torn) + len(inner)] == inner
    if meter_is_damaged:
        put(file, BLOCK_BYTES, bytes(METER_BYTES))
    found = [entry.begin for entry, _ in reading(bytes(file))]
    assert found == ([0] if meter_is_damaged else [0, BLOCK_BYTES])


# Look-ups


def test_answers_do_not_depend_on_earlier_reads():
    file = bytearray((VECTORS / "many_small.chunkio").read_bytes())
    put(file, BLOCK_BYTES, meter(456))  # a lie with a valid hash
    fresh = reading(bytes(file))
    reader = reader_of(bytes(file))
    assert [(entry, reader.content(entry)) for entry, _ in reversed(fresh)] == [*reversed(fresh)]
    assert [(entry, reader.content(entry)) for entry in reader.entries()] == fresh


# Writing


@pytest.mark.parametrize(
    "content",
    [
        b"abcdefgh",
        bytearray(b"abcdefgh"),
        memoryview(b"a-b-c-d-e-f-g-h-")[::2],
        array("Q", b"abcdefgh"),
    ],
)
def test_any_buffer_is_a_content(content):
    ((_, found),) = reading(LogWriter().entry(bytes(16), content))
    assert found == b"abcdefgh"


@pytest.mark.parametrize("size_bytes", [0, 15, 17])
def test_user_data_of_another_length_is_refused(size_bytes):
    with pytest.raises(UsageError, match="16 bytes"):
        LogWriter().entry(bytes(size_bytes), b"")


def test_content_beyond_the_limit_is_refused_without_a_change():
    writer = LogWriter()
    writer.entry(bytes(16), b"x")
    before = writer.position
    with pytest.raises(UsageError, match="2147483591"):
        writer.entry(bytes(16), memoryview(np.broadcast_to(np.uint8(0), (MAX_CONTENT_BYTES + 1,))))
    assert writer.position == before
    assert len(writer.entry(bytes(16), b"y")) == 41


def test_an_entry_may_not_end_past_the_last_position():
    last_block = MAX_POSITION + 1 - BLOCK_BYTES
    with pytest.raises(UsageError, match="end past"):
        LogWriter(last_block).entry(bytes(16), bytes(BLOCK_PAYLOAD - 40))
    writer = LogWriter(last_block)
    writer.entry(bytes(16), bytes(BLOCK_PAYLOAD - 41))
    assert writer.position == MAX_POSITION
    with pytest.raises(UsageError, match="end past"):
        LogWriter(MAX_POSITION).entry(bytes(16), b"")


@pytest.mark.parametrize("position", [-1, MAX_POSITION + 1])
def test_a_writer_at_an_impossible_size_is_refused(position):
    with pytest.raises(UsageError):
        LogWriter(position)


def test_writing_copies_a_large_content_once():
    content = os.urandom(8 << 20)
    tracemalloc.start()
    try:
        LogWriter().entry(bytes(16), content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * len(content)


# Properties


@given(STEPS)
@example([("entry", bytes(16), BLOCK_PAYLOAD - 40), ("open",), ("entry", bytes(16), 0)])
@example(
    [("entry", bytes(16), 1), ("entry", bytes(16), BLOCK_BYTES - 57 - 40), ("entry", bytes(16), 3)]
)
@example(
    [("entry", bytes(16), BLOCK_PAYLOAD - 60), ("entry", bytes(16), 0), ("entry", bytes(16), 3)]
)
def test_written_entries_read_back(steps):
    file, entries = written(steps)
    assert reading(file) == entries


@given(STEPS, st.data())
def test_truncated_log_has_its_first_entries_and_one_torn(steps, data):
    file, entries = written(steps)
    cut = data.draw(st.integers(0, len(file)))
    found = reading(file[:cut])
    whole = [pair for pair in entries if pair[0].end <= cut]
    assert found[: len(whole)] == whole
    assert found[len(whole) :] in (
        [],
        [(entries[len(whole)][0], None)] if len(whole) < len(entries) else [],
    )


@given(STEPS, STEPS, st.data())
def test_continued_truncated_log_has_all_later_entries(steps, more, data):
    file, entries = written(steps)
    cut = data.draw(st.integers(0, len(file)))
    start = line_at_or_after(cut)
    writer, log, later = LogWriter(cut), file[:cut], []
    for step in more:
        if step[0] == "entry":
            log += writer.entry(step[1], bytes(step[2]))
            later.append((writer.position, step[1], bytes(step[2])))
    found = reading(log)
    assert [(e.end, e.user_data, content) for e, content in found if e.begin >= start] == later
    before = [(entry, content) for entry, content in found if entry.begin < start]
    whole = [pair for pair in entries if pair[0].end <= cut]
    assert before[: len(whole)] == whole
    torn = dict(entries[len(whole) : len(whole) + 1])
    assert all(
        content in (None, torn[entry]) for entry, content in before[len(whole) :]
    )  # right if only zeros were cut off


@given(STEPS, st.data())
def test_damaged_and_forged_logs_are_read_as_the_rules_say(steps, data):
    file = bytearray(written(steps)[0])
    lines = st.integers(1, max(1, len(file) // BLOCK_BYTES)).map(
        lambda number: number * BLOCK_BYTES
    )
    begins = [entry.begin for entry, _ in written(steps)[1]] or [0]
    for _ in range(data.draw(st.integers(0, 6))):
        match data.draw(st.sampled_from(["flip", "no meter", "lying meter", "header", "junk"])):
            case "flip" if file:
                file[data.draw(st.integers(0, len(file) - 1))] ^= 1
            case "no meter":
                overwrite(file, data.draw(lines), bytes(METER_BYTES))
            case "lying meter":
                overwrite(
                    file,
                    data.draw(lines),
                    meter(data.draw(st.sampled_from(begins) | st.integers(0, 2**64 - 1))),
                )
            case "header":
                where = data.draw(st.sampled_from(begins))
                overwrite(
                    file,
                    where,
                    forged_header(data.draw(st.integers(0, 200_000) | st.integers(0, 2**64 - 1))),
                )
            case _:
                file += data.draw(st.binary(max_size=100))
    assert reading(bytes(file)) == read_by_the_rules(bytes(file))


@given(st.binary(max_size=400), st.integers(0, 3 * BLOCK_BYTES))
def test_arbitrary_bytes_are_read_without_an_error(junk, offset):
    file = bytes(offset) + junk
    counting = Counting(file)
    reader = LogReader(counting.read, len(file))
    for entry in reader.entries():
        reader.content(entry)
    assert counting.asked_bytes <= 6 * len(file)


# Forged files


def test_lying_meter_hides_no_other_entry():
    """Forge a meter that names an entry inside of a content: other entries stay reachable."""
    inner = LogWriter().entry(b"inner entry here", b"false")[METER_BYTES:]
    writer = LogWriter()
    file = bytearray(writer.entry(bytes(16), bytes(44) + inner))
    false_begin = METER_BYTES + 40 + 44
    file += writer.entry(bytes(16), bytes(BLOCK_BYTES)) + writer.entry(
        bytes(16), bytes(2 * BLOCK_BYTES)
    )
    honest = reading(bytes(file))
    put(file, 2 * BLOCK_BYTES, meter(false_begin))
    found = reading(bytes(file))
    assert set(found) == {
        *honest,
        (LogEntry(false_begin, false_begin + 45, b"inner entry here", 5), b"false"),
    }


@pytest.mark.parametrize("size_bytes", [100, MAX_CONTENT_BYTES])
def test_forged_size_reads_nothing_beyond_the_file(size_bytes):
    file = b"romkatv/chunkio\n" + forged_header(size_bytes)
    counting = Counting(file)
    reader = LogReader(counting.read, len(file))
    tracemalloc.start()
    try:
        (entry,) = reader.entries()
        asked = counting.asked_bytes
        assert reader.content(entry) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert entry.content_size_bytes == size_bytes
    assert counting.asked_bytes == asked
    assert peak < 100_000


@pytest.mark.parametrize(
    "change",
    [
        {"begin": 3},
        {"begin": -1},
        {"begin": 2**70},
        {"end": 57},
        {"end": 0},
        {"size": 1},
        {"user": b"?"},
    ],
)
def test_missing_entry_has_no_content(change):
    reader = reader_of(LogWriter().entry(bytes(16), b"ab"))
    assert reader.content(LogEntry(0, 58, bytes(16), 2)) == b"ab"
    other = LogEntry(
        change.get("begin", 0),
        change.get("end", 58),
        change.get("user", bytes(16)),
        change.get("size", 2),
    )
    assert reader.content(other) is None


def test_overlapping_contents_are_read_in_linear_time():
    """Let each meter name a header whose content extends to the end, without its last meter."""
    blocks = 200
    file = bytearray(blocks * BLOCK_BYTES + 100)
    claimed = []
    for number in range(blocks - 1):
        begin = number * BLOCK_BYTES
        size_bytes = (blocks - number) * BLOCK_PAYLOAD - 30
        put(file, begin, meter(begin) + forged_header(size_bytes))
        claimed.append(begin)
        assert end_of(begin, size_bytes) == blocks * BLOCK_BYTES + METER_BYTES + 10
    counting = Counting(bytes(file))
    assert [entry.begin for entry in LogReader(counting.read, len(file)).entries()] == claimed
    assert counting.asked_bytes < 6 * len(file)


def test_scan_reads_each_block_once():
    file = b"".join(map(LogWriter().entry, [bytes(16)] * 500, map(bytes, range(1000, 1500))))
    counting = Counting(file)
    assert len(list(LogReader(counting.read, len(file)).entries())) == 500
    assert counting.largest == BLOCK_BYTES
    assert counting.asked_bytes < 1.01 * len(file)


def test_wrong_file_size_does_not_delay_the_reader():
    file = LogWriter().entry(bytes(16), b"x")
    file += forged_header(MAX_CONTENT_BYTES)
    asked = []

    def read(start: int, end: int) -> bytes:
        asked.append(end - start)
        return file[start:end]

    reader = LogReader(read, 2**62)
    assert [(entry.begin, reader.content(entry)) for entry in reader.entries()] == [
        (0, b"x"),
        (57, None),
    ]
    assert len(asked) < 12
    assert max(asked) <= 4 * BLOCK_BYTES


def test_memory_is_bounded_by_the_content_asked_for():
    content = os.urandom(4 << 20)
    writer = LogWriter()
    file = b"".join(writer.entry(bytes(16), content) for _ in range(4))
    reader = reader_of(file)
    tracemalloc.start()
    try:
        entries = list(reader.entries())
        scanning = tracemalloc.get_traced_memory()[1]
        assert reader.content(entries[2]) == content
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert scanning < 4 * BLOCK_BYTES
    assert peak < 1.3 * len(content)


# Checks and salvage


def damage_of(file: bytes) -> list[LogDamage]:
    return [one for one in reader_of(file).check() if isinstance(one, LogDamage)]


@pytest.mark.parametrize("vector", FILES, ids=lambda v: v["name"])
def test_check_finds_no_damage_in_an_intact_log(vector):
    file = (VECTORS / vector["file"]).read_bytes()
    torn = [line for line in vector["script"] if line.startswith("truncate")]
    assert bool(damage_of(file)) == bool(torn)
    assert [one for one in reader_of(file).check() if isinstance(one, LogEntry)] == list(
        reader_of(file).entries()
    )


@pytest.mark.parametrize("case", DAMAGE, ids=lambda v: v["name"])
def test_check_finds_every_detectable_damage(case):
    entry_ends = {entry.end for entry, _ in reading((VECTORS / case["base"]).read_bytes())}
    file = damaged(case)
    cut_behind_an_entry = all("truncate" in one for one in case["ops"]) and len(
        file
    ) in entry_ends | {0}
    assert bool(damage_of(file)) == (not cut_behind_an_entry)


@given(STEPS, st.data())
def test_check_and_salvage_find_each_changed_byte(steps, data):
    file, entries = written(steps)
    assert damage_of(file) == []
    if not file:
        return
    changed, at = bytearray(file), data.draw(st.integers(0, len(file) - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    assert any(one.begin <= at < one.end for one in damage_of(bytes(changed)))
    whole = {
        one.entry: one
        for one in reader_of(bytes(changed)).salvage()
        if one.content_right and one.inside is None
    }
    untouched = [entry for entry, _ in entries if not entry.begin <= at < entry.end]
    assert set(untouched) <= set(whole)
    assert set(whole) <= {entry for entry, _ in entries}
    reached = set(reader_of(bytes(changed)).entries())
    assert {entry for entry in whole if whole[entry].reachable} == reached & set(whole)


def test_salvage_finds_all_of_many_headers():
    headers = [LogWriter().entry(number.to_bytes(16, "little"), b"")[16:] for number in range(5000)]
    log = LogWriter().entry(bytes(16), b"".join(headers))
    salvaged = list(LogReader(lambda start, end: log[start:end], len(log)).salvage())
    numbers = [int.from_bytes(item.entry.user_data, "little") for item in salvaged]
    assert numbers == [0, *range(5000)]


def test_salvage_marks_a_log_inside_an_entry():
    found = list(reader_of((VECTORS / "embedded_plain.chunkio").read_bytes()).salvage())
    assert [(one.entry.begin, one.reachable, one.inside) for one in found] == [
        (0, True, None),
        (72, False, 0),
        (113, True, None),
    ]


def test_check_and_salvage_of_forged_contents_are_linear():
    file = bytearray(100 * BLOCK_BYTES)
    for number in range(99):
        put(
            file,
            number * BLOCK_BYTES,
            meter(number * BLOCK_BYTES) + forged_header((99 - number) * BLOCK_PAYLOAD),
        )
    counting = Counting(bytes(file))
    reader = LogReader(counting.read, len(file))
    assert len(list(reader.salvage())) == 99
    assert len(list(reader.check())) > 99
    assert counting.asked_bytes < 25 * len(file)


@given(st.binary(max_size=400), st.integers(0, 3 * BLOCK_BYTES))
def test_arbitrary_bytes_are_checked_and_salvaged_without_an_error(junk, offset):
    reader = reader_of(bytes(offset) + junk)
    assert all(one.entry.end <= MAX_POSITION for one in reader.salvage())
    list(reader.check())


def test_an_entry_is_copied_into_another_log_in_pieces():
    file = (VECTORS / "spans_two_meters.chunkio").read_bytes()
    reader, writer = reader_of(file), LogWriter()
    found = list(reader.salvage())
    copied = b"".join(
        b"".join(
            writer.copy(
                one.entry.user_data,
                one.entry.content_size_bytes,
                one.content_hash,
                reader.pieces(one.entry),
            )
        )
        for one in found
    )
    assert copied == file
    assert writer.position == len(file)


# Contents of the original's buffered writer


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 20])
def test_deflate_contents_are_inflated_by_pieces(piece_bytes):
    for entry, content in reading((VECTORS / BUFFERED["file"]).read_bytes()):
        data = b"".join(
            inflated(content[at : at + piece_bytes] for at in range(0, len(content), piece_bytes))
        )
        (want,) = [one for one in BUFFERED["buffered_forward"] if one["begin"] == entry.begin]
        assert (len(data), hashlib.sha256(data).hexdigest()) == (
            want["inflated_length"],
            want["sha256"],
        )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xff\xff", "not raw DEFLATE"),
        (zlib.compress(b"x" * 99), "not raw"),
        (DEFLATED[:-3], "before"),
        (DEFLATED + b"x", "behind"),
    ],
)
def test_invalid_deflate_content_is_refused(content, said):
    with pytest.raises(MalformedArchive, match=said):
        list(inflated([content]))


def test_a_content_that_inflates_to_much_comes_in_pieces():
    bomb = zlib.compressobj(wbits=-15)
    content = bomb.compress(bytes(64 << 20)) + bomb.flush()
    sizes = [len(piece) for piece in inflated([content])]
    assert sum(sizes) == 64 << 20
    assert max(sizes) <= 1 << 20
