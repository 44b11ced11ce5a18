"""CAF conformance: reproduces and reads the real writers' files, and refuses hostile ones."""

import hashlib
import json
from pathlib import Path

import pytest

from caf_pipeline.caf.archive import CafReader, CafWriter
from caf_pipeline.errors import MalformedArchive
from caf_pipeline_tests.support.memory_ranges import MemoryRanges

VECTORS = Path(__file__).parents[1] / "vectors" / "caf"
CASES = {case["name"]: case for case in json.loads((VECTORS / "manifest.json").read_text())}
WRITTEN_BY_GO = [name for name in CASES if name.startswith("go_")]
WRITTEN = [name for name in CASES if name.startswith(("go_", "ts_"))]

# Strict and lenient result: the members as {key: body}, or None if the archive is refused.
A = {"a": b"0123"}
REFUSED = (None, None)
ANSWERS = {
    "x_key_order": (A, A),
    "x_unknown_fields": (A, A),
    "x_dup_file_key": (None, {"a": b"56"}),
    "x_dup_file_key_partial": REFUSED,
    "x_dup_files_object": REFUSED,
    "x_overlap": ({"a": b"012345", "b": b"456789", "c": b"456789"},) * 2,
    "x_start_past_eof_empty": REFUSED,
    "x_negative_start": REFUSED,
    "x_missing_start": REFUSED,
    "x_entry_null": REFUSED,
    "x_entry_array": REFUSED,
    "x_huge_end_2_40": REFUSED,
    "x_end_2_63": REFUSED,
    "x_end_max": REFUSED,
    "x_min_max": REFUSED,
    "x_version_number": REFUSED,
    "x_files_missing": REFUSED,
    "x_files_null": REFUSED,
    "x_files_array": REFUSED,
    "x_top_array": REFUSED,
    "x_nul_after_json": REFUSED,
    "x_bom": REFUSED,
    "x_invalid_utf8_key": (None, {"k\ufffd": b"0123"}),
    "x_lone_surrogate_escape": (None, {"\ufffd": b"0123"}),
    "x_raw_newline_in_key": REFUSED,
    "x_nul_key": ({"a\0b": b"0123"},) * 2,
    "x_index_size_0": REFUSED,
    "x_index_size_1_less": REFUSED,
    "x_index_size_exact_file": ({"a": b""},) * 2,
    "x_index_size_past_start": REFUSED,
    "x_footer_truncated_1": REFUSED,
    "x_appended_byte": REFUSED,
    "x_3_bytes": REFUSED,
}


def content(name: str) -> bytes:
    return (VECTORS / CASES[name]["file"]).read_bytes()


def members(name: str, *, lenient: bool) -> dict[str, bytes] | None:
    try:
        reader = CafReader.open(MemoryRanges(content(name)), lenient=lenient)
    except MalformedArchive:
        return None
    return {member.key: reader.read(member.key) for member in reader.members}


def test_every_vector_has_an_answer():
    assert set(ANSWERS) | set(WRITTEN) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_file_is_the_one_that_the_manifest_names(name):
    assert hashlib.sha256(content(name)).hexdigest() == CASES[name]["sha256"]


@pytest.mark.parametrize("name", WRITTEN_BY_GO)
def test_our_writer_writes_what_gocaf_writes(name, tmp_path):
    expected, position = content(name), 0
    with CafWriter(tmp_path / "ours.caf") as writer:
        for added in CASES[name]["added"]:
            body = expected[
                position : position + added["size"]
            ]  # bodies are in the order of adding
            assert hashlib.sha256(body).hexdigest() == added["sha256"]
            writer.add(bytes.fromhex(added["key_hex"]).decode(), added["size"], [body])
            position += added["size"]
        assert writer.size_bytes == len(expected)
        writer.seal()
        writer.publish()
    assert (tmp_path / "ours.caf").read_bytes() == expected


@pytest.mark.parametrize("name", WRITTEN)
def test_our_reader_reads_what_real_writers_wrote(name):
    expected = {
        bytes.fromhex(file["key_hex"]).decode(): file for file in CASES[name]["gocaf"]["files"]
    }
    reader = CafReader.open(MemoryRanges(content(name)))
    assert {member.key: (member.start_byte, member.end_byte) for member in reader.members} == {
        key: (file["start"], file["end"]) for key, file in expected.items()
    }
    for key, file in expected.items():
        if "data_hex" in file:
            assert reader.read(key).hex() == file["data_hex"]


@pytest.mark.parametrize("name", ANSWERS)
def test_crafted_files_get_the_settled_answer(name):
    strict, lenient = ANSWERS[name]
    assert members(name, lenient=False) == strict
    assert members(name, lenient=True) == lenient
