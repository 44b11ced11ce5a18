"""`caf clps` and `caf chunkio` on files, URLs and archived objects."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from caf_pipeline.cli import main
from caf_pipeline.formats.chunkio import LogWriter
from caf_pipeline_tests.support.clps_archives import (
    WHOLE,
    built,
    files,
    frame,
    range_index,
    wrapped,
)
from caf_pipeline_tests.support.command_line import KEYS, CommandLine, archive_source, source_text
from caf_pipeline_tests.support.range_server import Site, serving
from caf_pipeline_tests.support.s3_server import make_bucket

VECTORS = Path(__file__).parents[1] / "vectors"
CLPS = VECTORS / "clps" / "two_files_0.12.1b0.clps"
LOG = VECTORS / "chunkio" / "reopened.chunkio"
DAMAGED = VECTORS / "chunkio" / "truncated_then_appended.chunkio"


@pytest.fixture(scope="module")
def caf(tmp_path_factory, s3_server, databases):
    caf = CommandLine(
        tmp_path_factory.mktemp("formats"), KEYS | {"CAF_DATABASE_URL": databases.take().url}
    )
    bucket = make_bucket(s3_server)
    bucket.put("logs/a.clp", CLPS.read_bytes())
    bucket.put("logs/a.log", LOG.read_bytes())
    caf.settings(source_text(s3_server, bucket.name))
    archive_source(caf)
    return caf


def objects(text: str | bytes) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


# --- clps


@pytest.mark.thorough
def test_inspect_reads_files_urls_and_archived_objects_alike(caf):
    with serving(Site(CLPS.read_bytes())) as site:
        results = [
            caf("clps", "inspect", *words, "--json")
            for words in ([str(CLPS)], [site.url], ["src", "logs/a.clp"])
        ]
        assert len(site.requests) == 1
    assert [(result.status, result.err) for result in results] == [(0, "")] * 3
    assert results[0].out == results[1].out == results[2].out
    (result,) = objects(results[0].out)
    assert (
        result["version"],
        result["uncompressed_size"],
        result["total_size"],
        result["metadata_size"],
    ) == ("0.5.0", 10641, 1697, 320)
    assert (result["inputs"], result["records"], result["ArchiveInfo"]) == (
        2,
        70,
        {"num_segments": 1},
    )
    assert [
        (entry["s"], entry["e"], entry["f"]["_filename"]) for entry in result["RangeIndex"]
    ] == [(0, 60, "a.jsonl"), (60, 70, "b.jsonl")]
    (times,) = result["TimestampDictionary"]["ranges"]
    assert (times["key"], times["begin"], times["end"]) == (
        "timestamp",
        1_700_000_000_000,
        1_700_001_009_500,
    )
    assert result["ArchiveFileInfo"]["files"][-1] == {"n": "/0", "o": 442}
    assert result["sections"][-1] == {"name": "/0", "offset": 826, "size": 871}


def test_long_metadata_take_one_more_request_and_missing_records_another():
    noise = (9, os.urandom(200_000))
    with serving(Site(built(noise, *WHOLE))) as site:
        assert main(["clps", "inspect", site.url]) == 0
        assert len(site.requests) == 2
    with serving(Site((VECTORS / "clps" / "no_range_index.clps").read_bytes())) as site:
        assert main(["clps", "inspect", site.url]) == 0
        assert len(site.requests) == 2


def test_inspect_prints_times_names_and_missing_fields(tmp_path, capsys):
    assert main(["clps", "inspect", str(CLPS)]) == 0
    shown = capsys.readouterr().out
    assert "70 records of 2 inputs" in shown
    assert "timestamp: 2023-11-14 22:13:20.000 UTC to 2023-11-14 22:30:09.500 UTC" in shown
    assert main(["clps", "inspect", str(VECTORS / "clps" / "two_files_0.9.1b1.clps")]) == 0
    assert "unknown unit" in capsys.readouterr().out
    assert main(["clps", "inspect", str(VECTORS / "clps" / "no_range_index.clps")]) == 0
    assert "70 records\n" in capsys.readouterr().out
    odd = range_index({"s": 0, "e": 1, "f": {"_filename": "a\x1b[2J\nb"}})
    (tmp_path / "odd").write_bytes(built(*WHOLE[:3], odd))
    assert main(["clps", "inspect", str(tmp_path / "odd")]) == 0
    assert r"a\x1b[2J\nb" in capsys.readouterr().out


def test_a_truncated_clp_archive_is_reported(tmp_path, capsys):
    (tmp_path / "cut").write_bytes(CLPS.read_bytes()[:-1])
    assert main(["clps", "inspect", str(tmp_path / "cut")]) == 0
    assert "warning: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "body", [b"", b"no archive", built(files(), total=5), wrapped(frame(b"\xff"))]
)
def test_inspect_refuses_other_files(tmp_path, capsys, body):
    (tmp_path / "file").write_bytes(body)
    assert main(["clps", "inspect", str(tmp_path / "file"), "--json"]) == 4
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"caf: error: {tmp_path / 'file'}: ")


# --- chunkio


def test_chunkio_reads_files_urls_and_archived_objects_alike(caf):
    with serving(Site(LOG.read_bytes())) as site:
        for words in ([str(LOG)], [site.url], ["src", "logs/a.log"]):
            listed = caf("chunkio", "list", *words, "--json")
            assert [
                (entry["begin"], entry["content_size_bytes"]) for entry in objects(listed.out)
            ] == [(0, 100), (65536, 100), (65692, 100)]
            content = caf("chunkio", "cat", *words, "65536")
            digest = hashlib.sha256(content.out).hexdigest()
            assert (content.status, digest[:16]) == (0, "f48ba0ce932d57f8")
            assert caf("chunkio", "verify", *words).status == 0
    assert (
        objects(caf("chunkio", "list", "src", "logs/a.log", "--pick", "last", "--json").out)[0][
            "begin"
        ]
        == 65692
    )


def test_entries_are_picked_by_position(capsys):
    for options, begins in (
        (["--from", "1"], [65536, 65692]),
        (["--from", "-3", "--to", "65693", "--pick", "first"], [0]),
        (["--to", "65692", "--pick", "last"], [65536]),
        (["--pick", "middle"], [65536]),
        (["--from", "65693", "--pick", "first"], []),
    ):
        assert main(["chunkio", "list", str(LOG), "--json", *options]) == 0
        assert [entry["begin"] for entry in objects(capsys.readouterr().out)] == begins


def test_deflate_contents_are_inflated_on_request(capfdbinary):
    log = str(VECTORS / "chunkio" / "buffered_deflate.chunkio")
    assert main(["chunkio", "cat", log, "370", "--inflate"]) == 0
    assert len(capfdbinary.readouterr().out) == 200_000
    assert main(["chunkio", "cat", str(LOG), "0", "--inflate"]) == 4
    assert capfdbinary.readouterr().out == b""


def test_a_damaged_content_is_never_written(capfdbinary):
    assert main(["chunkio", "cat", str(DAMAGED), "0"]) == 9
    assert capfdbinary.readouterr().out == b""
    assert main(["chunkio", "cat", str(DAMAGED), "1"]) == 4


def test_damage_is_reported_and_the_rest_is_salvaged(tmp_path, capsys):
    assert main(["chunkio", "verify", str(DAMAGED), "--json"]) == 1
    assert objects(capsys.readouterr().out) == [
        {"begin": 0, "end": 65593, "damage": "content"},
        {"entries": 3, "size_bytes": 65634, "damaged_places": 1},
    ]
    writer = LogWriter()
    log = bytearray(
        b"".join(writer.entry(bytes([number]) * 16, bytes(1000)) for number in range(10))
    )
    log[16] ^= 1  # the first header, so that no entry is reachable
    (tmp_path / "log").write_bytes(log)
    assert main(["chunkio", "list", str(tmp_path / "log")]) == 0
    assert capsys.readouterr().out == ""
    assert (
        main(["chunkio", "salvage", str(tmp_path / "log"), "-o", str(tmp_path / "saved"), "--json"])
        == 0
    )
    marks = [
        (entry["reachable"], entry["content_right"], entry["inside"])
        for entry in objects(capsys.readouterr().out)
    ]
    assert marks == [(False, True, None)] * 9
    assert main(["chunkio", "verify", str(tmp_path / "saved"), "--json"]) == 0
    assert main(["chunkio", "list", str(tmp_path / "saved"), "--json"]) == 0
    assert [entry["user_data"][:2] for entry in objects(capsys.readouterr().out)[1:]] == [
        f"{number:02}" for number in range(1, 10)
    ]


def test_salvage_writes_nothing_without_undamaged_entries(tmp_path, capsys):
    (tmp_path / "junk").write_bytes(b"junk" * 100)
    (tmp_path / "saved").write_bytes(b"kept")
    assert main(["chunkio", "salvage", str(tmp_path / "junk"), "-o", str(tmp_path / "saved")]) == 1
    assert (tmp_path / "saved").read_bytes() == b"kept"
    assert main(["chunkio", "salvage", str(LOG), "-o", str(tmp_path / "no" / "folder")]) == 8
    for command in ("list", "verify"):
        assert main(["chunkio", command, str(tmp_path / "junk")]) == 4
    assert "is no ChunkIO log" in capsys.readouterr().err


def test_a_remote_log_is_read_in_few_requests():
    writer = LogWriter()
    log = b"".join(writer.entry(bytes(16), bytes([number % 256]) * 50_000) for number in range(400))
    with serving(Site(log)) as site:
        assert main(["chunkio", "list", site.url]) == 0
        assert len(site.requests) <= 8  # 20 MB, twice
        site.requests.clear()
        assert main(["chunkio", "cat", site.url, "50056"]) == 0
        assert len(site.requests) == 2
