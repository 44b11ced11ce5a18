"""Files of other formats than the present ones are refused, and stay as they are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow.parquet as pq
import pytest

from caf_pipeline.errors import CafError, IntegrityError, MalformedArchive
from caf_pipeline.inventory.manifest import (
    CHUNK_FORMAT,
    METADATA_KEY,
    ManifestWriter,
    head_bytes,
    open_manifest,
)
from caf_pipeline.inventory.plan import CHUNKS_FILE, read_chunk_objects, read_terms
from caf_pipeline.inventory.snapshot import SNAPSHOT_SCHEMA, read_snapshot
from caf_pipeline.packing.journal.format import JOURNAL_FORMAT, Journal
from caf_pipeline.retrieval.remote_chunk import read_head
from caf_pipeline.system.parquet import WholeParquet
from caf_pipeline_tests.support.journaled_packing import IDENTITY, Packing, a_source
from caf_pipeline_tests.support.plans import MOMENT, an_object, plan_of, with_terms
from caf_pipeline_tests.support.snapshots import write_snapshot

OTHERS = [*(f"caf-pipeline/{number}" for number in (1, 2, 3, 4, 5, 7)), "other/1", None]


class File(NamedTuple):
    """A file of another format; `read` raises `error`, which names what `names` says."""

    path: Path
    read: Callable[[], object]
    error: type[CafError]
    names: str


class HeadOnly:
    """A stored chunk of which only the head is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, start_byte: int, end_byte: int) -> bytes:
        return self.path.read_bytes()[start_byte:end_byte]


def head(folder: Path, other: str | None) -> File:
    path = folder / "head"
    path.write_bytes(
        head_bytes(IDENTITY).replace(json.dumps(CHUNK_FORMAT).encode(), json.dumps(other).encode())
    )
    return File(path, lambda: read_head(HeadOnly(path), 1 << 20), MalformedArchive, repr(other))


def manifest(folder: Path, other: str | None) -> File:
    path = folder / "manifest"
    with ManifestWriter(path, IDENTITY):
        pass
    table = pq.read_table(path)
    described = json.loads(table.schema.metadata[METADATA_KEY]) | {"format": other}
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: json.dumps(described)}), path)
    return File(path, lambda: open_manifest(path), MalformedArchive, repr(other))


def plan(folder: Path, other: str | None) -> File:
    plan_of(folder / "plan", [an_object("a")], target_size_bytes=1 << 20)
    with_terms(folder / "plan", format=other)
    return File(
        folder / "plan" / CHUNKS_FILE, lambda: read_terms(folder / "plan"), CafError, repr(other)
    )


def plan_without_sums(folder: Path, _: str | None) -> File:
    plan_of(folder / "plan", [an_object("a")], target_size_bytes=1 << 20)
    (folder / "plan" / "SHA256SUMS").unlink()
    return File(
        folder / "plan" / CHUNKS_FILE,
        lambda: list(read_chunk_objects(folder / "plan", 1)),
        CafError,
        "SHA256SUMS",
    )


def snapshot(folder: Path, without: str | None) -> File:
    """A snapshot that lacks a fact, or without any the columns of versions."""
    path = write_snapshot(folder / "s.parquet", []).path
    described = json.loads(pq.read_metadata(path).metadata[b"caf.snapshot"])
    schema = SNAPSHOT_SCHEMA
    if without:
        del described[without]
    else:
        schema = schema.remove(schema.get_field_index("is_latest"))
    file = WholeParquet(path, schema)
    file.close({"caf.snapshot": json.dumps(described)})
    file.publish()
    return File(path, lambda: read_snapshot(path), IntegrityError, "s.parquet")


CASES = [
    *((make, other) for make in (head, manifest, plan) for other in OTHERS),
    (plan_without_sums, None),
    *(
        (snapshot, without)
        for without in (None, "taken_at", "run", "address", "all_versions", "beside")
    ),
]


@pytest.mark.parametrize(("make", "other"), CASES)
def test_a_file_of_another_format_is_refused_unaltered(tmp_path, make, other):
    file = make(tmp_path, other)
    before = file.path.read_bytes()
    with pytest.raises(file.error) as refused:
        file.read()
    assert file.names in str(refused.value)
    assert refused.value.hint
    assert "\n" not in f"{refused.value}{refused.value.hint}"
    assert file.path.read_bytes() == before


@pytest.mark.parametrize("other", [1, 2, 3, 4, JOURNAL_FORMAT + 1])
def test_a_journal_of_another_format_is_not_believed(tmp_path, other):
    packing = Packing(tmp_path / "packing", a_source())
    opening = packing.packer().opening
    path = tmp_path / "other.journal"
    journal = Journal.open(path, opening)
    journal.append(msgspec.structs.replace(opening, journal_format=other))
    before = path.read_bytes()
    assert list(journal.checkpoints()) == []
    assert "journal format" in journal.broken
    assert path.read_bytes() == before
    journal.close()


def test_the_present_format_is_read_back(tmp_path):
    whole = {
        "member": "w",
        "key": "w",
        "version_id": None,
        "etag": "e",
        "size_bytes": 3,
        "start_byte": 512,
        "end_byte": 515,
    }
    whole |= {
        "sha256": bytes(32),
        "crc64nvme": bytes(8),
        "s3_checksum": "crc32:00000000",
        "storage_class": "STANDARD",
    }
    whole |= {"last_modified": MOMENT}
    again = whole | {"member": "x", "key": "x", "rewritten_at": MOMENT}
    part = whole | {
        "part": 1,
        "part_count": 2,
        "part_start_byte": 0,
        "part_end_byte": 3,
        "size_bytes": 6,
    }
    for name, rows in (("whole", [whole, again]), ("part", [part])):
        with ManifestWriter(tmp_path / name, IDENTITY) as writer:
            for row in rows:
                writer.add(dict(row))
    objects, of_part = open_manifest(tmp_path / "whole"), open_manifest(tmp_path / "part")
    assert [row["rewritten_at"] for batch in objects.locations() for row in batch.to_pylist()] == [
        None,
        MOMENT,
    ]
    assert objects.part() is None
    assert list(of_part.locations()) == []
    found = of_part.part()
    assert found is not None
    assert (found.object_bytes, found.part.number, found.part.count, found.part.end_byte) == (
        6,
        1,
        2,
        3,
    )
    assert [row["part"] for row in of_part.rows()] == [1]
