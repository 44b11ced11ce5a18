"""Packing one chunk: bodies, skips, limits, and remains."""

import contextlib
import hashlib
import os
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from awscrt.checksums import crc64nvme
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.caf.archive import CafReader
from caf_pipeline.caf.merkle import merkle_root
from caf_pipeline.errors import ObjectReadFailed, StagingError
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.manifest import ChunkIdentity, head_bytes
from caf_pipeline.inventory.objects import S3Object, SkipReason
from caf_pipeline.inventory.plan import read_chunk_objects
from caf_pipeline.packing.journal.format import Journal
from caf_pipeline.packing.packer import Packer
from caf_pipeline.packing.prefetch import SMALL_OBJECT_BYTES, OrderedFetch
from caf_pipeline.packing.sink import PartFile
from caf_pipeline.reading.chunk_reader import ChunkFile, StagedSource
from caf_pipeline.settings import PackingSettings
from caf_pipeline.source.protocol import Checksum, ObjectPart
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.patience import PATIENCE_SECONDS
from caf_pipeline_tests.support.plans import MOMENT, plan_of

PART = 64 * 1024
SETTINGS = PackingSettings.model_validate(
    {"part_size": PART, "window_size": 1 << 20, "max_requests": 4}
)
IDENTITY = ChunkIdentity("0" * 32, "src", "src-00000000-00001", "00000000", "snapshot", MOMENT)


def pack(packer, plan, folder):
    """Pack a plan's only chunk into new files of a folder."""
    journal = Journal.open(folder / "chunk.journal", packer.opening)
    try:
        part = PartFile.create(folder / "chunk.part")
        return packer.pack(
            read_chunk_objects(plan.folder, 1), part, folder / "manifest.part", journal
        )
    finally:
        journal.close()


class Packing:
    """A chunk packed from a memory source."""

    def __init__(
        self,
        folder,
        source,
        *,
        target=8 << 20,
        limit=32 << 30,
        give_up=False,
        proof_type=3,
        settings=SETTINGS,
    ):
        self.folder = folder
        self.source = source
        self.plan = plan_of(folder / "plan", source.objects(), target_size_bytes=target)
        self.told = []
        packer = Packer(
            self.plan.chunks[0],
            IDENTITY,
            source,
            settings,
            proof_type=proof_type,
            limit_bytes=limit,
            give_up_on=lambda planned: give_up,
            progress=lambda *counts: self.told.append(counts),
        )
        self.staged = folder / "chunk.part"
        self.packed = pack(packer, self.plan, folder)

    @property
    def chunk(self):
        return ChunkFile(StagedSource(self.staged), "chunk")

    def rows(self):
        return list(self.chunk.manifest().rows())


def bodies(count, size_bytes=1000):
    return {f"key-{number:04d}": os.urandom(size_bytes) for number in range(count)}


def test_every_member_reads_back_with_its_sha256_and_range(tmp_path):
    source = MemorySource(
        bodies(20)
        | {"empty": b"", "large": os.urandom(5 * PART + 17), "exact": os.urandom(2 * PART)}
    )
    packing = Packing(tmp_path, source)
    reader = packing.chunk.reader
    for row in packing.rows():
        body = reader.read(row["member"])
        assert body == source.bodies[row["key"]]
        assert (row["sha256"], row["size_bytes"]) == (hashlib.sha256(body).digest(), len(body))
        assert (reader[row["member"]].start_byte, reader[row["member"]].end_byte) == (
            row["start_byte"],
            row["end_byte"],
        )
    assert packing.packed.member_count == len(source.bodies) == len(packing.rows())


@pytest.mark.parametrize("proof_type", [0, 3])
def test_the_root_is_that_of_the_staged_file(tmp_path, proof_type):
    packing = Packing(
        tmp_path,
        MemorySource(bodies(50, 30_000) | {"z": os.urandom(3_000_000)}),
        proof_type=proof_type,
    )
    assert packing.packed.merkle_root == merkle_root(packing.staged, proof_type)
    assert packing.packed.caf_size_bytes == packing.staged.stat().st_size


def test_the_head_comes_first_and_the_manifest_last(tmp_path):
    packing = Packing(tmp_path, MemorySource(bodies(3)))
    assert packing.staged.read_bytes().startswith(head_bytes(IDENTITY))
    manifest = packing.chunk.reader[".caf/manifest.parquet"]
    assert manifest.end_byte == packing.chunk.reader.data_size_bytes


def test_the_same_plan_packs_to_the_same_bytes(tmp_path):
    source = MemorySource(bodies(40) | {"large": os.urandom(4 * PART)})
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    first, second = Packing(tmp_path / "1", source), Packing(tmp_path / "2", source)
    assert first.staged.read_bytes() == second.staged.read_bytes()


def test_the_file_is_never_larger_than_planned(tmp_path):
    packing = Packing(tmp_path, MemorySource(bodies(300)))
    assert packing.packed.caf_size_bytes <= packing.plan.chunks[0].expected_size_bytes


@pytest.mark.parametrize(
    "reason",
    [SkipReason.CHANGED, SkipReason.DELETED, SkipReason.COLD_STORAGE, SkipReason.ACCESS_DENIED],
)
def test_unavailable_object_is_skipped_with_reason(tmp_path, reason):
    source = MemorySource(bodies(5), unavailable={"key-0002": (reason, -1)})
    packing = Packing(tmp_path, source)
    skipped = [(row["key"], row["skip_reason"]) for row in packing.rows() if row["skip_reason"]]
    assert skipped == [("key-0002", reason)]
    assert (packing.packed.member_count, packing.packed.skipped_count) == (4, 1)
    assert "key-0002" not in packing.chunk.reader


def test_object_changed_in_middle_leaves_no_byte(tmp_path):
    content = {
        "a": os.urandom(100),
        "b": os.urandom(6 * PART),
        "c": os.urandom(3 * PART),
        "d": b"d",
    }
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    without = Packing(tmp_path / "whole", MemorySource({key: content[key] for key in "acd"}))
    broken = Packing(
        tmp_path / "broken",
        MemorySource(content, unavailable={"b": (SkipReason.CHANGED, 4 * PART)}),
    )
    end = without.chunk.reader["d"].end_byte
    assert broken.staged.read_bytes()[:end] == without.staged.read_bytes()[:end]
    assert broken.packed.merkle_root == merkle_root(broken.staged, 3)


def test_read_failure_fails_run_unless_given_up(tmp_path):
    source = MemorySource(bodies(3), failing={"key-0001": 0})
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    with pytest.raises(ObjectReadFailed):
        Packing(tmp_path / "1", source)
    packing = Packing(tmp_path / "2", source, give_up=True)
    assert [row["skip_reason"] for row in packing.rows()] == [None, "unreadable", None]


def test_body_with_wrong_s3_checksum_is_not_archived(tmp_path):
    source = MemorySource(bodies(3) | {"large": os.urandom(3 * PART)})
    for key in ("key-0001", "large"):
        source.checksums[key] = Checksum("crc32", b"\0\0\0\0")
    packing = Packing(tmp_path, source, give_up=True)
    assert sorted(row["key"] for row in packing.rows() if row["skip_reason"] == "unreadable") == [
        "key-0001",
        "large",
    ]


def test_a_body_that_has_s3s_own_checksum_is_archived(tmp_path):
    source = MemorySource(bodies(3) | {"large": os.urandom(3 * PART)})
    for key in ("key-0001", "large"):
        source.checksums[key] = Checksum("crc32", zlib.crc32(source.bodies[key]).to_bytes(4, "big"))
    assert Packing(tmp_path, source).packed.member_count == 4


def test_s3_checksums_are_not_requested_if_disabled(tmp_path):
    source = MemorySource(bodies(3) | {"large": os.urandom(3 * PART)})
    source.checksums = {key: Checksum("crc32", b"\0\0\0\0") for key in source.bodies}
    settings = SETTINGS.model_copy(update={"compare_checksums": False})
    assert Packing(tmp_path, source, settings=settings).packed.member_count == 4


def test_headers_and_user_metadata_are_in_the_manifest(tmp_path):
    headers = ObjectHeaders(
        content_type="text/plain", cache_control="no-store", user_metadata={"owner": "æ"}
    )
    (row,) = Packing(tmp_path, MemorySource({"a": b"x"}, headers={"a": headers})).rows()
    assert (row["content_type"], row["cache_control"], row["content_language"]) == (
        "text/plain",
        "no-store",
        None,
    )
    assert row["user_metadata"] == [("owner", "æ")]


def test_a_chunk_that_its_metadata_would_overfill_closes_earlier(tmp_path):
    source = MemorySource(bodies(200, 5000))
    source.headers = {key: ObjectHeaders(user_metadata={"m": "x" * 2000}) for key in source.bodies}
    limit = 1 << 20
    packing = Packing(tmp_path, source, target=limit, limit=limit)
    packed = packing.packed
    assert packed.caf_size_bytes <= limit
    assert packed.released_count > 0
    assert packed.member_count + packed.released_count == packing.plan.chunks[0].object_count
    assert [row["key"] for row in packing.rows()] == sorted(source.bodies)[: packed.member_count]


def test_single_object_over_limit_by_metadata_is_skipped(tmp_path):
    source = MemorySource(
        {"a": os.urandom(900_000)}, headers={"a": ObjectHeaders(user_metadata={"m": "x" * 200_000})}
    )
    packing = Packing(tmp_path, source, target=1 << 20, limit=1 << 20)
    assert [row["skip_reason"] for row in packing.rows()] == ["too_large"]


def test_a_full_disk_is_told_before_anything_is_fetched(tmp_path, small_disk):
    source = MemorySource({"a": os.urandom(3 << 20)})
    plans = tmp_path / "plans"
    plans.mkdir()
    plan = plan_of(plans, source.objects(), target_size_bytes=8 << 20)
    packer = Packer(
        plan.chunks[0],
        IDENTITY,
        source,
        SETTINGS,
        proof_type=3,
        limit_bytes=8 << 20,
        give_up_on=lambda planned: False,
        progress=lambda *_: None,
    )
    with pytest.raises(StagingError, match="are needed"):
        pack(packer, plan, small_disk)
    assert source.reads == []


def test_objects_with_our_names_are_members_like_any_other(tmp_path):
    source = MemorySource(
        {".caf/chunk": b"theirs", ".caf/manifest.parquet": b"theirs too", "a": b"a"}
    )
    packing = Packing(tmp_path, source)
    assert packing.chunk.reader.read(".caf/chunk") == b"theirs"
    assert [row["key"] for row in packing.rows()] == sorted(source.bodies)


def test_keys_of_every_kind_are_members(tmp_path):
    names = [
        "../x",
        "/abs",
        "a//b",
        ".",
        "..",
        "dir/",
        "a",
        "a/b",
        "__proto__",
        "1",
        "é",
        "e\u0301",
        "\n",
        '"',
        "%2F",
        "\\",
        " ",
    ]
    source = MemorySource({name: name.encode() for name in names} | {"k" * 1024: b"long"})
    packing = Packing(tmp_path, source)
    assert {
        row["key"]: packing.chunk.reader.read(row["member"]) for row in packing.rows()
    } == source.bodies


def test_progress_counts_every_object_once(tmp_path):
    packing = Packing(
        tmp_path, MemorySource(bodies(10, 500), unavailable={"key-0003": (SkipReason.DELETED, -1)})
    )
    assert [sum(counts) for counts in zip(*packing.told, strict=True)] == [10, 9 * 500, 9 * 500]


def test_the_real_reader_of_the_format_sees_only_members(tmp_path):
    packing = Packing(tmp_path, MemorySource(bodies(3)))
    keys = [member.key for member in CafReader.open(StagedSource(packing.staged)).members]
    assert sorted(keys) == sorted(
        [".caf/chunk", ".caf/manifest.parquet", "key-0000", "key-0001", "key-0002"]
    )


class SlowWriter:
    """Counts the reads that wait for the writer."""

    def __init__(self, source):
        self.source = source
        self.most = 0
        self.now = 0
        self.lock = threading.Lock()

    def full_object_checksum(self, obj):
        return None

    def begin(self, obj, start_byte, end_byte, ended):
        return None

    def read(self, obj, start_byte, end_byte):
        with self.lock:
            self.now += end_byte - start_byte
            self.most = max(self.most, self.now)
        return self.source.read(obj, start_byte, end_byte)


def test_the_window_bounds_the_bytes_ahead_of_the_writer(tmp_path):
    source = MemorySource(bodies(50, 10_000) | {"large": bytes(40 * PART)})
    counting = SlowWriter(source)
    plan = plan_of(tmp_path, source.objects(), target_size_bytes=8 << 20)
    window = 4 * PART
    objects = read_chunk_objects(plan.folder, 1)
    with OrderedFetch(
        counting, objects, window_bytes=window, part_bytes=PART, max_requests=8
    ) as fetch:
        while planned := fetch.next_object():
            for part, _ in fetch.parts(planned):
                time.sleep(0.001)  # lets the readers run ahead
                with counting.lock:
                    counting.now -= len(part.body)
    assert counting.most <= window + PART  # the part being written is not ahead


SMALL_WINDOW = {"window_bytes": 1 << 20, "part_bytes": PART}


class BeginningSource(MemorySource):
    """Starts all reads but some keys, and ends them in another thread. Keys in `broken` fail."""

    def __init__(self, bodies, broken=(), unable=()):
        super().__init__(bodies)
        self.broken, self.unable = set(broken), set(unable)
        self.begun, self.cancelled, self.under_way, self.most = [], [], set(), 0
        self.enders = ThreadPoolExecutor(1)
        self.gate = threading.Event()
        self.gate.set()

    def begin(self, obj, start_byte, end_byte, ended):
        if obj.key.decode() in self.unable:
            return None
        begun = Begun(self, obj, start_byte, end_byte)
        self.begun.append(begun)
        self.under_way.add(id(begun))
        self.most = max(self.most, len(self.under_way))
        self.enders.submit(self._end, begun, ended)
        return begun

    def _end(self, begun, ended):
        self.gate.wait(PATIENCE_SECONDS)
        self.under_way.remove(id(begun))
        ended()


@dataclass(eq=False)
class Begun:
    source: BeginningSource
    obj: S3Object
    start_byte: int
    end_byte: int

    def waiting(self):
        return contextlib.nullcontext()

    def has_failed(self):
        return self.obj.key.decode() in self.source.broken

    def was_refused(self):
        return self.has_failed()

    def cancel(self):
        self.source.cancelled.append(self)

    def part(self):
        self.source.begun.remove(self)
        if self.has_failed():
            return None
        key = self.obj.key.decode()
        body = self.source.bodies[key][self.start_byte : self.end_byte]
        return ObjectPart(body, ObjectHeaders(), self.source.checksums.get(key))


@settings(max_examples=30)
@given(
    data=st.data(),
    sizes=st.lists(
        st.sampled_from([0, 1, 1000, SMALL_OBJECT_BYTES, SMALL_OBJECT_BYTES + 1, 3 * PART]),
        max_size=30,
    ),
)
def test_begun_failed_and_threaded_reads_come_in_order(tmp_path_factory, data, sizes):
    made = {f"key-{number:04d}": os.urandom(size) for number, size in enumerate(sizes)}
    some = st.sets(st.sampled_from(sorted(made))) if made else st.just(set())
    source = BeginningSource(made, broken=data.draw(some), unable=data.draw(some))
    plan = plan_of(tmp_path_factory.mktemp("plan"), source.objects(), target_size_bytes=8 << 20)
    max_requests = data.draw(st.integers(1, 4))
    objects = read_chunk_objects(plan.folder, 1) if made else []
    fetched = {}
    with OrderedFetch(
        source, objects, window_bytes=1 << 20, part_bytes=2 * PART, max_requests=max_requests
    ) as fetch:
        while planned := fetch.next_object():
            parts = list(fetch.parts(planned))
            fetched[planned.object.key.decode()] = b"".join(part.body for part, _ in parts)
            if len(parts) == 1:
                body = parts[0][0].body
                assert parts[0][1] == (
                    hashlib.sha256(body).digest(),
                    crc64nvme(body).to_bytes(8, "big"),
                )
    assert list(fetched.items()) == list(made.items())
    assert source.most <= max_requests
    assert {key for key, *_ in source.reads} == source.broken | source.unable


def test_failed_reads_are_retried_concurrently(tmp_path):
    source = BeginningSource(bodies(12), broken=[f"key-{number:04d}" for number in (2, 5, 7)])
    gate = threading.Barrier(3)
    read = source.read
    source.read = lambda *wanted: (gate.wait(PATIENCE_SECONDS), read(*wanted))[1]
    plan = plan_of(tmp_path, source.objects(), target_size_bytes=8 << 20)
    objects = read_chunk_objects(plan.folder, 1)
    with OrderedFetch(source, objects, **SMALL_WINDOW, max_requests=3) as fetch:
        while planned := fetch.next_object():
            [(part, _)] = fetch.parts(planned)
            assert part.body == source.bodies[planned.object.key.decode()]


def test_a_failing_server_receives_no_more_reads_than_the_limit(tmp_path):
    source = BeginningSource(bodies(200), broken=bodies(200))
    read, unended, ended = source.read, [], []

    def read_slowly(*wanted):
        unended.append(len(source.begun) - len(ended))
        time.sleep(0.001)  # lets the caller begin others
        part = read(*wanted)
        ended.append(part)
        return part

    source.read = read_slowly
    packing = Packing(tmp_path, source, settings=SETTINGS.model_copy(update={"max_requests": 3}))
    assert packing.packed.member_count == 200
    assert max(unended) <= 3


def test_a_slow_first_read_delays_no_other(tmp_path):
    source = BeginningSource(bodies(12))
    began, begin = threading.Event(), source.begin

    def begin_slowly(obj, start_byte, end_byte, ended):
        if obj.key == b"key-0000":  # ends when the last read begins
            threading.Thread(target=lambda: (began.wait(PATIENCE_SECONDS), ended())).start()
            return begin(obj, start_byte, end_byte, lambda: None)
        if obj.key == b"key-0011":
            began.set()
        return begin(obj, start_byte, end_byte, ended)

    source.begin = begin_slowly
    packing = Packing(tmp_path, source, settings=SETTINGS.model_copy(update={"max_requests": 2}))
    assert packing.packed.member_count == 12
    assert began.is_set()


def test_a_begun_body_whose_checksum_differs_is_read_again(tmp_path):
    source = BeginningSource(bodies(3))
    source.checksums["key-0001"] = Checksum(
        "crc32", zlib.crc32(source.bodies["key-0001"]).to_bytes(4, "big")
    )
    right, source.bodies["key-0001"] = source.bodies["key-0001"], bytes(1000)
    read = source.read
    source.read = lambda *wanted: (source.bodies.update({"key-0001": right}), read(*wanted))[1]
    packing = Packing(tmp_path, source)
    assert packing.chunk.reader.read("key-0001") == right
    assert [key for key, *_ in source.reads] == ["key-0001"]


def test_packing_that_ends_early_cancels_all_started_reads(tmp_path):
    source = BeginningSource(bodies(50))
    plan = plan_of(tmp_path, source.objects(), target_size_bytes=8 << 20)
    objects = read_chunk_objects(plan.folder, 1)
    with (
        contextlib.suppress(ZeroDivisionError),
        OrderedFetch(source, objects, **SMALL_WINDOW, max_requests=2) as fetch,
    ):
        list(fetch.parts(fetch.next_object()))
        raise ZeroDivisionError
    assert source.begun
    assert source.cancelled == source.begun
