"""Hostile CAF files, manifests and journals by the thousand: mutations of real ones, in a process
of its own that may crash.

    python -m caf_pipeline_tests.support.caf_fuzzing archive 0 5000      tries inputs 0 to 4,999 of
    a kind, prints what is wrong

An input is its kind and its number, and nothing else: the same number gives the same bytes on every
machine with the same libraries. The process has so much address space above what it has after its
imports, and each input so many seconds.
"""

import base64
import contextlib
import io
import json
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

from caf_pipeline.caf.archive import CafReader, CafWriter
from caf_pipeline.caf.index import FOOTER_SIZE_BYTES, parse_footer
from caf_pipeline.errors import ArchiveError
from caf_pipeline.formats.chunkio import LogReader, LogWriter
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.packing.journal import format as journal
from caf_pipeline_tests.support.memory_ranges import MemoryRanges, caf_bytes, index_of

VECTORS: Final = Path(__file__).parents[1] / "vectors" / "caf"
MEMORY_BYTES: Final = 256 << 20
INPUT_SECONDS: Final = (
    20  # an input takes a millisecond; what takes so long on a busy machine hangs
)
COMMAND_EVERY: Final = (
    250  # inputs of which one also goes through the commands, which take a hundred times as long
)
WRONG_STATUS: Final = 3

INTERESTING: Final = (
    0,
    1,
    2,
    3,
    4,
    0x7F,
    0x80,
    0xFF,
    0x100,
    0xFFFF,
    0x7FFF_FFFF,
    0x8000_0000,
    0xFFFF_FFFE,
    0xFFFF_FFFF,
    1 << 40,
)
NUMBERS: Final = (
    "0",
    "-0",
    "-1",
    "1e2",
    "1.0",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "1e999",
)
NUMBERS_TOO: Final = (
    "9" * 5000,
    "0x10",
    "01",
    "+1",
    "NaN",
    "Infinity",
    "null",
    "true",
    '"3"',
    "[]",
    "{}",
    "1_0",
    "٣",
)
TEXTS: Final = (
    *(
        "",
        "..",
        "../x",
        "/abs",
        "a//b",
        "__proto__",
        "a\0b",
        "\x1b[2J",
        "é",
        "e\u0301",
        "\u202e",
        "\ufffd",
        "😀",
        "a" * 1025,
    ),
    *(
        "\\u0000",
        "\\ud800",
        "\\udc00\\ud800",
        "\\ud83d\\ude00",
        "\\u005f",
        "\\",
        "\\x",
        "\\u12",
        '"',
        "files",
        "start_byte",
    ),
)


# --- seeds
# ------------------------------------------------------------------------------------------


@cache
def archives() -> tuple[bytes, ...]:
    """Return real archives: the vectors, and some that we write."""
    found = [path.read_bytes() for path in sorted(VECTORS.glob("*.caf"))]
    contents: tuple[dict[str, bytes], ...] = (
        {},
        {"a": b"0123456789"},
        {f"key-{number:03d}": bytes([number]) * number for number in range(60)},
        {text: text.encode() for text in TEXTS[:14]},
        {"large": bytes(70_000), "small": b"s"},
    )
    with tempfile.TemporaryDirectory() as folder:
        for content in contents:
            with CafWriter(Path(folder, "o.caf")) as writer:
                for key, body in content.items():
                    writer.add(key, len(body), [body])
                writer.seal()
                writer.publish()
                found.append(writer.path.read_bytes())
    found.append(caf_bytes(b"0123456789", index_of(("a", 0, 5), ("b", 3, 10), ("c", 10, 10))))
    return tuple(found)


@cache
def manifests() -> tuple[bytes, ...]:
    """Return real manifests, small and of several row groups."""
    import caf_pipeline.inventory.manifest as module

    found, usual = [], module.MANIFEST_GROUP_ROWS
    moment = datetime(2026, 11, 1, tzinfo=UTC)
    identity = module.ChunkIdentity("a" * 32, "src", "src-1", "p" * 64, "s", moment)
    with tempfile.TemporaryDirectory() as folder:
        for rows, group in ((0, usual), (1, usual), (30, usual), (30, 7)):
            module.MANIFEST_GROUP_ROWS = group
            with module.ManifestWriter(Path(folder, "m"), identity) as writer:
                for number in range(rows):
                    writer.add(_row(number))
            found.append(Path(folder, "m").read_bytes())
    module.MANIFEST_GROUP_ROWS = usual
    return tuple(found)


def _row(number: int) -> dict[str, Any]:
    return {
        "member": f"key-{number}",
        "key": f"key-{number}",
        "etag": "e",
        "size_bytes": number,
        "start_byte": 0,
        "end_byte": number,
        "sha256": bytes(32),
        "crc64nvme": bytes(8),
        "s3_checksum": "crc32:00000000",
        "last_modified": datetime(2026, 11, 1, tzinfo=UTC),
        "storage_class": "STANDARD",
        "content_type": "text/plain",
        "user_metadata": {"a": "b"} if number % 2 else {},
    }


# --- mutations
# ------------------------------------------------------------------------------------------


def _flip(chance: random.Random, data: bytearray) -> None:
    for _ in range(chance.choice((1, 1, 1, 2, 8, 64))):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set(chance: random.Random, data: bytearray) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.choice(
            (0, 0xFF, 0x7F, 0x80, chance.randrange(256))
        )


def _cut(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data) + 1)
    del data[at : at + chance.choice((1, 4, 64, len(data)))]


def _double(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = data[at : at + chance.choice((1, 8, 100, 10_000))] * chance.choice((1, 2, 50))


def _splice(chance: random.Random, data: bytearray, others: tuple[bytes, ...]) -> None:
    other = chance.choice(others)
    begin = chance.randrange(len(other) + 1)
    at = chance.randrange(len(data) + 1)
    data[at : at + chance.choice((0, 0, 10, 100))] = other[
        begin : begin + chance.choice((4, 50, 1000, len(other)))
    ]


def _lie(chance: random.Random, data: bytearray) -> None:
    """Write a number where one may be: at the end, as in the footer, or anywhere."""
    value = (
        chance.choice(
            (*INTERESTING, len(data), len(data) - 4, len(data) - 3, chance.randrange(1 << 32))
        )
        & 0xFFFF_FFFF
    )
    raw = struct.pack("<I", value)
    at = (
        max(0, len(data) - chance.choice((4, 4, 8)))
        if chance.random() < 0.6
        else chance.randrange(len(data) + 1)
    )
    data[at : at + 4] = raw


def _concatenate(chance: random.Random, data: bytearray, others: tuple[bytes, ...]) -> None:
    data[0:0] = chance.choice(others)


def scrambled(chance: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    """Return a seed with some of its bytes changed."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        kind = chance.randrange(7)
        if kind < 2:
            (_flip, _set)[kind](chance, data)
        elif kind < 5:
            (_cut, _double, _lie)[kind - 2](chance, data)
        else:
            (_splice, _concatenate)[kind - 5](chance, data, seeds)
    return bytes(data[: 1 << 20])


def _odd_text(chance: random.Random, index: str) -> str:
    """Change an index as text: numbers, names, nesting, things that come twice."""
    places = [at for at, character in enumerate(index) if character in '{}[]":,0123456789']
    at = chance.choice(places) if places else 0
    kind = chance.randrange(6)
    if kind == 0:
        end = at
        while end < len(index) and index[end].isdigit():
            end += 1
        return index[:at] + chance.choice(NUMBERS + NUMBERS_TOO) + index[end:]
    if kind == 1:
        return index[:at] + chance.choice(TEXTS) + index[at:]
    if kind == 2:
        depth = chance.choice((2, 50, 900, 5000, 60_000))
        opened, closed = chance.choice((("[", "]"), ('{"a":', "}")))
        return index[:at] + opened * depth + "0" + closed * chance.choice((0, depth)) + index[at:]
    if kind == 3:
        return index.replace(
            '"files"',
            chance.choice(('"file\\u0073"', '"Files"', '"files","files"', '"__proto__"')),
            1,
        )
    if kind == 4:
        entry = chance.choice(
            (
                '"a":{"start_byte":0,"end_byte":1},',
                '"a":{},',
                '"a":{"start_byte":0},',
                '"a":null,',
                '"":1,',
            )
        )
        return index.replace('"files":{', '"files":{' + entry * chance.choice((1, 2, 500)), 1)
    return index[:at] + index[at + chance.choice((1, 1, 2, 10)) :]


def reindexed(chance: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    """Return a seed whose index says something else, with a footer that fits it."""
    data = chance.choice(seeds)
    size = parse_footer(data[-FOOTER_SIZE_BYTES:]) if len(data) >= FOOTER_SIZE_BYTES else 0
    start = max(0, len(data) - FOOTER_SIZE_BYTES - size)
    index = data[start : len(data) - FOOTER_SIZE_BYTES].decode("utf-8", "surrogateescape")
    for _ in range(chance.choice((1, 1, 2, 4))):
        index = _odd_text(chance, index)[: 1 << 20]
    return caf_bytes(data[:start], index.encode("utf-8", "surrogateescape"))


# --- what may come of an input
# ---------------------------------------------------------------------------------------


def archive_input(number: int) -> bytes:
    """Return an archive by its number."""
    chance = random.Random(f"archive {number}")
    return reindexed(chance, archives()) if chance.random() < 0.5 else scrambled(chance, archives())


def try_archive(content: bytes) -> None:
    """Read an archive in every way; it reads right, or ArchiveError comes out."""
    for lenient in (False, True):
        try:
            reader = CafReader.open(MemoryRanges(content), lenient=lenient)
        except ArchiveError:
            continue
        _read_all(reader, content)


def _read_all(reader: CafReader, content: bytes) -> None:
    members = list(reader.members)
    for member in members[:100]:
        body = content[member.start_byte : member.end_byte]
        assert 0 <= member.start_byte <= member.end_byte <= reader.data_size_bytes <= len(content)
        assert len(body) == member.size_bytes
        assert reader[member.key] == member
        if body:
            assert reader.read(member.key) == body
            assert b"".join(reader.stream(member.key, 1000)) == body
    filled = [member for member in members if member.size_bytes][:1000]
    assert all(
        b"".join(map(bytes, pieces)) == content[one.start_byte : one.end_byte]
        for one, pieces in reader.read_many(filled)
    )
    assert 0 <= sum(end - start for start, end in reader.gaps()) <= reader.data_size_bytes
    assert 0 <= reader.overlap_count() <= len(reader)


def try_commands(content: bytes) -> None:
    """Let the commands read an archive: they end with 0, 1 (some of it failed) or 4, and say no
    more than sentences.
    """
    from caf_pipeline.cli import main

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "inner", "o.caf")
        path.parent.mkdir()
        path.write_bytes(content)
        for arguments in (
            ["list", str(path)],
            ["list", "--json", "--lenient", str(path)],
            ["verify", str(path)],
            ["extract", str(path), "-C", str(path.parent / "out")],
            ["cat", str(path), "a"],
        ):
            said, told = _Captured(), io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
                status = main(arguments)
            said.flush()
            assert status in (0, 1, 4), (status, told.getvalue())
            assert "should not have happened" not in told.getvalue()
            assert (
                arguments[0] == "cat"
                or "\x1b" not in said.buffer.getvalue().decode() + told.getvalue()
            )
        assert sorted(os.listdir(folder)) == ["inner"]
        assert set(os.listdir(path.parent)) <= {"o.caf", "out"}


class _Captured(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        """Stay readable."""


def manifest_input(number: int) -> bytes:
    """Return a manifest by its number: changed anywhere, or in the footer alone, which a reader
    believes.
    """
    chance = random.Random(f"manifest {number}")
    if chance.random() < 0.5:
        return scrambled(chance, manifests())
    data = chance.choice(manifests())
    footer_at = len(data) - 8 - struct.unpack("<I", data[-8:-4])[0]
    footer = bytearray(data[footer_at:-8])
    for _ in range(chance.choice((1, 1, 2, 4))):
        # Numbers are varints there: a byte with its highest bit goes on in the next.
        at = chance.randrange(len(footer))
        footer[at : at + chance.choice((0, 1))] = chance.choice(
            (b"\xff\xff\xff\xff\x0f", b"\0", b"\x80\x01", chance.randbytes(1))
        )
    return data[:footer_at] + bytes(footer) + struct.pack("<I", len(footer)) + b"PAR1"


def try_manifest(content: bytes) -> None:
    """Read a manifest: rows, or ArchiveError."""
    from caf_pipeline.inventory.manifest import open_manifest

    with contextlib.suppress(ArchiveError):
        for row in open_manifest(io.BytesIO(content)).rows():
            assert isinstance(row, dict)


OPENING: Final = journal.Opening(
    journal.JOURNAL_FORMAT, "s", bytes(32), bytes(32), 3, 1 << 30, True
)


@cache
def journals() -> tuple[bytes, ...]:
    """Return real journals: without a checkpoint, and with some."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (0, 1, 5, 40):
            path = Path(folder, f"{count}.journal")
            log = journal.Journal.open(path, OPENING)
            log.append(OPENING)
            position = 512
            for number in range(count):
                member = journal.PackedMember(
                    position, position + number, bytes(32), bytes(8), "crc32:00000000"
                )
                position += number
                skipped = journal.SkippedObject(SkipReason.DELETED, "gone")
                log.append(
                    journal.Checkpoint(
                        [member, skipped], bytes(32), position, bytes(100 * number), position
                    )
                )
            log.close()
            found.append(path.read_bytes())
    return tuple(found)


def journal_input(number: int) -> bytes:
    """Return a journal by its number: changed anywhere, or only in what entries say, their hashes
    and order being right.
    """
    chance = random.Random(f"journal {number}")
    if chance.random() < 0.5:
        return scrambled(chance, journals())
    data = chance.choice(journals())
    read, writer, written = (
        LogReader(lambda start, end: data[start:end], len(data)),
        LogWriter(),
        bytearray(),
    )
    for entry in read.entries():
        content = bytearray(read.content(entry) or b"")
        if chance.random() < 0.3:
            content = bytearray(
                scrambled(chance, (bytes(content), b"\xdd\xff\xff\xff\xff", b"\x91" * 5000))
            )
        written += writer.entry(entry.user_data, content)
    return bytes(written)


def try_journal(content: bytes) -> None:
    """Read a journal as a log and as what it says; nothing is raised, and no entry is outside the
    file or another's place.
    """
    log = LogReader(lambda start, end: content[start:end], len(content))
    ended = 0
    for entry in log.entries():
        assert ended <= entry.begin < entry.end
        inside = log.content(entry)
        assert inside is None or (
            len(inside) == entry.content_size_bytes and entry.end <= len(content)
        )
        ended = entry.begin + 1
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        position = 0
        for _, said in journal.Journal(Path("journal"), file.fileno(), OPENING).checkpoints():
            assert said.boundary >= position
            position = said.boundary


KINDS: Final[dict[str, tuple[Callable[[int], bytes], Callable[[bytes], None]]]] = {
    "archive": (archive_input, try_archive),
    "manifest": (manifest_input, try_manifest),
    "journal": (journal_input, try_journal),
}


# --- a process of its own
# ------------------------------------------------------------------------------------------


def _limit_memory() -> None:
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmSize:")]
    most = int(line.split()[1]) * 1024 + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _tell(kind: str, number: int, what: str, content: bytes) -> None:
    record = {
        "kind": kind,
        "number": number,
        "what": what[-2000:],
        "bytes": base64.b64encode(content[:100_000]).decode(),
    }
    print(json.dumps(record), flush=True)


def run(kind: str, numbers: Iterable[int], progress: Path | None = None) -> int:
    """Try inputs; return how many went wrong.

    What runs is written to `progress` before, for who finds this process dead.
    """
    make, attempt = KINDS[kind]
    make(0), attempt(make(0))  # loads what there is to load
    if kind == "archive":
        try_commands(make(0))
    _limit_memory()
    wrong = 0
    place = os.open(progress or os.devnull, os.O_WRONLY | os.O_CREAT)
    for number in numbers:
        os.pwrite(place, struct.pack("<Q", number), 0)
        content = make(number)
        signal.alarm(INPUT_SECONDS)  # ends the process: C code is not interrupted by an exception
        try:
            attempt(content)
            if kind == "archive" and number % COMMAND_EVERY == 0:
                try_commands(content)
        except BaseException:  # noqa: BLE001 - whatever it is, it is told
            wrong += 1
            _tell(kind, number, traceback.format_exc(), content)
        signal.alarm(0)
    os.close(place)
    return wrong


if __name__ == "__main__":
    kind, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    path = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    sys.exit(WRONG_STATUS if run(kind, range(first, first + count), path) else 0)
