"""`caf ls`, `caf find` and `caf du`."""

import json

import pytest

from caf_pipeline.errors import SettingsError
from caf_pipeline.settings import load_settings
from caf_pipeline.wiring import open_archive
from caf_pipeline_tests.support.command_line import (
    KEYS,
    CommandLine,
    archive_source,
    expect_error,
    source_text,
)
from caf_pipeline_tests.support.s3_server import make_bucket

BODIES = {
    "logs/2026/a.gz": b"a" * 10,
    "logs/2026/b.gz": b"b" * 20,
    "logs/2025/c.gz": b"c" * 3000,
    "logs/": b"",
    "logs": b"not a folder",
    "tab\there\\n": b"odd",
    "zoë": b"utf-8",
    "packages/rich/py.typed": b"typed, or so it says",
}


@pytest.fixture(scope="module")
def caf(tmp_path_factory, s3_server, databases):
    caf = CommandLine(
        tmp_path_factory.mktemp("listed"), KEYS | {"CAF_DATABASE_URL": databases.take().url}
    )
    bucket = make_bucket(s3_server)
    for key, body in BODIES.items():
        bucket.put(key, body)
    caf.settings(source_text(s3_server, bucket.name) + '[sources.empty]\nbucket = "e"\n')
    archive_source(caf)
    bucket.delete("logs/2025/c.gz")
    archive_source(caf)
    return caf


def lines(done):
    assert (done.status, done.err) == (0, "")
    return done.out.decode().splitlines()


def objects(done):
    return [json.loads(line) for line in lines(done)]


def test_a_level_is_listed_as_s3_lists_it(caf):
    assert lines(caf("ls", "src")) == ["logs", "logs/", "packages/", r"tab\there\\n", "zoë"]
    assert lines(caf("ls", "src", "logs/")) == ["logs/", "logs/2025/", "logs/2026/"]
    assert lines(caf("ls", "src", "logs/2026/")) == ["logs/2026/a.gz", "logs/2026/b.gz"]
    assert lines(caf("ls", "src", "lo")) == ["logs", "logs/"]


def test_every_key_is_listed_as_a_look_up_gives_it(caf):
    listed = objects(caf("ls", "src", "--recursive", "--json"))
    assert [row["key"] for row in listed] == sorted(BODIES)
    assert {row["key"]: row["size_bytes"] for row in listed} == {
        key: len(body) for key, body in BODIES.items()
    }
    assert {row["key"] for row in listed if row["status"] == "gone"} == {"logs/2025/c.gz"}
    got = caf("get", "src", "logs/2025/c.gz")
    assert (got.out, "is gone from S3" in got.err) == (BODIES["logs/2025/c.gz"], True)
    assert all(row["chunks"] and len(row["sha256"]) == 64 for row in listed)


def test_a_listing_in_pages_is_the_whole_listing(caf):
    for options in ([], ["-r"], ["-r", "--versions"]):
        entries, last = [], []
        while page := objects(caf("ls", "src", *options, "--limit", "3", "--json", *last)):
            assert len(page) <= 3
            entries += page
            last = ["--start-after", page[-1].get("prefix") or page[-1]["key"]]
        assert entries == objects(caf("ls", "src", *options, "--json"))
    expect_error(caf("ls", "src", "--start-after", "k" * 1025), 2, "1,024")


def test_the_option_current_lists_only_objects_in_s3(caf):
    assert lines(caf("ls", "src", "logs/", "--current")) == ["logs/", "logs/2026/"]
    assert "logs/2025/c.gz" not in lines(caf("ls", "src", "-r", "--current"))


def test_the_long_form_has_size_time_and_status(caf):
    *_, shown = lines(caf("ls", "src", "logs/2025/", "-l"))
    size, _, _, status, key = shown.split()
    assert (size, status, key) == ("3,000", "gone", "logs/2025/c.gz")
    assert [line.split() for line in lines(caf("ls", "src", "logs/2", "-l"))] == [
        ["logs/2025/"],
        ["logs/2026/"],
    ]


@pytest.mark.thorough
def test_objects_are_found_by_pattern_size_and_time(caf):
    assert lines(caf("find", "src", "*.gz", "--smaller", "1KiB")) == [
        "logs/2026/a.gz",
        "logs/2026/b.gz",
    ]
    assert lines(caf("find", "src", "logs/202?/*", "--larger", "10")) == [
        "logs/2025/c.gz",
        "logs/2026/b.gz",
    ]
    assert lines(caf("find", "src", "logs")) == ["logs"]
    assert lines(caf("find", "src", "--older", "2020-01-01")) == []
    assert len(lines(caf("find", "src", "--newer", "2020-01-01T00:00:00Z"))) == len(BODIES)
    (row,) = objects(caf("find", "src", "zo*", "--json"))
    assert (row["key"], row["size_bytes"]) == ("zoë", 5)


@pytest.mark.thorough
def test_the_option_as_of_lists_and_fetches_versions(caf):
    later = objects(caf("ls", "src", "-r", "--json", "--as-of", "2099-01-01T00:00+02:00"))
    assert {row["key"]: row["status"] for row in later} == dict.fromkeys(BODIES, "archived") | {
        "logs/2025/c.gz": "gone"
    }
    got = caf("get", "src", "logs/2025/c.gz", "--as-of", "2099-01-01")
    assert (got.out, "S3 at 2099-01-01 00:00:00 UTC" in got.err) == (BODIES["logs/2025/c.gz"], True)
    assert objects(caf("find", "src", "--json", "--as-of", "2099-01-01")) == later
    (gone,) = objects(caf("find", "src", "logs/2025/*", "--json", "--as-of", "2099-01-01"))
    assert (gone["key"], gone["status"]) == ("logs/2025/c.gz", "gone")
    assert lines(caf("find", "src", "--as-of", "2020-01-01")) == []
    *_, total = objects(caf("du", "src", "--json", "--as-of", "2099-01-01"))
    assert (total["objects"], total["size_bytes"]) == (len(BODIES), sum(map(len, BODIES.values())))
    expect_error(caf("get", "src", "zoë", "--as-of", "2020-01-01"), 11, "'zoë'")


def test_sums_add_up_to_what_is_listed(caf):
    assert objects(caf("du", "src", "--json")) == [
        {"prefix": "logs/", "objects": 4, "size_bytes": 3030},
        {"prefix": "packages/", "objects": 1, "size_bytes": 20},
        {"prefix": "", "objects": 8, "size_bytes": sum(map(len, BODIES.values()))},
    ]
    assert objects(caf("du", "src", "logs/", "-s", "--json")) == [
        {"prefix": "logs/", "objects": 4, "size_bytes": 3030}
    ]
    assert lines(caf("du", "src", "logs/2026/")) == ["      30 B             2 objects  logs/2026/"]


def test_references_that_fsspec_cannot_read_are_counted(caf):
    done = caf("export-references", "src", "-o", "all.json")
    assert (done.status, done.out) == (0, b"")
    written, unreadable = done.err.splitlines()
    assert "8 objects in 1 chunk" in written
    assert "1 key in 'all.json'" in unreadable
    assert "fsspec" not in caf("export-references", "src", "-o", "all.parquet").err


def test_a_pattern_of_many_stars_comes_to_an_end(caf):
    assert lines(caf("find", "src", "*" * 40 + "d" + "*" * 40 + "x")) == []
    assert lines(caf("find", "src", "*" * 40 + ".typed")) == ["packages/rich/py.typed"]
    assert lines(caf("find", "src", "[lp]*")) == []


@pytest.mark.parametrize("path", ["", "caf.toml"])
def test_invalid_settings_open_no_archive(caf, path):
    with caf.surroundings(), pytest.raises(TypeError, match="load_settings"):
        open_archive(path)
    with caf.surroundings(), open_archive(load_settings("caf.toml")) as archive:
        assert archive.sources() == ["src"]
    with caf.surroundings(), pytest.raises(SettingsError, match="is a folder"):
        load_settings("")
