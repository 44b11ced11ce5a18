"""A lost ledger rebuilt from the store: its rows, and foreign files beside our chunks."""

import dataclasses
import json
import os
import shutil
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import CafError, HeldByOther, StoredAlready
from caf_pipeline.inventory.objects import S3Object, SkipReason
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.maintenance import rebuild
from caf_pipeline.maintenance.rebuild import FileKind
from caf_pipeline.maintenance.repair import repair_chunk
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.run_context import Lazy
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.store.directory import MARKER
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.support.forged_chunks import Forgery, a_row, a_skip, accepts, put
from caf_pipeline_tests.support.ledger_rows import ODD_KEYS, holder
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import make_ledger, rows_of
from caf_pipeline_tests.support.plans import MOMENT
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    account_for_plan,
    archive_everything,
    object_bytes,
    plan,
)
from caf_pipeline_tests.support.several_folders import SeveralFolders

RESTORED = (
    "sources",
    "plans",
    "chunks",
    "replicas",
    "file_locations",
    "skipped_objects",
    "claims",
    "log_times",
)


class Versions(MemorySource):
    """A source with versions: `key@2` is version 2 of `key`."""

    def objects(self):
        found = [self.object(name) for name in self.bodies]
        return sorted(found, key=lambda obj: (obj.key, obj.last_modified))

    def object(self, name):
        key, _, number = name.partition("@")
        obj = super().object(name)
        version = number or None
        later = MOMENT + timedelta(hours=int(number or 0))
        return S3Object(key.encode(), version, obj.etag, obj.size_bytes, later)

    def read(self, obj, start_byte, end_byte):
        name = obj.key.decode() + (f"@{obj.version_id}" if obj.version_id else "")
        return super().read(dataclasses.replace(obj, key=name.encode()), start_byte, end_byte)


def a_source():
    bodies = {f"key-{number:02d}": os.urandom(60_000) for number in range(30)}
    bodies |= {key: key.encode() * 5 for key in ODD_KEYS} | {
        "empty": b"",
        "a/": b"",
        ".caf/chunk": b"x",
        ".caf/chunk~": b"y",
    }
    bodies |= {"versions@1": b"one", "versions@2": b"two"}
    log = (Path(__file__).parents[1] / "vectors" / "clps" / "two_files_0.12.1b0.clps").read_bytes()
    bodies |= {"log": log, "log-damaged": log[:100]}
    unavailable = {"key-07": (SkipReason.COLD_STORAGE, 0), "key-21": (SkipReason.DELETED, 0)}
    return Versions(bodies, unavailable=unavailable)


@pytest.fixture(scope="module")
def origin(tmp_path_factory, databases):
    """Return a run context with chunks of two plans, which no test changes."""
    folder = tmp_path_factory.mktemp("origin")
    with ExitStack() as stack:
        ledger = make_ledger(stack, databases)
        store = SeveralFolders(folder / "store")
        context = a_run_context(folder / "first", a_source(), ledger, store=store, target="512KiB")
        archive_everything(context)
        context.objects.bodies |= {"versions@3": b"three", "later": os.urandom(1000)}
        archive_everything(context)
        yield context


@pytest.fixture
def archived(origin, tmp_path):
    """Return the same with a store that tests may damage."""
    kept = origin.store
    shutil.copytree(kept.folders["anna"].folder.parent, tmp_path / "store")
    store = SeveralFolders(tmp_path / "store")
    store.posts, store.noted = dict(kept.posts), dict(kept.noted)
    return dataclasses.replace(origin, lazy_store=Lazy.of(store))


@pytest.fixture
def lost(archived, ledger, tmp_path):
    """Return the same source and store with an empty ledger."""
    return a_run_context(
        tmp_path / "second", archived.objects, ledger, store=archived.store, target="512KiB"
    )


def kinds(outcomes):
    return [outcome.finding.kind for outcome in outcomes]


@pytest.mark.thorough
def test_a_rebuilt_ledger_has_the_rows_of_the_lost_one(archived, lost):
    outcomes = list(rebuild.rebuild(lost))
    assert set(kinds(outcomes)) == {FileKind.CHUNK}
    before, after = rows_of(archived.ledger), rows_of(lost.ledger)
    assert len(before["chunks"]) > 3
    assert len(before["skipped_objects"]) == 2
    assert [one["first_ms"] for one in before["log_times"]] == [1_700_000_000_000, None]
    for name in RESTORED:
        assert after[name] == before[name], name
    assert sum(outcome.rows for outcome in outcomes) == len(after["file_locations"])


def test_a_rebuilt_ledger_reads_all_and_plans_nothing_again(archived, lost):
    list(rebuild.rebuild(lost))
    assert list(lost.staging().iterdir()) == []
    everything_reads_back(lost)
    assert object_bytes(lost, "versions", "1") == b"one"
    report = plan(lost)
    assert list(report.chunks) == []
    found = account_for_plan(lost, report)
    assert (found.unaccounted, found.claimed) == (0, 0)


def newest(context):
    """Return the last body of each key."""
    found = {}
    for obj in context.objects.objects():
        name = obj.key.decode() + (f"@{obj.version_id}" if obj.version_id else "")
        if name not in context.objects.unavailable:
            found[obj.key.decode()] = context.objects.bodies[name]
    return found


def everything_reads_back(context):
    for key, body in newest(context).items():
        assert object_bytes(context, key) == body, key


def test_the_order_in_which_chunks_are_restored_changes_nothing(archived, lost):
    lost.ledger.sources.restore_archive_id("src", archived.archive_id)
    for finding in reversed(list(rebuild.find_chunks(lost, ask=accepts))):
        assert finding.spool is not None
        assert not finding.spool.exists()
        rebuild.import_found_chunk(lost, finding)
    assert rows_of(lost.ledger) == rows_of(archived.ledger)


def test_a_rebuild_that_is_ended_is_gone_on_with(archived, lost):
    for outcomes in range(1, 3):
        run = rebuild.rebuild(lost)
        for _ in range(outcomes):
            next(run)
        run.close()
    done = list(rebuild.rebuild(lost))
    assert kinds(done).count(FileKind.KNOWN) == 2
    assert rows_of(lost.ledger) == rows_of(archived.ledger)
    assert set(kinds(rebuild.rebuild(lost))) == {FileKind.KNOWN}


def test_a_dry_run_tells_and_writes_nothing(archived, lost):
    outcomes = list(rebuild.rebuild(lost, dry_run=True))
    assert {outcome.finding.name for outcome in outcomes} == {
        chunk.name for chunk in archived.ledger.chunks.list()
    }
    assert [outcome.rows for outcome in outcomes] == [None] * len(outcomes)
    assert lost.ledger.chunks.list() == []


def test_known_chunks_stay_unchanged(archived, lost):
    list(rebuild.rebuild(lost))
    name = lost.ledger.chunks.list()[0].name
    with lost.ledger.leases.hold(f"chunk/{name}", holder()) as lease:
        lost.ledger.moves.move(lease, name, ChunkState.LOCATED, ChunkState.DAMAGED, reason="a test")
    before = rows_of(lost.ledger)
    assert set(kinds(rebuild.rebuild(lost))) == {FileKind.KNOWN}
    assert rows_of(lost.ledger) == before


def test_nothing_is_rebuilt_while_a_plan_is_cut(lost, database):
    quick = Ledger(database, lease_seconds=1.5)
    with quick.leases.hold("plan/src", holder("run-2")), pytest.raises(HeldByOther):
        list(rebuild.rebuild(dataclasses.replace(lost, lazy_ledger=Lazy.of(quick))))


# --- several archives
# ------------------------------------------------------------------------------------


def test_archive_of_another_source_is_opened_by_one_head(lost, tmp_path, monkeypatch):
    posting = put(lost.store, Forgery("a" * 32, source="other").write(tmp_path / "x"), "a" * 32)
    put(lost.store, Forgery("a" * 32, source="other", number=2).write(tmp_path / "y"), "a" * 32)
    reads, read = [], lost.store.read

    def counted(posting, start_byte, end_byte, *, provider=None):
        reads.append((posting.merkle_root, start_byte, end_byte))
        return read(posting, start_byte, end_byte, provider=provider)

    monkeypatch.setattr(lost.store, "read", counted)
    known: dict[str, str] = {}
    list(rebuild.rebuild(lost, sources=known))
    assert known["a" * 32] == "other"
    of_other = [entry for entry in reads if entry[0] not in archived_roots(lost)]
    assert len(of_other) == 3
    assert {(start, end) for _, start, end in of_other} == {(0, 512)}
    assert posting.merkle_root not in {root for root, _, _ in of_other}


def archived_roots(context):
    return {chunk.merkle_root for chunk in context.ledger.chunks.list()}


def test_all_archives_of_the_source_are_restored(bare, tmp_path):
    for number, archive_id in enumerate(["b" * 32, "a" * 32], 1):
        forged = Forgery(archive_id, {f"key-{number}": b"1"}, plan=f"0000000{number}")
        put(bare.store, forged.write(tmp_path / str(number)), archive_id)
    assert kinds(rebuild.rebuild(bare)) == [FileKind.CHUNK] * 2
    assert bare.ledger.sources.archive_id("src") == "a" * 32  # the newest
    assert {chunk.archive_id for chunk in bare.ledger.chunks.list()} == {"a" * 32, "b" * 32}
    before = rows_of(bare.ledger)
    assert kinds(rebuild.rebuild(bare)) == [FileKind.KNOWN] * 2
    assert rows_of(bare.ledger) == before


def test_undecided_archive_stops_plans_until_it_is_read(bare, tmp_path):
    posting = put(bare.store, Forgery("a" * 32).write(tmp_path / "x"), "a" * 32, upload=False)
    (outcome,) = rebuild.rebuild(bare)
    assert (outcome.finding.kind, outcome.complete) == (FileKind.UNDECIDED, False)
    assert "a" * 32 in outcome.finding.why
    with pytest.raises(StoredAlready):
        planning.cut_plan(bare, inventories.take_inventory(bare))
    bare.store.put(posting, tmp_path / "x", lambda size: None)
    (outcome,) = rebuild.rebuild(bare)
    assert (outcome.finding.kind, outcome.complete) == (FileKind.CHUNK, True)


def test_lost_chunk_does_not_hide_the_source_of_its_archive(bare, tmp_path):
    put(bare.store, Forgery("a" * 32).write(tmp_path / "x"), "a" * 32)
    put(bare.store, Forgery("a" * 32, number=2).write(tmp_path / "y"), "a" * 32, upload=False)
    assert sorted(kinds(rebuild.rebuild(bare))) == [FileKind.CHUNK, FileKind.NOT_UPLOADED]


def test_archive_that_was_set_aside_is_not_restored(bare, tmp_path):
    put(bare.store, Forgery("a" * 32).write(tmp_path / "x"), "a" * 32)
    planning.cut_plan(bare, inventories.take_inventory(bare), new_archive=True)
    assert list(rebuild.rebuild(bare)) == []


# --- copies
# ------------------------------------------------------------------------------------------


def a_posting(context):
    return next(iter(context.store.posts.values()))


def test_chunk_with_too_few_copies_is_restored_as_damaged(archived, lost):
    posting = a_posting(archived)
    lost.store.file("carl", posting).unlink()
    outcomes = [outcome for outcome in rebuild.rebuild(lost) if outcome.fault]
    assert [outcome.fault[:7] for outcome in outcomes] == ["2 of 3 "]
    name = outcomes[0].finding.name
    assert lost.ledger.chunks.get(name).state is ChunkState.DAMAGED
    assert "2 of 3 copies" in lost.ledger.chunks.get(name).reason
    everything_reads_back(lost)
    assert repair_chunk(lost, name).chunk.state is ChunkState.LOCATED


def test_restored_chunks_are_proven_and_repaired_without_their_plan(archived, lost):
    list(rebuild.rebuild(lost))
    assert not list(lost.plans().iterdir())
    chunk = lost.ledger.chunks.list()[0]
    assert prove_chunk(lost, chunk.name, whole=True).proven
    for provider in lost.store.folders:
        lost.store.file(provider, chunk_steps.posting_of(chunk)).unlink()
    assert not prove_chunk(lost, chunk.name).proven
    with pytest.raises(CafError, match="plan's file"):
        repair_chunk(lost, chunk.name)


def test_restored_chunk_is_packed_again_from_its_plan(archived, ledger):
    home = archived.settings.home.parent
    again = a_run_context(home, archived.objects, ledger, store=archived.store, target="512KiB")
    list(rebuild.rebuild(again))
    chunk = again.ledger.chunks.list()[0]
    for provider in again.store.folders:
        again.store.file(provider, chunk_steps.posting_of(chunk)).unlink()
    assert not prove_chunk(again, chunk.name).proven
    assert repair_chunk(again, chunk.name).origin == "source"


def test_silent_copy_is_reported_as_not_compared(archived, lost):
    lost.store.away.add("bert")
    for outcome in rebuild.rebuild(lost):
        assert outcome.finding.chunk.read_from == ("anna", "carl")
        assert "bert is away" in outcome.finding.chunk.silent["bert"]
    assert rows_of(lost.ledger)["file_locations"] == rows_of(archived.ledger)["file_locations"]


def test_unreadable_chunk_is_restored_by_the_next_rebuild(archived, lost):
    lost.store.away |= {"anna", "bert", "carl"}
    outcomes = list(rebuild.rebuild(lost))
    assert set(kinds(outcomes)) == {FileKind.UNDECIDED}
    assert not any(outcome.complete for outcome in outcomes)
    assert "carl is away" in outcomes[0].finding.why
    lost.store.away.clear()
    list(rebuild.rebuild(lost))
    assert rows_of(lost.ledger) == rows_of(archived.ledger)


@pytest.mark.thorough
@pytest.mark.parametrize("at", [100, -2, -1000])
def test_differing_copies_are_refused_and_named(archived, lost, at):
    posting = a_posting(archived)
    file = lost.store.file("bert", posting)
    corrupt(file, at if at > 0 else file.stat().st_size + at)
    (refused,) = [
        result.finding
        for result in rebuild.rebuild(lost)
        if result.finding.kind is not FileKind.CHUNK
    ]
    assert refused.kind is FileKind.DIFFERING
    assert all(name in refused.why for name in ("anna", "bert", "carl"))
    assert refused.file.posting == posting
    chunks = {row["chunk"] for row in rows_of(lost.ledger)["file_locations"]}
    assert len(chunks) == len(archived.ledger.chunks.list()) - 1
    (damaged,) = [
        result
        for result in rebuild.rebuild(lost, whole=True)
        if result.finding.kind is not FileKind.KNOWN
    ]
    assert "bert: " in damaged.fault
    assert damaged.finding.chunk.read_from == ("anna", "carl")
    assert rows_of(lost.ledger)["file_locations"] == rows_of(archived.ledger)["file_locations"]
    assert repair_chunk(lost, damaged.finding.name).chunk.state is ChunkState.LOCATED


def test_copies_without_the_root_are_never_trusted(archived, lost):
    posting = a_posting(archived)
    for number, provider in enumerate(lost.store.folders):
        file = lost.store.file(provider, posting)
        corrupt(file, file.stat().st_size - 1000 - number)
    (refused,) = [
        result.finding
        for result in rebuild.rebuild(lost, whole=True)
        if result.finding.kind is not FileKind.CHUNK
    ]
    assert refused.kind is not FileKind.KNOWN
    assert refused.file.posting == posting
    assert len(lost.ledger.chunks.list()) == len(archived.ledger.chunks.list()) - 1


def test_copy_with_a_wrong_object_makes_the_chunk_damaged(archived, lost):
    posting = a_posting(archived)
    (chunk,) = [
        one for one in archived.ledger.chunks.list() if one.merkle_root == posting.merkle_root
    ]
    sample = next(one for one in archived.ledger.chunks.get(chunk.name).samples if one.offset > 512)
    corrupt(lost.store.file("bert", posting), sample.offset + 7)
    (outcome,) = [result for result in rebuild.rebuild(lost) if result.fault]
    assert "2 of 3 copies" in outcome.fault
    assert "bert" in outcome.fault
    restored = lost.ledger.chunks.get(chunk.name)
    assert (restored.state, restored.samples) == (
        ChunkState.DAMAGED,
        archived.ledger.chunks.get(chunk.name).samples,
    )
    report = repair_chunk(lost, chunk.name)
    assert (report.chunk.state, report.origin, len(report.copies)) == (
        ChunkState.LOCATED,
        "provider",
        3,
    )


# --- files that are not our chunks
# ----------------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path, ledger):
    """Return a run context without archived objects."""
    return a_run_context(
        tmp_path, a_source(), ledger, store=SeveralFolders(tmp_path / "store"), target="512KiB"
    )


def found(context):
    """Return the only outcome of a rebuild, and the number of rows afterwards."""
    (outcome,) = rebuild.rebuild(context)
    return outcome, len(rows_of(context.ledger)["file_locations"])


def test_a_chunk_made_by_hand_as_ours_are_is_restored(bare, tmp_path):
    forged = Forgery(bare.archive_id, skipped=[a_skip("c")])
    posting = put(bare.store, forged.write(tmp_path / "x"), bare.archive_id)
    outcome, rows = found(bare)
    assert (outcome.finding.kind, outcome.rows, rows) == (FileKind.CHUNK, 2, 2)
    chunk = bare.ledger.chunks.get(forged.name)
    assert (chunk.state, chunk.start, chunk.member_count, chunk.skipped_count) == (
        ChunkState.LOCATED,
        posting.start,
        2,
        1,
    )
    assert (chunk.object_count, chunk.released_count, chunk.number) == (3, 0, 1)
    assert bare.ledger.plans.is_name_taken("src", forged.plan)


def test_manifest_restores_planned_and_postponed_objects(bare, tmp_path):
    told = {
        "plan_sha256": bytes.fromhex("0a0b0c0d") + b"x" * 28,
        "planned_objects": 5,
        "planned_bytes": 99,
    }
    put(bare.store, Forgery(bare.archive_id, described=told).write(tmp_path / "x"), bare.archive_id)
    outcome, _ = found(bare)
    chunk = bare.ledger.chunks.get(outcome.finding.name)
    assert (chunk.object_count, chunk.object_bytes, chunk.released_count) == (5, 99, 3)
    assert bare.ledger.plans.find(told["plan_sha256"]).name == "0a0b0c0d"


def widened(path):
    table = pq.read_table(path)
    pq.write_table(table.append_column("more", table["key"]), path)


def one_group(path):
    table = pq.read_table(path)
    pq.write_table(table.take([0] * 5_000), path, row_group_size=5_000)


def bloated(path):
    """Write a text of 2 MB for each of 400 rows into a file of some KB."""
    table = pq.read_table(path)
    rows = table.take([0] * 400)
    keys = pa.DictionaryArray.from_arrays(pa.array([0] * 400), pa.array(["x" * 2_000_000]))
    place = table.schema.get_field_index("key")
    rows = rows.set_column(place, pa.field("key", keys.type, nullable=False), keys)
    described = pq.read_metadata(path).metadata
    # Its Arrow schema, which would reveal the dictionary, is not written.
    with pq.ParquetWriter(
        path, rows.schema.remove_metadata(), compression="zstd", store_schema=False
    ) as writer:
        writer.write_table(rows.replace_schema_metadata(None))
        writer.add_key_value_metadata(
            {name: text for name, text in described.items() if name != b"ARROW:schema"}
        )
    assert path.stat().st_size < 50_000


def of_format(path):
    table = pq.read_table(path)
    described = json.loads(table.schema.metadata[b"caf-pipeline"]) | {"format": "caf-pipeline/9"}
    pq.write_table(table.replace_schema_metadata({"caf-pipeline": json.dumps(described)}), path)


def row_with(**changes):
    return {"change_row": lambda row: row["key"] == "b" and row.update(changes)}


SPOOFS = {
    "no head": ({"head": b"x" * 512}, "does not begin with the head"),
    "a head of another format": (
        {"head": b'{"format":"other/1"}'.ljust(512)},
        "has the format 'other/1'",
    ),
    "a head that is not an object": ({"head": b"7".ljust(512)}, "does not begin with the head"),
    "a head that is nested deep": ({"head": b"[" * 512}, "does not begin with the head"),
    "another archive": ({"archive_id": "f" * 32}, "names the archive 'ffff"),
    "another source": ({"source": "other"}, "does not belong to source src"),
    "a plan that is none": ({"plan": "nonsense"}, "does not belong to source src"),
    "a number of six digits": ({"number": 123_456}, "does not belong to source src"),
    "a manifest of another chunk": (
        {"described": {"chunk": "src-0a0b0c0d-09999"}},
        "names the chunk",
    ),
    "a manifest that is no Parquet": (
        {"change_manifest": lambda path: path.write_bytes(b"PAR1" * 20)},
        "cannot be read",
    ),
    "an empty manifest": (
        {"change_manifest": lambda path: path.write_bytes(b"")},
        "does not end with a member",
    ),
    "a cut manifest": (
        {"change_manifest": lambda path: os.truncate(path, path.stat().st_size // 2)},
        "cannot be read",
    ),
    "other columns": ({"change_manifest": widened}, "columns"),
    "a row group that is too large": ({"change_manifest": one_group}, "row group"),
    "a text that is bloated": ({"change_manifest": bloated}, "a text of 2000000 bytes"),
    "a later format": ({"change_manifest": of_format}, "caf-pipeline/9"),
    "no object": ({"bodies": {}}, "holds no object"),
    "a row too many": (
        {"skipped": [a_row("c", b"", 518)]},
        "names member 'c'",
    ),
    "a member too many": ({"extra_member": True}, "the index has"),
    "another range": (row_with(start_byte=514), "different ranges"),
    "another size": (row_with(size_bytes=4), "different ranges"),
    "a range of another member": (
        row_with(member="a", start_byte=512, end_byte=515),
        "overlap",
    ),
    "a SHA-256 that is missing": (row_with(sha256=None), "no SHA-256"),
    "an object twice": ({"skipped": [a_skip("b", size_bytes=3)]}, "names 'b' twice"),
    "keys out of order": ({"bodies": {"b": b"1", "a": b"2"}}, "order of keys"),
    "a key that is empty": ({"bodies": {"": b"1"}}, "invalid key"),
    "a key with a NUL": ({"bodies": {"a\0": b"1"}}, "invalid key"),
    "a key that is too long": ({"bodies": {"a" * 1025: b"1"}}, "invalid key"),
    "an ETag with a NUL": (row_with(etag="\0"), "name the version"),
    "a time of writing beside a version id": (
        row_with(version_id="v", rewritten_at=MOMENT),
        "rewritten_at",
    ),
    "a time of writing that is not LastModified": (
        row_with(rewritten_at=MOMENT + timedelta(days=1)),
        "rewritten_at",
    ),
    "a negative size": ({"skipped": [a_skip("c", size_bytes=-1)]}, "a size of -1"),
    "a reason that there is not": ({"skipped": [a_skip("c", "boredom")]}, "an unknown reason"),
    "fewer planned than there are": (
        {"described": {"plan_sha256": bytes.fromhex("0a0b0c0d") + b"x" * 28, "planned_objects": 1}},
        "2 objects, but 1",
    ),
    "a hash of another plan": (
        {"described": {"plan_sha256": b"x" * 32, "planned_objects": 2}},
        "description of its plan",
    ),
    "an index that is longer than any": ({"footer": b"\xff\xff\xff\xff"}, "footer"),
    "an index that is longer than the file": ({"footer": b"\xff\xff\x00\x00"}, ""),
    "an index that is none": ({"change_index": lambda index: b"{" * len(index)}, "index"),
}


@pytest.mark.thorough
def test_spoofed_chunk_gives_no_row(bare, tmp_path):
    expected = {}
    for number, (name, (changes, said)) in enumerate(SPOOFS.items(), 1):
        forged = Forgery(**{"archive_id": bare.archive_id, "number": number} | changes)
        posting = put(bare.store, forged.write(tmp_path / str(number)), bare.archive_id)
        expected[posting.start] = name, said
    outcomes = list(rebuild.rebuild(bare))
    assert len(outcomes) == len(SPOOFS)
    for outcome in outcomes:
        name, said = expected[outcome.finding.file.posting.start]
        assert (outcome.finding.kind, outcome.complete) == (FileKind.NO_CHUNK, False), name
        assert said in outcome.finding.why, name
    assert not any(rows for table, rows in rows_of(bare.ledger).items() if table != "sources")


OF_A_PART = {"part": 2, "part_count": 3, "part_start_byte": 3, "part_end_byte": 6, "size_bytes": 9}
NO_PARTS = {
    "number 0": {"part": 0},
    "more than the count": {"part": 4},
    "the first, and not from the first byte": {"part": 1},
    "from the first byte, and not the first": {"part_start_byte": 0, "part_end_byte": 3},
    "the last, and not to the last byte": {"part": 3},
    "to the last byte, and not the last": {"size_bytes": 6},
    "beyond the object": {"size_bytes": 5},
    "a negative range": {"part_start_byte": -3, "part_end_byte": 0},
    "more parts than a plan has chunks": {"part_count": 100_000},
    "no count": {"part_count": None},
    "another size than its member": {"part_end_byte": 7},
}


def a_part(archive_id, **changes):
    return Forgery(
        archive_id,
        {"big": b"two"},
        change_row=lambda row: row.update(OF_A_PART | changes),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", NO_PARTS)
def test_a_part_that_cannot_be_gives_no_row(bare, tmp_path, name):
    put(
        bare.store, a_part(bare.archive_id, **NO_PARTS[name]).write(tmp_path / "x"), bare.archive_id
    )
    assert kinds(rebuild.rebuild(bare)) == [FileKind.NO_CHUNK]
    assert bare.ledger.chunks.list() == []


def test_a_part_alone_is_restored_and_is_no_object(bare, tmp_path):
    put(bare.store, a_part(bare.archive_id).write(tmp_path / "x"), bare.archive_id)
    assert kinds(rebuild.rebuild(bare)) == [FileKind.CHUNK]
    (chunk,) = bare.ledger.chunks.list()
    assert (chunk.state, chunk.part, chunk.part_count) == (ChunkState.LOCATED, 2, 3)
    assert bare.ledger.lookup.locate("src", "big") is None
    assert bare.ledger.chunks.account("src").located_objects == 0


def test_chunk_with_a_part_and_an_object_gives_no_row(bare, tmp_path):
    forged = dataclasses.replace(a_part(bare.archive_id), bodies={"big": b"two", "c": b"two"})
    put(bare.store, forged.write(tmp_path / "x"), bare.archive_id)
    assert kinds(rebuild.rebuild(bare)) == [FileKind.NO_CHUNK]
    assert bare.ledger.chunks.list() == []


def test_bytes_that_are_no_chunk_give_no_row(bare, tmp_path):
    for size in (1, 3, 512, 513, 70_000):
        path = tmp_path / str(size)
        path.write_bytes(os.urandom(size))
        put(bare.store, path, bare.archive_id)
    assert set(kinds(rebuild.rebuild(bare))) == {FileKind.NO_CHUNK}
    assert bare.ledger.chunks.list() == []


def test_post_without_upload_is_reported(bare, tmp_path):
    put(bare.store, Forgery(bare.archive_id).write(tmp_path / "x"), bare.archive_id, upload=False)
    outcome, rows = found(bare)
    assert (outcome.finding.kind, outcome.complete, rows) == (FileKind.NOT_UPLOADED, False, 0)
    assert "lists no provider" in outcome.finding.why


def test_another_owners_file_is_foreign_and_never_read(bare, tmp_path):
    posting = put(bare.store, Forgery(bare.archive_id).write(tmp_path / "x"), bare.archive_id)
    bare.store.posts[posting.merkle_root] = dataclasses.replace(posting, owner="mallory")
    outcome, rows = found(bare)
    assert (outcome.finding.kind, outcome.complete, rows) == (FileKind.FOREIGN, True, 0)
    assert "mallory" in outcome.finding.why


def test_the_same_chunk_posted_twice_is_restored_once(bare, tmp_path):
    posting = put(bare.store, Forgery(bare.archive_id).write(tmp_path / "x"), bare.archive_id)
    twice = dataclasses.replace(posting, start=posting.start + 5)
    bare.store.posts[b"twice"] = twice
    assert sorted(kinds(rebuild.rebuild(bare))) == [FileKind.CHUNK, FileKind.DOUBLE]
    assert bare.ledger.chunks.list()[0].start == posting.start
    outcomes = list(rebuild.rebuild(bare))
    assert sorted(kinds(outcomes)) == [FileKind.DOUBLE, FileKind.KNOWN]
    assert all(outcome.complete for outcome in outcomes)


def test_two_proven_files_of_one_name_are_both_kept(bare, tmp_path):
    first, second = Forgery(bare.archive_id), Forgery(bare.archive_id, {"a": b"other", "c": b"3"})
    postings = [
        put(bare.store, forged.write(tmp_path / "x"), bare.archive_id) for forged in (first, second)
    ]
    outcomes = list(rebuild.rebuild(bare))
    assert kinds(outcomes) == [FileKind.CHUNK] * 2
    names = [first.name, f"src-{postings[1].merkle_root.hex()[:12]}-00001"]
    assert sorted(outcome.finding.name for outcome in outcomes) == sorted(names)
    located = rows_of(bare.ledger)["file_locations"]
    assert {(row["file_path"], row["chunk"]) for row in located} == {
        *(("a", names[0]), ("b", names[0]), ("a", names[1]), ("c", names[1]))
    }
    assert set(kinds(rebuild.rebuild(bare))) == {FileKind.KNOWN}
    assert object_bytes(bare, "c") == b"3"


def test_file_with_taken_name_and_wrong_root_is_refused(bare, tmp_path):
    put(bare.store, Forgery(bare.archive_id).write(tmp_path / "x"), bare.archive_id)
    other = put(
        bare.store,
        Forgery(bare.archive_id, {"c": b"3" * 1000}).write(tmp_path / "y"),
        bare.archive_id,
    )
    for provider in bare.store.folders:  # the place of the object, on which all copies may agree
        corrupt(bare.store.file(provider, other), 700)
    outcomes = {outcome.finding.kind: outcome for outcome in rebuild.rebuild(bare)}
    assert outcomes.keys() == {FileKind.CHUNK, FileKind.DIFFERING}
    assert "Merkle root" in outcomes[FileKind.DIFFERING].finding.why
    assert len(bare.ledger.chunks.list()) == 1


def test_second_file_of_known_objects_is_superseded_and_remembered(bare, tmp_path):
    put(bare.store, Forgery(bare.archive_id).write(tmp_path / "x"), bare.archive_id)
    list(rebuild.rebuild(bare))
    again = put(
        bare.store, Forgery(bare.archive_id, {"a": b"one"}).write(tmp_path / "y"), bare.archive_id
    )
    outcomes = {outcome.finding.kind: outcome for outcome in rebuild.rebuild(bare)}
    assert outcomes.keys() == {FileKind.KNOWN, FileKind.SUPERSEDED}
    assert bare.ledger.rebuilds.left_posts("src") == {again.merkle_root}
    assert bare.store.unknown_posts(bare.archive_id, bare.ledger.transactions(bare.holder)) == []


def test_a_stored_file_takes_the_place_of_a_planned_chunk(bare):
    name = plan(bare).chunks[0].name
    forged = Forgery(bare.archive_id, plan=name.split("-")[1])
    put(bare.store, forged.write(bare.staging() / "x"), bare.archive_id)
    outcome, rows = found(bare)
    assert (outcome.finding.kind, outcome.complete, rows) == (FileKind.CHUNK, True, 2)
    assert bare.ledger.chunks.get(name).state is ChunkState.LOCATED
    assert not any(
        row["file_path"] == "empty" for row in rows_of(bare.ledger)["claims"]
    )  # the next plan archives it


def test_chunk_with_a_claimed_object_is_not_restored(bare):
    (claimed, *_) = [obj for obj in bare.objects.objects() if obj.key == b"empty"]
    row = {"etag": claimed.etag, "last_modified": claimed.last_modified}
    plan(bare)
    forged = Forgery(bare.archive_id, {"empty": b""}, change_row=lambda one: one.update(row))
    put(bare.store, forged.write(bare.staging() / "x"), bare.archive_id)
    outcome, rows = found(bare)
    assert (outcome.finding.kind, outcome.complete, rows) == (FileKind.CONFLICTING, False, 0)
    assert "'empty'" in outcome.finding.why


# --- the same object in several chunks
# -------------------------------------------------------------------------------


def test_object_of_two_chunks_is_located_once(bare, tmp_path):
    first = put(bare.store, Forgery(bare.archive_id).write(tmp_path / "1"), bare.archive_id)
    put(
        bare.store,
        Forgery(bare.archive_id, {"b": b"two", "c": b"3"}, number=2).write(tmp_path / "2"),
        bare.archive_id,
    )
    put(
        bare.store,
        Forgery(bare.archive_id, {"a": b"one"}, number=3).write(tmp_path / "3"),
        bare.archive_id,
    )
    outcomes = list(rebuild.rebuild(bare))
    assert [outcome.rows for outcome in outcomes] == [2, 1, None]
    assert (outcomes[2].finding.kind, outcomes[2].complete) == (FileKind.SUPERSEDED, True)
    assert "every object" in outcomes[2].finding.why
    assert len(bare.ledger.chunks.list()) == 2
    rows = rows_of(bare.ledger)["file_locations"]
    assert [(row["file_path"], row["chunk"][-1]) for row in rows] == [
        ("a", "1"),
        ("b", "1"),
        ("c", "2"),
    ]
    assert bare.ledger.lookup.locate("src", "b").posting == first


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_object_archived_later_is_not_skipped(bare, tmp_path, order):
    skipped = a_skip("z", size_bytes=3)
    bodies = [{"a": b"1"}, {"b": b"1"}, {"c": b"1", "z": b"abc"}]
    for number, body in enumerate(bodies, 1):
        skips = [
            skipped | {"skip_detail": f"by {number}"},
            a_skip("zz", skip_detail=f"by {number}"),
        ]
        forged = Forgery(bare.archive_id, body, number=number, skipped=skips[number == 3 :])
        put(bare.store, forged.write(tmp_path / str(number)), bare.archive_id)
    findings = list(rebuild.find_chunks(bare, ask=accepts))
    for place in order:
        rebuild.import_found_chunk(bare, findings[place])
    (row,) = rows_of(bare.ledger)["skipped_objects"]
    assert (row["file_path"], row["detail"], row["chunk"][-1]) == ("zz", "by 3", "3")
    assert bare.ledger.lookup.locate("src", "z") is not None


def test_an_empty_ledger_takes_over_the_id_of_the_folder(tmp_path, databases):
    with ExitStack() as stack:
        first, second = make_ledger(stack, databases), make_ledger(stack, databases)
        archive_everything(a_run_context(tmp_path, MemorySource({"key": b"x"}), first))
        lost = a_run_context(tmp_path, MemorySource({}), second)
        assert [outcome.rows for outcome in rebuild.rebuild(lost)] == [1]
        assert second.folder_store.folder_store() == first.folder_store.folder_store()
        assert (
            tmp_path / "store" / MARKER
        ).read_text().strip() == second.folder_store.folder_store()
