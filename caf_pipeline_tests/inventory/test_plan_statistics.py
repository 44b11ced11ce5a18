"""Statistics of a plan's objects, counted by DuckDB and by Python."""

import os
import tempfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import CafError
from caf_pipeline.inventory.plan import CHUNKS_FILE, OBJECTS_FILE
from caf_pipeline.inventory.plan_statistics import histogram_lines, histogram_svg, plan_statistics
from caf_pipeline_tests.support.plans import an_object, plan_of

PART = 1 << 20
GIB = 1 << 30


def statistics_of(folder, objects, **terms):
    plan_of(folder, objects, target_size_bytes=30 * GIB, **terms)
    return plan_statistics([folder], part_bytes=PART)


@pytest.mark.thorough
@settings(max_examples=40)
@given(st.lists(st.integers(0, 31 * GIB), min_size=1, max_size=30))
@example([0, 1, 1023, 1024, 4095, 4096, PART, PART + 1, 31 * GIB])
def test_every_object_is_counted_in_the_step_of_its_size(sizes):
    with tempfile.TemporaryDirectory() as folder:
        statistics = statistics_of(
            Path(folder), [an_object(f"{n:03d}", size) for n, size in enumerate(sizes)]
        )
    assert (statistics.objects, statistics.size_bytes) == (len(sizes), sum(sizes))
    for step in statistics.sizes:
        inside = [size for size in sizes if step.from_bytes <= size < step.below_bytes]
        assert (step.objects, step.size_bytes) == (len(inside), sum(inside))
    assert sum(step.objects for step in statistics.sizes) == len(sizes)
    assert all(
        step.below_bytes == next_step.from_bytes
        for step, next_step in zip(statistics.sizes, statistics.sizes[1:], strict=False)
    )
    assert statistics.get_requests == sum(max(1, -(-size // PART)) for size in sizes)


def test_largest_and_smallest_objects_are_named_in_order(tmp_path):
    statistics = statistics_of(tmp_path, [an_object(f"k{n}", n * 1000) for n in range(20)])
    assert [size for _, size in statistics.largest] == [19_000, 18_000, 17_000, 16_000, 15_000]
    assert statistics.smallest == [
        ("k0", 0),
        ("k1", 1000),
        ("k2", 2000),
        ("k3", 3000),
        ("k4", 4000),
    ]


def test_storage_classes_are_counted_apart(tmp_path):
    objects = [
        replace(an_object(f"k{n}", 10), storage_class="GLACIER" if n % 3 else "STANDARD")
        for n in range(9)
    ]
    assert statistics_of(tmp_path, objects).storage_classes == {
        "GLACIER": (6, 60),
        "STANDARD": (3, 30),
    }


def test_checksum_requests_count_objects_read_in_pieces(
    tmp_path,
):
    whole = replace(an_object("a", PART + 1), checksum="CRC64NVME/FULL_OBJECT")
    others = [
        replace(whole, key=b"b", size_bytes=PART),
        replace(whole, key=b"c", checksum="SHA256/COMPOSITE"),
        an_object("d", PART + 1),
    ]
    reported = replace(whole, key=b"e", checksum="CRC32")  # reports name no type
    split = replace(whole, key=b"f", size_bytes=40 * GIB)  # S3 has no checksum of its parts
    assert statistics_of(tmp_path, [whole, *others, reported, split]).checksum_requests == 2


def test_statistics_add_plans_without_waiting_objects(tmp_path):
    big, small = an_object("a", 40 * PART), an_object("b", 5)
    for name in ("1", "2"):
        plan = plan_of(
            tmp_path / name, [big, small], target_size_bytes=40 * PART, min_chunk_size_bytes=PART
        )
        assert plan.waiting is not None
    statistics = plan_statistics([tmp_path / "1", tmp_path / "2"], part_bytes=PART)
    assert (statistics.objects, statistics.size_bytes) == (2, 80 * PART)
    assert plan_statistics([], part_bytes=PART).objects == 0


@pytest.mark.parametrize("name", [OBJECTS_FILE, CHUNKS_FILE])
@pytest.mark.parametrize("spoil", [Path.unlink, partial(os.truncate, length=100)])
def test_a_damaged_plan_file_names_the_plan(tmp_path, name, spoil):
    statistics_of(tmp_path, [an_object("k", 10)])
    spoil(tmp_path / name)
    with pytest.raises(CafError, match=str(tmp_path)) as caught:
        plan_statistics([tmp_path], part_bytes=PART)
    assert "withdraw" in caught.value.hint


def test_a_text_histogram_has_a_line_for_each_step(tmp_path):
    objects = [
        an_object("e", 0),
        *(an_object(f"k{n}", 5_000) for n in range(40)),
        *(an_object(f"m{n}", 100_000) for n in range(20)),
    ]
    lines = histogram_lines(statistics_of(tmp_path, objects).sizes)
    assert [line.split()[:3] for line in lines][1:3] == [["<", "1", "KiB"], ["<", "4", "KiB"]]
    assert Counter(line.count("█") for line in lines) == Counter(
        {40: 1, 20: 1, 1: 1, 0: len(lines) - 3}
    )
    assert lines[-1].split()[-3:] == ["20", "1.9", "MiB"]


def test_an_svg_histogram_has_a_bar_for_each_step(tmp_path):
    objects = [
        an_object("e", 0),
        *(an_object(f"k{n}", 5_000) for n in range(40)),
        *(an_object(f"m{n}", 100_000) for n in range(20)),
    ]
    svg = ElementTree.fromstring(histogram_svg(statistics_of(tmp_path, objects).sizes))
    bars = svg.find("{*}path").get("d").split("M")[1:]
    assert [bar.split("v-")[1] for bar in bars] == ["2", "80", "40"]
    assert [text.text.split() for text in svg.findall("{*}text")] == [
        ["below", "empty", "1K", "4K", "16K", "64K", "256K"],
        ["objects", "1", "0", "0", "40", "0", "20"],
        ["bytes", "0", "0", "0", "195K", "0", "1.9M"],
    ]
