"""Filters: what a pattern matches, and the SQL of a filter against its Python."""

from bisect import bisect_left
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caf_pipeline.inventory.filters import FILTERS, NO_FILTER, ObjectFilter
from caf_pipeline.inventory.objects import MAX_SIZE_BYTES, S3Object, is_supported
from caf_pipeline.inventory.snapshot import inventory_query, snapshot_batch
from caf_pipeline.setting_values import MAX_PATTERNS_SIZE
from caf_pipeline.settings import SourceSettings
from caf_pipeline.system.parquet import DEFAULT_BUDGET

MOMENT = datetime(2026, 11, 1, 12, tzinfo=UTC)


def an_object(
    key: str | bytes, size: int = 1, storage_class: str = "STANDARD", hours: int = 0
) -> S3Object:
    raw = key.encode() if isinstance(key, str) else key
    return S3Object(raw, None, "e", size, MOMENT + timedelta(hours=hours), storage_class)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("logs/*", ["logs/", "logs/a", "logs/a/b\nc"], ["log", "xlogs/a", "Logs/a"]),
        ("*.jpg", [".jpg", "a/b.jpg"], ["a.jpg/", "ajpg", "a.JPG"]),
        ("a?c", ["abc", "a/c", "aéc", "a\U0001f600c", "a\nc"], ["ac", "abbc"]),
        ("a", ["a"], ["ab", "ba", "a\n"]),
        ("*/tmp/*", ["x/tmp/y", "/tmp/"], ["tmp/y"]),
        ("[a-b](1).$^|\\#'-~& x", ["[a-b](1).$^|\\#'-~& x"], ["a(1).$^|\\#'-~& x"]),
        ("é*", ["é", "éa"], ["e\u0301"]),
    ],
)
def test_patterns_have_two_wildcards_and_no_other_syntax(tmp_path, pattern, matching, others):
    objects = [an_object(key) for key in (*matching, *others)]
    included = ObjectFilter(include=(pattern,))
    assert [included.left_out_by(obj) for obj in objects] == [None] * len(matching) + [
        "include"
    ] * len(others)
    assert by_sql(tmp_path, included, objects) == [included.left_out_by(obj) for obj in objects]
    excluded = ObjectFilter(exclude=(pattern, "another"))
    assert [excluded.left_out_by(obj) for obj in objects] == ["exclude"] * len(matching) + [
        None
    ] * len(others)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "end", ["p" * 1_000, "abc*" * 100, "?" * 200, "*x" * 100, "é" * 500, "\U0001f600?" * 100, "?*"]
)
def test_duckdb_matches_the_most_patterns_of_the_settings(tmp_path, end):
    refused = bisect_left(
        range(MAX_PATTERNS_SIZE), True, key=lambda count: not is_taken(patterns(count, end))
    )
    assert refused > 100
    filters = ObjectFilter(exclude=patterns(refused - 1, end))
    assert by_sql(tmp_path, filters, [an_object("~")]) == [None]


def patterns(count: int, end: str) -> tuple[str, ...]:
    return tuple(f"{number:x}{end}" for number in range(count))


def is_taken(exclude: tuple[str, ...]) -> bool:
    try:
        return bool(SourceSettings(bucket="bucket", exclude=exclude))
    except ValueError:
        return False


def test_the_first_applicable_filter_is_named():
    settings = SourceSettings(
        bucket="bucket",
        include=("a*",),
        exclude=("ab*",),
        storage_classes=("STANDARD",),
        max_size=10,
        min_age="1h",
    )
    filters = ObjectFilter.of(settings, MOMENT)
    worst = {"size": 11, "storage_class": "GLACIER", "hours": 0}
    assert [
        filters.left_out_by(obj)
        for obj in (
            an_object("b", **worst),
            an_object("ab", **worst),
            an_object("a", **worst),
            an_object("a", size=11),
            an_object("a", size=10),
            an_object("a", size=10, hours=-1),
        )
    ] == ["include", "exclude", "storage_classes", "max_size", "min_age", None]


def test_a_limit_above_every_size_leaves_nothing_out(tmp_path):
    filters = ObjectFilter.of(SourceSettings(bucket="bucket", max_size=1 << 127), MOMENT)
    assert by_sql(tmp_path, filters, [an_object("a", size=MAX_SIZE_BYTES)]) == [None]


def test_nothing_is_left_out_by_default():
    assert ObjectFilter.of(SourceSettings(bucket="bucket"), MOMENT) == NO_FILTER


def by_sql(folder, filters: ObjectFilter, objects: list[S3Object]) -> list[str | None]:
    with inventory_query(folder / "any", DEFAULT_BUDGET) as query:
        query.rows_of("snapshot", pa.Table.from_batches([snapshot_batch(objects)]))
        return [by for (by,) in query.rows(f"SELECT {filters.sql} FROM snapshot")]


CHARACTERS = st.text(
    st.sampled_from("ab*?.\\'[](){}|^$+ /\n\t\"#-~&é日\U0001f600"), min_size=1, max_size=4
)
PATTERNS = st.lists(
    CHARACTERS | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3),
    max_size=3,
).map(tuple)
OBJECTS = st.lists(
    st.builds(
        an_object,
        CHARACTERS | st.binary(min_size=1, max_size=4),
        st.integers(0, 4),
        st.sampled_from(["STANDARD", "GLACIER"]),
        st.integers(-2, 2),
    ),
    min_size=1,
    max_size=8,
)


@given(
    st.builds(
        ObjectFilter,
        PATTERNS,
        PATTERNS,
        st.sampled_from([(), ("STANDARD",), ("GLACIER", "STANDARD_IA")]),
        st.integers(0, 4),
        st.none() | st.integers(-2, 2).map(lambda hours: MOMENT + timedelta(hours=hours)),
    ),
    OBJECTS,
)
@settings(max_examples=40)
def test_filters_agree_in_sql_and_python(tmp_path_factory, filters, objects):
    folder = tmp_path_factory.getbasetemp()
    assert by_sql(folder, filters, objects) == [
        filters.left_out_by(obj) if is_supported(obj.key) else None for obj in objects
    ]
    assert {filters.left_out_by(obj) for obj in objects if is_supported(obj.key)} <= {
        None,
        *FILTERS,
    }
