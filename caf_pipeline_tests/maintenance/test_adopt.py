"""Adopted CAF files of other programs: their members, and their chunks elsewhere."""

import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path

import pytest

from caf_pipeline.caf.archive import CafWriter
from caf_pipeline.caf.merkle import merkle_root
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import ArchiveError, IntegrityError, StoredAlready, StoreError
from caf_pipeline.inventory.adoption import RejectReason
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.objects import S3Object, is_supported
from caf_pipeline.ledger import import_chunk
from caf_pipeline.maintenance import rebuild
from caf_pipeline.maintenance.adopt import (
    TEMPORARY,
    AdoptionKind,
    AdoptionOptions,
    adopt_files,
    adopt_from_chain,
    chunk_of_root,
)
from caf_pipeline.maintenance.deletion.assessment import ChunkAssessor, ProgressReporter
from caf_pipeline.maintenance.deletion.deletable import Unsafe
from caf_pipeline.maintenance.doctor.examine import count_mismatch
from caf_pipeline.maintenance.repair import repair_chunk
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.records import posting_of
from caf_pipeline.steps import inventories, planning
from caf_pipeline.store.protocol import ChunkToStore
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.support.memory_log import MemoryLog
from caf_pipeline_tests.support.memory_ranges import caf_bytes
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import rows_of
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything, object_bytes
from caf_pipeline_tests.support.snapshots import damage_page
from caf_pipeline_tests.support.tiers import sampled

VECTORS = Path(__file__).parents[1] / "vectors" / "caf"
WRITTEN = [
    one
    for one in json.loads((VECTORS / "manifest.json").read_text())
    if one["name"].startswith(("go_", "ts_"))
]


class Bucket(MemorySource):
    """Objects whose ETags are the MD5 of their bytes, unless a test sets them."""

    def __init__(self, bodies, etags):
        super().__init__(bodies)
        self.etags = etags

    def object(self, key):
        found = super().object(key)
        md5 = hashlib.md5(self.bodies[key], usedforsecurity=False).hexdigest()
        return dataclasses.replace(found, etag=self.etags.get(key, md5))


@pytest.fixture
def open_context(tmp_path, ledger):
    """Return a function that opens the source on a bucket and takes an inventory."""

    def make(bodies, **etags):
        context = a_run_context(tmp_path, Bucket(dict(bodies), etags), ledger)
        inventories.take_inventory(context)
        return context

    return make


def write(path, members) -> Path:
    with CafWriter(path) as writer:
        for key, body in members.items():
            writer.add(key, len(body), [body])
        writer.seal()
        writer.publish()
    return path


def post(context, path, proof_type=3, archive_id="another program") -> Path:
    """Post a file as another program of the same owner does."""
    root = merkle_root(path, proof_type)
    chunk = ChunkToStore("anything", archive_id, path.stat().st_size, proof_type, root)
    context.store.put(context.store.post(chunk, MemoryLog()), path, lambda size: None)
    return path


def adopt(context, *paths, **options):
    return list(adopt_files(context, paths, AdoptionOptions(**options)))


@pytest.mark.parametrize("proof_type", [0, 3])
@pytest.mark.parametrize("vector", sampled(WRITTEN, every=3), ids=lambda one: one["name"])
def test_files_of_gocaf_and_the_worker_are_adopted(open_context, vector, proof_type):
    path = VECTORS / vector["file"]
    content = path.read_bytes()
    members = {
        bytes.fromhex(file["key_hex"]): content[file["start"] : file["end"]]
        for file in vector["gocaf"]["files"]
    }
    objects = {key.decode(): body for key, body in members.items() if is_supported(key)}
    context = open_context(objects)
    (done,) = adopt(context, post(context, path, proof_type))
    assert (done.kind, done.rows) == (
        (AdoptionKind.ADOPTED if objects else AdoptionKind.NO_OBJECT),
        len(objects),
    )
    assert (
        sum(done.left_out.values())
        == len(members) - len(objects)
        == done.left_out.get(RejectReason.UNSUPPORTED_KEY, 0)
    )
    for key, body in objects.items():
        assert object_bytes(context, key) == body
    assert all(
        row["sha256"] == hashlib.sha256(objects[row["file_path"]]).digest()
        for row in rows_of(context.ledger)["file_locations"]
    )


def test_adoption_inventory_outlives_later_inventories(open_context, tmp_path):
    context = open_context({"a": b"1", "b": b"2"})
    files = [
        post(context, write(tmp_path / key, {key: body}))
        for key, body in (("a", b"1"), ("b", b"2"))
    ]
    with contextlib.closing(adopt_files(context, files, AdoptionOptions())) as adopting:
        assert next(adopting).rows == 1
        for _ in range(inventories.WHOLE_KEPT):
            inventories.take_inventory(context, to_plan=False)
        assert next(adopting).rows == 1


@pytest.mark.thorough
def test_excluded_members_have_reasons_and_are_planned(open_context, tmp_path):
    members = {
        name: name.encode() * 9
        for name in ("same", "gone", "flipped", "longer", "parts", "ours", "n" * 1025)
    }
    bodies = {key: members[key] for key in ("same", "longer", "parts")} | {
        "flipped": members["flipped"][::-1],
        "other": b"1",
    }
    md5 = hashlib.md5(members["longer"], usedforsecurity=False).hexdigest()
    bodies["longer"] += b"!"  # with the ETag of the member, but another size
    context = open_context({"ours": members["ours"]})
    archive_everything(context)
    context.objects.bodies |= bodies
    context.objects.etags = {"longer": md5, "parts": "0123456789abcdef0123456789abcdef-2"}
    inventories.take_inventory(context)
    reasons = {}
    (done,) = adopt(
        context, post(context, write(tmp_path / "a.caf", members)), on_left_out=reasons.__setitem__
    )
    assert (done.kind, done.members, done.rows) == (AdoptionKind.ADOPTED, 7, 1)
    assert reasons == {
        "gone": "not_in_inventory",
        "flipped": "other_content",
        "longer": "other_size",
        "parts": "not_comparable",
        "ours": "archived_already",
        "n" * 1025: "unsupported_key",
    }
    assert done.left_out == dict.fromkeys(reasons.values(), 1)
    archive_everything(context)
    located = {row["file_path"]: row["chunk"] for row in rows_of(context.ledger)["file_locations"]}
    assert set(located) == {"ours", *bodies}
    assert [key for key, chunk in located.items() if chunk == done.chunk] == ["same"]
    assert all(object_bytes(context, key) == body for key, body in context.objects.bodies.items())


def test_an_inventory_that_is_damaged_adopts_nothing(open_context, tmp_path):
    context = open_context({"a": b"one"})
    file = post(context, write(tmp_path / "a.caf", {"a": b"one"}))
    snapshot = inventories.latest_snapshot(context, complete=True)
    damage_page(snapshot.path, "etag")
    with pytest.raises(IntegrityError, match="cannot be read"):
        adopt(context, file)
    assert not rows_of(context.ledger)["file_locations"]


def test_object_in_two_files_is_adopted_once(open_context, tmp_path):
    members = {f"key-{number}": os.urandom(500) for number in range(4)}
    context = open_context(members)
    first = post(
        context, write(tmp_path / "1.caf", {key: members[key] for key in ("key-0", "key-1")})
    )
    second = post(
        context, write(tmp_path / "2.caf", {key: members[key] for key in ("key-1", "key-2")})
    )
    third = post(context, write(tmp_path / "3.caf", {"key-1": members["key-1"]}))
    dry = adopt(context, first, second, dry_run=True)
    assert [(result.kind, result.rows) for result in dry] == [("would_adopt", 2)] * 2
    assert context.ledger.chunks.list() == []
    done = adopt(context, first, second, third)
    assert [(result.kind, result.rows) for result in done] == [
        ("adopted", 2),
        ("adopted", 1),
        ("nothing_new", 0),
    ]
    assert [result.chunk for result in done[:2]] == [
        str(chunk_of_root("src", merkle_root(one, 3))[0]) for one in (first, second)
    ]
    before = rows_of(context.ledger)
    assert [result.kind for result in adopt(context, first, second, third)] == [
        "known",
        "known",
        "nothing_new",
    ]
    assert [result.kind for result in adopt_from_chain(context, AdoptionOptions())].count(
        "known"
    ) == 2
    assert rows_of(context.ledger) == before
    assert [result for result in rebuild.rebuild(context) if not result.complete] == []
    assert not list(context.staging().glob(f"{TEMPORARY}*"))


def test_parts_of_keys_that_the_worker_adds_are_left_out(open_context, tmp_path):
    context = open_context({"a/b": b"1", "c": b"2"})
    path = post(
        context,
        write(
            tmp_path / "batch.caf",
            {"task-1/a/b": b"1", "task-2/a/b": b"1", "task-2/c": b"2", "c": b"2"},
        ),
    )
    (done,) = adopt(context, path, strip=1)
    assert (done.rows, done.left_out) == (
        2,
        {RejectReason.REPEATED: 1, RejectReason.UNSUPPORTED_KEY: 1},
    )
    assert (object_bytes(context, "a/b"), object_bytes(context, "c")) == (b"1", b"2")


def test_lost_ledger_with_adopted_files_asks_the_store_first(open_context, tmp_path):
    context = open_context({"a": b"1", "b": b"2"})
    adopt(context, post(context, write(tmp_path / "a.caf", {"a": b"1"})))
    packed = write(tmp_path / "packed.caf", {"b": b"2"})
    post(context, packed, archive_id=context.archive_id)
    with pytest.raises(StoredAlready, match="'src'"):
        planning.cut_plan(context, inventories.latest_snapshot(context))


def test_members_that_share_bytes_are_excluded(open_context, tmp_path):
    index = (
        b'{"format_version":"1.0","files":{"a":{"start_byte":0,"end_byte":3},'
        b'"b":{"start_byte":2,"end_byte":4}}}'
    )
    path = tmp_path / "a.caf"
    path.write_bytes(b"1234" + index + len(index).to_bytes(4, "little"))
    context = open_context({"a": b"123", "b": b"34"})
    (done,) = adopt(context, post(context, path))
    assert (done.rows, done.left_out) == (1, {RejectReason.OVERLAPPING: 1})


def test_duplicate_key_in_an_index_is_reported(open_context, tmp_path):
    context = open_context({"a": b"12", "b": b"3"})
    twice = (
        b'{"format_version":"1.0","files":{"a":{"start_byte":2,"end_byte":3},'
        b'"b":{"start_byte":2,"end_byte":3},"a":'
    )
    (tmp_path / "twice.caf").write_bytes(
        caf_bytes(b"123", twice + b'{"start_byte":0,"end_byte":2}}}')
    )
    path = post(context, tmp_path / "twice.caf")
    for done in (adopt(context, path), adopt_from_chain(context, AdoptionOptions())):
        assert ["twice" in str(result.error) for result in done] == [True]
    assert [result.rows for result in adopt_from_chain(context, AdoptionOptions(lenient=True))] == [
        2
    ]
    assert (object_bytes(context, "a"), object_bytes(context, "b")) == (b"12", b"3")


def test_foreign_or_invalid_file_is_refused_without_changes(open_context, tmp_path):
    context = open_context({"a": b"1"})
    path = write(tmp_path / "a.caf", {"a": b"1"})
    (missing,) = adopt(context, path)
    assert isinstance(missing.error, StoreError)
    assert str(path) in str(missing.error)
    post(context, path)
    flipped = tmp_path / "flipped.caf"
    flipped.write_bytes(b"2" + path.read_bytes()[1:])
    cut = tmp_path / "cut.caf"
    cut.write_bytes(path.read_bytes()[:-1])
    done = adopt(context, flipped, cut, tmp_path / "none.caf")
    assert {result.kind for result in done} == {AdoptionKind.REFUSED}
    assert [isinstance(result.error, ArchiveError) for result in done] == [False, True, True]
    crafted = sorted(VECTORS.glob("x_*.caf"))
    assert {result.kind for result in adopt(context, *crafted)} == {AdoptionKind.REFUSED}
    corrupt(
        context.store._chunk_path(next(iter(context.store.posted_as(merkle_root(path, 3)))).posting)
    )
    (wrong,) = adopt(context, path)
    assert "0 of 1 copy" in str(wrong.error)
    (lied,) = adopt_from_chain(context, AdoptionOptions())
    assert isinstance(lied.error, IntegrityError)
    assert context.ledger.chunks.list() == []


def test_failed_adoption_leaves_nothing_and_can_be_repeated(open_context, tmp_path, monkeypatch):
    context = open_context({"a": b"1"})
    path = post(context, write(tmp_path / "a.caf", {"a": b"1"}))
    empty = rows_of(context.ledger)

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(import_chunk, "record_verified", die)
        with pytest.raises(KeyboardInterrupt):
            adopt(context, path)
    assert rows_of(context.ledger) == empty
    assert [result.kind for result in adopt_from_chain(context, AdoptionOptions())] == ["adopted"]


def test_adopted_chunk_is_never_safe_but_proven_and_repaired(open_context, tmp_path):
    context = open_context({"a": b"1" * 50_000, "b": b"2"})
    (done,) = adopt(
        context, post(context, write(tmp_path / "a.caf", {"a": b"1" * 50_000, "c": b"2"}))
    )
    (chunk,) = context.ledger.chunks.list()
    assert chunk.adopted
    assert prove_chunk(context, done.chunk).explanation == ""
    assert repair_chunk(context, done.chunk).origin == "none needed"
    assert [count_mismatch(rows) for rows in context.ledger.stray_rows.by_chunk("src")] == [None]
    assert context.ledger.lookup.locate("src", "a").row.header_set is None
    folder = tmp_path / "deletion"
    folder.mkdir()
    with context.lease("deletion/src") as lease:
        assessor = ChunkAssessor(context, lease, folder, ProgressReporter())
        assert assessor.read_back_all() == (0, 0)
        ((_, assessment),) = assessor.assess().values()
    assert assessment.reason is Unsafe.ADOPTED
    corrupt(context.store._chunk_path(posting_of(chunk)))
    assert prove_chunk(context, done.chunk).chunk.state is ChunkState.DAMAGED
    with pytest.raises(StoreError, match=done.chunk):
        repair_chunk(context, done.chunk)


def test_rewritten_adopted_object_is_archived_with_headers(open_context, tmp_path):
    context = open_context({"a": b"1"})
    adopt(context, post(context, write(tmp_path / "a.caf", {"a": b"1"})))
    later = dataclasses.replace(
        context.objects.object("a"),
        last_modified=context.objects.object("a").last_modified.replace(year=2027),
    )

    def again(key) -> S3Object:
        return later

    context.objects.object = again
    context.objects.headers["a"] = ObjectHeaders("text/plain")
    (name,) = archive_everything(context)
    rows = rows_of(context.ledger)["file_locations"]
    assert {row["chunk"] for row in rows} == {
        name,
        *(chunk.name for chunk in context.ledger.chunks.list() if chunk.adopted),
    }
    assert object_bytes(context, "a") == b"1"
