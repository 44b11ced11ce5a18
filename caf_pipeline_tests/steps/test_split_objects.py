"""Objects larger than a chunk: split, located as a whole or not at all, read as one."""

import hashlib
import os
import random
import re
import threading
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec

import pyarrow.parquet as pq
import pytest
from awscrt.checksums import crc64nvme

from caf_pipeline.caf.archive import Limits
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.cli import plans
from caf_pipeline.errors import CafError, IntegrityError, NotLocated
from caf_pipeline.inventory import cutting
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger import sources as ledger_sources
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.maintenance.deletion.safe_to_delete import find_deletable
from caf_pipeline.maintenance.rebuild import FileKind, rebuild
from caf_pipeline.maintenance.scrub import prove_chunk
from caf_pipeline.packing.journal.writer import CheckpointPace
from caf_pipeline.retrieval.listing import list_rows
from caf_pipeline.retrieval.log_search import LogSearch, Period
from caf_pipeline.retrieval.reader import fetch, not_located, save
from caf_pipeline.run_context import Lazy
from caf_pipeline.steps import chunk_steps, inventories, planning, preview
from caf_pipeline.steps.audit import account_for_chunk, fetch_members
from caf_pipeline.steps.preview import preview_plan
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.support import memory_source, steady_source
from caf_pipeline_tests.support.clp_packing import packed
from caf_pipeline_tests.support.current_content import next_second
from caf_pipeline_tests.support.encrypted_staging import packing_secrets, private_settings
from caf_pipeline_tests.support.kills import KILLED, Fatal
from caf_pipeline_tests.support.ledger_rows import seal_facts
from caf_pipeline_tests.support.md5_collision import FIRST, SECOND
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.new_ledgers import make_ledger, rows_of
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.run_contexts import (
    CHUNK_STEPS,
    a_run_context,
    account_for_plan,
    archive_chunk,
    archive_everything,
    every_object_reads_back,
    first_chunk,
    object_bytes,
    plan,
)
from caf_pipeline_tests.support.several_folders import SeveralFolders
from caf_pipeline_tests.support.tiers import sampled

LIMITS = Limits(max_bytes=160_000)
HUGE = os.urandom(400_000)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Limit chunks to 160,000 bytes; packing takes the limit from the plan."""
    terms = planning.plan_terms
    monkeypatch.setattr(planning, "plan_terms", lambda *args: replace(terms(*args), limits=LIMITS))


@pytest.fixture
def source():
    return MemorySource(
        {"huge": HUGE, "huge~caf-p-1-4": b"label", "a": os.urandom(1000), "z": os.urandom(50_000)}
    )


@pytest.fixture
def context(tmp_path, source, ledger):
    return a_run_context(tmp_path, source, ledger, target="128KiB")


@pytest.mark.thorough
@pytest.mark.parametrize("checksum", ["CRC32", "CRC64NVME"])
def test_split_object_with_equal_checksum_is_not_archived_again(
    tmp_path, new_bucket, ledger, checksum
):
    context = a_run_context(tmp_path, new_bucket.source(), ledger, target="128KiB")
    new_bucket.put("huge", FIRST + HUGE, ChecksumAlgorithm=checksum)
    archive_everything(context)
    next_second()
    new_bucket.put("huge", FIRST + HUGE, ChecksumAlgorithm=checksum)
    report = plan(context)
    assert (report.comparison.equal, report.chunks) == (1, [])
    next_second()
    new_bucket.put("huge", SECOND + HUGE, ChecksumAlgorithm=checksum)
    report = plan(context)
    assert (report.comparison.other_bytes, len(report.chunks)) == (1, 4)


@pytest.mark.thorough
def test_the_crc64_of_a_split_object_follows_from_its_parts(context):
    archive_everything(context)
    (huge,) = context.ledger.content.located_versions("src", ["huge"])
    assert huge.checksums["crc64nvme"] == crc64nvme(HUGE).to_bytes(8, "big")


@pytest.mark.thorough
@pytest.mark.skipif(
    find_spec("yscope_clp_core") is None,
    reason="there is no clp-s: its wheel is for Linux on x86-64",
)
def test_log_in_parts_is_searched_by_header_time(context, source, tmp_path):
    records = [
        {"ts": 1_700_000_000_000 + n, "n": n, "text": random.Random(n).randbytes(200).hex()}
        for n in range(1500)
    ]
    source.bodies["log"] = packed(tmp_path / "packed", records, "--timestamp-key", "ts")
    assert len(source.bodies["log"]) > LIMITS.max_bytes
    archive_everything(context)

    def found(**period):
        with LogSearch("n >= 1498", context.staging(), period=Period(**period)) as searching:
            searched = {
                one.location.row.key: len(list(one.matches))
                for one in searching.search(context.ledger.lookup, context.store, "src", "")
            }
        assert (searching.listed, searching.not_recorded) == (
            5,
            2,
        )  # split objects that are not logs, too
        return searched

    assert found() == {"log": 2}
    assert found(last_ms=1_700_000_001_498) == {"log": 1}
    assert found(first_ms=1_700_000_001_500) == {}


def test_preview_gives_minimum_number_of_plans(context, source, monkeypatch, capsys):
    source.bodies |= {"huge-2": os.urandom(400_000), "huge-3": os.urandom(400_000)}
    for module in (cutting, preview):
        monkeypatch.setattr(module, "MAX_CHUNKS", 7)
    result = preview_plan(context, inventories.take_inventory(context))
    plans._print_preview(result, public=True)
    made = plan(context)
    assert (result.estimate.chunks, result.plans, len(made.plans)) == (len(made.chunks), 2, 3)
    assert re.search(r"^plans +at least 2, since", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.thorough
def test_preview_of_several_plans_gives_fill(context, source, monkeypatch):
    source.bodies |= {f"huge-{number}": os.urandom(400_000 + 7 * number) for number in range(5)}
    source.bodies |= {f"small-{number}": os.urandom(60_000) for number in range(9)}
    for module in (cutting, preview):
        monkeypatch.setattr(module, "MAX_CHUNKS", 5)
    estimate = preview_plan(context, inventories.take_inventory(context)).estimate
    made = plan(context)
    assert len(made.plans) > 2
    assert estimate.fill == preview.estimate_report(context, made).fill


def parts_of(context):
    """Return the chunks with parts that were not given up, in order."""
    return [
        chunk.name
        for chunk in context.ledger.chunks.list("src")
        if chunk.part and not chunk.part_abandoned
    ]


def whole_chunks(context):
    return [chunk.name for chunk in context.ledger.chunks.list("src") if not chunk.part]


def is_nowhere(context):
    """Return whether look-ups, plans, checks and counts all lack the huge object."""
    ledger, folder = context.ledger, context.plans()
    ledger.exports.standing("src", folder / "standing.parquet")
    ledger.exports.located("src", folder / "located.parquet")
    standing = pq.read_table(folder / "standing.parquet").to_pylist()
    rows = pq.read_table(folder / "located.parquet").to_pylist()
    whole = sum(
        chunk.member_count
        for chunk in ledger.chunks.list("src", [ChunkState.LOCATED])
        if not chunk.part
    )
    listed = [obj for obj in context.objects.objects() if obj.key == b"huge"]
    held = [row["standing"] for row in standing if row["key"] == b"huge"]
    settled = ledger.content.settled_objects("src", listed)
    return (
        ledger.lookup.locate("src", "huge") is None
        and ledger.lookup.versions("src", "huge", 5) == ([], 0)
        and "located" not in held
        and bool(settled) <= bool(held)
        and not any(row["key"] == b"huge" for row in rows)
        and not ledger.content.located_versions("src", ["huge"])
        and "huge" not in [row.key for row in list_rows(ledger.lookup, "src")]
        and ledger.chunks.account("src").located_objects == whole
    )


@pytest.mark.thorough
def test_object_larger_than_chunk_is_split_and_reads_back(context, source, tmp_path):
    archive_everything(context)
    parts = parts_of(context)
    assert len(parts) == 4
    assert all(
        context.ledger.chunks.get(name).stored_size_bytes <= LIMITS.max_bytes for name in parts
    )
    every_object_reads_back(context)
    save(fetch(context.ledger.lookup, context.store, "src", "huge"), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == HUGE
    location = context.ledger.lookup.locate("src", "huge")
    assert [entry.chunk for entry in location.ranges] == parts
    assert (location.row.start_byte, location.row.end_byte, location.row.sha256) == (
        0,
        len(HUGE),
        b"",
    )
    assert {row.key: row.size_bytes for row in list_rows(context.ledger.lookup, "src")} == {
        key: len(body) for key, body in source.bodies.items()
    }
    assert {chunk.state for chunk in context.ledger.chunks.list("src")} == {ChunkState.LOCATED}


@pytest.mark.thorough
def test_part_has_object_number_and_range_in_manifest(context):
    archive_everything(context)
    chunk = context.ledger.chunks.get(parts_of(context)[1])
    opened = chunk_steps.open_chunk(context, chunk)
    assert "huge~caf-p-2-4" in opened.reader
    (row,) = opened.manifest().rows()
    assert (row["key"], row["size_bytes"], row["part"], row["part_count"]) == (
        "huge",
        len(HUGE),
        2,
        4,
    )
    assert (row["part_start_byte"], row["part_end_byte"]) == (100_000, 200_000)
    assert row["sha256"] == hashlib.sha256(HUGE[100_000:200_000]).digest()
    assert list(opened.manifest().locations()) == []


MANY_HEADERS = ObjectHeaders(
    content_disposition="y" * 4000, user_metadata={f"name-{n}": "x" * 90 for n in range(20)}
)


def test_parts_table_is_scanned_once_per_object(context, source, monkeypatch):
    scans, register = [], ledger_sources.register_parts

    def counted(connection, *arguments):
        statement = (
            "SELECT seq_scan + idx_scan FROM pg_stat_xact_user_tables WHERE relname = "
            "'object_parts'"
        )
        before = connection.exec_driver_sql(statement).scalar_one()
        register(connection, *arguments)
        scans.append(connection.exec_driver_sql(statement).scalar_one() - before)

    monkeypatch.setattr(ledger_sources, "register_parts", counted)
    source.bodies["another"] = os.urandom(1_000_000)
    parts = [chunk for chunk in plan(context).chunks if chunk.part]
    assert scans[0] < len(parts)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size_bytes", "limit_bytes", "chunks"), [(142_000, 160_000, 2), (120_000, 60_000, 1)]
)
def test_headers_that_no_listing_shows_keep_no_object_out(
    context, source, size_bytes, limit_bytes, chunks
):
    """It nearly fills the largest chunk, or exceeds what a slow store takes."""
    source.bodies = {"large": HUGE[:size_bytes]}
    source.headers["large"] = MANY_HEADERS
    context.store.largest_chunk_bytes = lambda: limit_bytes
    name = first_chunk(context)
    chunk_steps.withdraw(context, name)
    assert len(archive_everything(context)) == chunks
    assert object_bytes(context, "large") == HUGE[:size_bytes]


@pytest.mark.thorough
def test_unlisted_headers_do_not_exclude_a_part(context, source):
    source.headers["huge"] = MANY_HEADERS
    context.store.largest_chunk_bytes = lambda: 60_000
    plan(context)
    chunk_steps.withdraw(context, parts_of(context)[0])
    report = plan(context)
    assert report.chunks[0].part_count > 4
    for chunk in report.chunks:
        archive_chunk(context, chunk.name)
    assert object_bytes(context, "huge") == HUGE


@pytest.mark.thorough
def test_a_preview_counts_objects_that_are_split_and_their_parts(context, source):
    preview = preview_plan(context, inventories.take_inventory(context))
    statistics = preview.estimate.statistics
    assert (
        statistics.split_objects,
        statistics.parts,
        statistics.objects,
        preview.estimate.chunks,
    ) == (1, 4, 4, 5)
    assert statistics.size_bytes == sum(map(len, source.bodies.values()))
    assert (preview.claimed, preview.located, preview.skipped) == (0, 0, {})
    assert (preview.as_json()["split_objects"], preview.as_json()["parts"]) == (1, 4)
    assert plan(context).plan.object_count == 4
    again = preview_plan(context, inventories.take_inventory(context))
    assert (again.claimed, again.estimate.chunks, again.difference.chunks) == (4, 0, -5)
    for chunk in context.ledger.chunks.list("src"):
        archive_chunk(context, chunk.name, until=chunk_steps.pack_chunk)
    assert preview.estimate.requests == len(source.reads) == 4 * 2 + 3


def objects_by_state(context):
    (progress,) = context.ledger.progress.of(["src"])
    return {state: sums.objects for state, sums in progress.states.items()}


@pytest.mark.thorough
def test_split_object_is_located_once_all_parts_are(context, source):
    report = plan(context)
    assert objects_by_state(context) == {ChunkState.PLANNED: 4}
    *first, last = parts_of(context)
    for name in [*whole_chunks(context), *first]:
        archive_chunk(context, name)
        assert is_nowhere(context)
    assert objects_by_state(context) == {ChunkState.LOCATED: 3, ChunkState.PLANNED: 1}
    account = account_for_plan(context, report)
    assert (account.located, account.claimed, account.holds) == (3, 1, True)
    assert context.ledger.chunks.account("src").claimed_objects == 1
    assert not plan(context).plan
    archive_chunk(context, last)
    assert context.ledger.lookup.locate("src", "huge")
    account = account_for_plan(context, report)
    assert (account.located, account.claimed, account.holds) == (4, 0, True)
    sums = context.ledger.chunks.account("src")
    assert (sums.located_objects, sums.claimed_objects) == (4, 0)
    assert objects_by_state(context) == {ChunkState.LOCATED: 4}
    assert sums.located_bytes == sum(map(len, source.bodies.values()))
    assert not plan(context).plan


@pytest.mark.thorough
def test_last_located_part_completes_object_in_any_order(context, source):
    plan(context)
    first, *others = parts_of(context)
    for name in [*whole_chunks(context), *others]:
        archive_chunk(context, name)
        (progress,) = context.ledger.progress.of(["src"])
        assert progress.recent.objects < 4
    assert objects_by_state(context) == {ChunkState.LOCATED: 3, ChunkState.PLANNED: 1}
    source.unavailable["huge"] = SkipReason.CHANGED, 0
    archive_chunk(context, first)  # gives up all parts
    assert is_nowhere(context)
    (progress,) = context.ledger.progress.of(["src"])
    located = progress.sums([ChunkState.LOCATED])
    account = context.ledger.chunks.account("src")
    assert (located.objects, located.size_bytes) == (account.located_objects, account.located_bytes)
    assert located.objects == 3


@pytest.mark.thorough
@pytest.mark.parametrize("packed", sampled(range(4), every=4))
def test_object_changed_between_parts_is_lost_and_successor_archived(context, source, packed):
    plan(context)
    names = parts_of(context)
    for name in names[:packed]:
        archive_chunk(context, name)
    source.unavailable["huge"] = SkipReason.CHANGED, 0
    archive_chunk(context, names[packed])
    assert context.ledger.chunks.get(names[packed]).state is ChunkState.EMPTY
    assert parts_of(context) == []
    assert is_nowhere(context)
    for name in names[packed + 1 :]:
        archive_chunk(context, name)  # neither a failure nor a fetch
        assert context.ledger.chunks.get(name).state is ChunkState.WITHDRAWN
    assert is_nowhere(context)
    assert context.ledger.chunks.account("src").claimed_objects == 2 + 1
    del source.unavailable["huge"]
    source.bodies["huge"] = os.urandom(300_000)
    archive_everything(context)
    assert object_bytes(context, "huge") == source.bodies["huge"]


@pytest.mark.thorough
def test_replanned_content_is_located_by_new_parts_only(context, source):
    plan(context)
    names = parts_of(context)
    archive_chunk(context, names[0])
    archive_chunk(context, names[2])
    chunk_steps.park(context, names[1], "a test")
    assert is_nowhere(context)
    assert not plan(context).plan
    chunk_steps.withdraw(context, names[1])
    assert is_nowhere(context)
    assert context.ledger.chunks.get(names[3]).state is ChunkState.WITHDRAWN
    again = plan(context)
    assert again.plan.object_count == 1
    for chunk in again.chunks[:-1]:
        archive_chunk(context, chunk.name)
        assert is_nowhere(context)
    archive_chunk(context, again.chunks[-1].name)
    assert [part.chunk for part in context.ledger.lookup.locate("src", "huge").ranges] == [
        chunk.name for chunk in again.chunks
    ]
    assert object_bytes(context, "huge") == HUGE


@pytest.mark.thorough
@pytest.mark.parametrize("step", CHUNK_STEPS[:3])
def test_packed_unposted_part_is_withdrawn_with_the_others(context, source, step):
    plan(context)
    first, other = parts_of(context)[:2]
    archive_chunk(context, first, until=step)
    source.unavailable["huge"] = SkipReason.DELETED, 0
    archive_chunk(context, other)
    del source.unavailable["huge"]
    archive_chunk(context, first)
    assert context.ledger.chunks.get(first).state is ChunkState.WITHDRAWN
    assert not list(context.staging().iterdir())
    assert is_nowhere(context)


@pytest.mark.thorough
@pytest.mark.parametrize("step", CHUNK_STEPS[3:6])
def test_paid_part_continues_but_is_never_read(context, source, step):
    plan(context)
    first, other = parts_of(context)[:2]
    archive_chunk(context, first, until=step)
    log = context.ledger.transactions(context.holder)
    assert log.lost_posts(context.archive_id) == []
    source.unavailable["huge"] = SkipReason.DELETED, 0
    archive_chunk(context, other)
    assert log.lost_posts(context.archive_id) == []
    archive_chunk(context, first)
    assert context.ledger.chunks.get(first).state is ChunkState.LOCATED
    assert is_nowhere(context)
    del source.bodies["huge"]
    del source.unavailable["huge"]
    report = plan(context)
    assert account_for_plan(context, report).gone == 0


def test_missing_row_of_a_part_comes_back(context):
    archive_everything(context)
    before = rows_of(context.ledger)
    with connected(context.ledger.database) as connection:
        connection.execute("DELETE FROM file_locations WHERE part = 2")
    assert is_nowhere(context)
    assert [outcome.rows for outcome in rebuild(context) if outcome.rows] == [1]
    assert rows_of(context.ledger) == before
    assert object_bytes(context, "huge") == HUGE


@pytest.mark.thorough
def test_lost_located_part_makes_object_planned_again(context, source):
    archive_everything(context)
    lost = context.ledger.chunks.get(parts_of(context)[1])
    with chunk_steps.lease_chunk(context, lost.name) as lease:
        context.ledger.moves.move(
            lease, lost.name, ChunkState.LOCATED, ChunkState.DAMAGED, reason="a test"
        )
    assert context.ledger.lookup.locate("src", "huge")
    assert object_bytes(context, "huge") == HUGE
    with chunk_steps.lease_chunk(context, lost.name) as lease:
        context.ledger.moves.move(
            lease, lost.name, ChunkState.DAMAGED, ChunkState.WITHDRAWN, reason="a test"
        )
    assert is_nowhere(context)
    archive_everything(context)
    assert object_bytes(context, "huge") == HUGE
    assert context.ledger.chunks.account("src").located_objects == 4


@pytest.mark.thorough
def test_the_accounts_of_parts_agree_and_their_bytes_are_compared(context):
    names = archive_everything(context)
    for name in names:
        account = account_for_chunk(context, name)
        assert (account.agrees, account.explanation) == (True, "")
        assert fetch_members(context, name).mismatched == []
    location = context.ledger.lookup.locate("src", "huge").ranges[2]
    file = context.store.folder / "chunks" / f"{location.posting.merkle_root.hex()}.caf"
    corrupt(file, location.end_byte - 1)
    (mismatch,) = fetch_members(context, location.chunk).mismatched
    assert mismatch.startswith("part 3 of huge")


@pytest.mark.thorough
def test_wrong_bytes_in_one_part_are_never_handed_out(context, tmp_path):
    archive_everything(context)
    damaged = context.ledger.lookup.locate("src", "huge").ranges[3]
    file = context.store.folder / "chunks" / f"{damaged.posting.merkle_root.hex()}.caf"
    corrupt(file, damaged.start_byte)
    with pytest.raises(IntegrityError, match=damaged.chunk):
        save(fetch(context.ledger.lookup, context.store, "src", "huge"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    reader = fetch(context.ledger.lookup, context.store, "src", "huge")
    with pytest.raises(IntegrityError):
        next(reader.pieces)


TELL = "UPDATE file_locations SET {} WHERE part = 2"
NO_WHOLE = {
    "a gap and an overlap": "UPDATE object_parts SET start_byte = start_byte + 1, end_byte = "
    "end_byte + 1 WHERE part = 2",
    "a row of another length": TELL.format("end_byte = end_byte - 1"),
    "a row of another content": TELL.format("etag = 'other'"),
    "a row of another version": TELL.format("version_id = 'v'"),
    "a row in another chunk": TELL.format("caf_file_id = caf_file_id + 1"),
    "no row": "DELETE FROM file_locations WHERE part = 2",
    "another count": "UPDATE object_parts SET part_count = 5 WHERE part = 2",
    "another size": "UPDATE object_parts SET object_bytes = object_bytes + 1 WHERE part = 2",
    "another plan": "UPDATE object_parts SET plan_id = plan_id + 1 WHERE part = 2",
    "one that was given up": "UPDATE object_parts SET abandoned = true WHERE part = 2",
    "a chunk that expired": "UPDATE chunk_copies SET state = 'expired' FROM object_parts AS own "
    "WHERE part = 2"
    " AND own.caf_file_id = chunk_copies.caf_file_id",
}


@pytest.mark.thorough
def test_incomplete_parts_are_no_object(context):
    archive_everything(context)
    assert not is_nowhere(context)
    with connected(context.ledger.database) as connection:
        for name, change in NO_WHOLE.items():
            with connection.transaction(force_rollback=True):
                if name == "another plan":
                    connection.execute(
                        "SET LOCAL session_replication_role = replica"
                    )  # there is no other plan
                assert connection.execute(change).rowcount == 1, name
                count = connection.execute("SELECT count(*) FROM objects_in_parts").scalar_one()
                assert count == 0, name
        assert connection.execute("SELECT count(*) FROM objects_in_parts").scalar_one() == 1


def test_chunk_with_other_part_than_planned_is_not_sealed(context):
    plan(context)
    first, other = parts_of(context)[:2]
    archive_chunk(context, first, until=chunk_steps.pack_chunk)
    archive_chunk(context, other, until=chunk_steps.seal_chunk)
    part = chunk_steps.open_chunk(context, context.ledger.chunks.get(other)).manifest().part()
    with chunk_steps.lease_chunk(context, first) as lease:
        with pytest.raises(CafError, match="planned"):
            context.ledger.moves.seal(lease, first, seal_facts(1), [], [], part=part)
        with pytest.raises(CafError, match="0 locations"):
            context.ledger.moves.seal(lease, first, seal_facts(1), [], [])
    assert context.ledger.chunks.get(first).state is ChunkState.PACKING


@pytest.mark.thorough
def test_split_object_under_way_names_a_chunk_with_work(context, source, monkeypatch):
    source.bodies["huge"] = b"older"
    archive_everything(context)
    source.bodies["huge"] = HUGE
    monkeypatch.setattr(memory_source, "MOMENT", memory_source.MOMENT + timedelta(hours=1))
    plan(context)
    first, second, *_, last = parts_of(context)
    lookup = context.ledger.lookup

    def under_way():
        (claim,) = lookup.not_archived("src", "huge")
        currency = lookup.locate("src", "huge").currency
        assert (currency.chunk, currency.state) == (claim.chunk, claim.state)
        with pytest.raises(NotLocated, match=f"not archived yet: its chunk {claim.chunk}"):
            raise not_located(lookup, "src", "huge")
        return claim.chunk, claim.state

    assert under_way() == (first, ChunkState.PLANNED)
    archive_chunk(context, first)
    assert under_way() == (second, ChunkState.PLANNED)
    chunk_steps.park(context, last, "a test")
    assert under_way() == (last, ChunkState.PARKED)


@pytest.mark.thorough
def test_parts_located_concurrently_make_object_located(context, database_url):
    plan(context)
    names = parts_of(context)
    for name in names:
        archive_chunk(context, name, until=chunk_steps.verify_stored)
    ready, failed = threading.Barrier(len(names)), []

    def locate(name):
        ledger = Ledger(Database(database_url))
        try:
            ready.wait()
            chunk_steps.load_locations(replace(context, lazy_ledger=Lazy.of(ledger)), name)
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            ledger.close()

    threads = [threading.Thread(target=locate, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert context.ledger.lookup.locate("src", "huge")
    assert context.ledger.chunks.account("src").claimed_objects == 3


def test_a_withdrawn_part_takes_the_secrets_of_planned_parts(tmp_path, source, ledger):
    settings = private_settings() | {"target": "128KiB"}
    context = a_run_context(tmp_path, source, ledger, **settings)
    plan(context)
    first, second, *_ = [chunk for chunk in ledger.chunks.list("src") if chunk.part]
    for chunk in (first, second):
        chunk_steps.load_batch(context, chunk.name)
        with chunk_steps.lease_chunk(context, chunk.name) as lease:
            ledger.staging.packing_secret(lease, chunk.name)
    chunk_steps.park(context, second.name, "a test")
    assert chunk_steps.unpark(context, second.name).state is ChunkState.PLANNED
    chunk_steps.withdraw(context, first.name)
    assert ledger.chunks.get(second.name).state is ChunkState.WITHDRAWN
    assert packing_secrets(ledger) == []


@pytest.mark.thorough
@pytest.mark.parametrize("fatal", range(3, 240, 79))
def test_runs_that_are_killed_between_and_within_chunks_end_right(
    tmp_path, ledger, database_url, fatal
):
    context = a_run_context(tmp_path, steady_source.a_split_source(), ledger, target="128KiB")
    plan(context)
    options = {"source": steady_source.a_split_source, "target": "128KiB"}
    names = [chunk.name for chunk in ledger.chunks.list("src")]
    for name in names:
        assert is_nowhere(context) or name == names[-1]
        killed = steady_source.run(tmp_path, database_url, name, fatal=Fatal("", fatal), **options)
        assert killed == KILLED
        assert steady_source.run(tmp_path, database_url, name, **options) == 0
    assert object_bytes(context, "huge") == context.objects.bodies["huge"]
    assert (
        ledger.chunks.account("src").located_objects,
        ledger.chunks.account("src").claimed_objects,
    ) == (2, 0)
    assert not plan(context).plan
    assert len(list((context.store.folder / "chunks").iterdir())) == len(names)


def test_what_was_fetched_of_a_part_is_not_fetched_again(context, source, monkeypatch):
    monkeypatch.setattr(
        "caf_pipeline.packing.packer.pace_of", lambda settings: CheckpointPace(1, 1, 1)
    )
    plan(context)
    name = parts_of(context)[2]
    source.failing["huge"] = 280_000
    chunk_steps.load_batch(context, name)
    with pytest.raises(CafError):
        chunk_steps.pack_chunk(context, name)
    source.failing.clear()
    first, source.reads = {(begin, end) for key, begin, end in source.reads if key == "huge"}, []
    archive_chunk(context, name)
    again = {(begin, end) for _, begin, end in source.reads}
    assert min(begin for begin, _ in first) == 200_000
    assert max(end for _, end in again) == 300_000
    assert min(begin for begin, _ in again) > 200_000


# --- a store of several providers -----------------------------------------------------------------


@pytest.fixture
def several(tmp_path, source, ledger):
    return a_run_context(
        tmp_path, source, ledger, target="128KiB", store=SeveralFolders(tmp_path / "several")
    )


def safe_keys(context, tmp_path):
    return find_deletable(
        context, tmp_path / "list.csv", report=tmp_path / "rest.parquet"
    ), reasons(tmp_path / "rest.parquet")


def reasons(path):
    return {row["key"].decode(): row["reason"] for row in pq.read_table(path).to_pylist()}


def pass_windows(context, names, count=3):
    for _ in range(count):
        context.store.window = context.store.now = (context.store.now or 0) + 1
        for name in names:
            prove_chunk(context, name)


@pytest.mark.thorough
def test_a_provider_that_lies_in_one_part_is_passed_over(several):
    archive_everything(several)
    for at, part in enumerate(several.ledger.lookup.locate("src", "huge").ranges):
        provider = ("anna", "bert", "carl", "anna")[at]
        file = several.store.file(provider, part.posting)
        corrupt(file, part.end_byte - 1)
    assert object_bytes(several, "huge") == HUGE


@pytest.mark.thorough
def test_split_object_is_safe_once_every_chunk_is(several, tmp_path):
    names = archive_everything(several)
    parts = parts_of(several)
    several.store.window = several.store.now = 1
    pass_windows(several, [name for name in names if name != parts[2]])
    safe, why = safe_keys(several, tmp_path)
    assert why == {"huge": "one_window"}
    assert safe.safe_objects == 3
    pass_windows(several, names)
    safe, why = safe_keys(several, tmp_path)
    assert (why, safe.everything_is_safe, safe.safe_objects) == ({}, True, 4)


@pytest.mark.thorough
@pytest.mark.parametrize("part", sampled(range(4), every=4))
def test_one_unsafe_or_contradicting_part_makes_object_unsafe(
    several, tmp_path, database_url, part
):
    names = archive_everything(several)
    pass_windows(several, names)
    location = several.ledger.lookup.locate("src", "huge").ranges[part]
    with connected(several.ledger.database) as connection:
        connection.execute(
            "UPDATE file_locations SET sha256 = sha256(sha256) WHERE file_path = 'huge' AND part = "
            "%(part)s",
            {"part": part + 1},
        )
    safe, why = safe_keys(several, tmp_path)
    assert (why, safe.safe_objects) == ({"huge": "disagrees"}, 3)
    several.store.file("bert", location.posting).unlink()
    several.store.window = several.store.now = several.store.now + 1
    safe, why = safe_keys(several, tmp_path)
    assert (safe.safe_objects, set(why)) == (3, {"huge"})


@pytest.mark.thorough
def test_parts_of_which_one_is_missing_are_never_safe(several, tmp_path):
    plan(several)
    for name in [*whole_chunks(several), *parts_of(several)[:-1]]:
        archive_chunk(several, name)
    names = [chunk.name for chunk in several.ledger.chunks.list("src", [ChunkState.LOCATED])]
    pass_windows(several, names)
    safe, why = safe_keys(several, tmp_path)
    assert (why, safe.safe_objects, safe.gone) == ({"huge": "claimed"}, 3, 0)
    several.objects.unavailable["huge"] = SkipReason.CHANGED, 0
    archive_chunk(several, parts_of(several)[-1])
    safe, why = safe_keys(several, tmp_path)
    assert (why, safe.safe_objects, safe.gone) == ({"huge": "skipped"}, 3, 0)
    del several.objects.bodies["huge"]
    safe, why = safe_keys(several, tmp_path)
    assert (why, safe.safe_objects, safe.gone) == ({}, 3, 0)


@pytest.fixture
def lost(several, databases, tmp_path):
    """Makes a run context with the same store and an empty ledger."""
    with ExitStack() as stack:
        yield lambda: a_run_context(
            tmp_path / "second",
            several.objects,
            make_ledger(stack, databases),
            target="128KiB",
            store=several.store,
        )


@pytest.mark.thorough
def test_parts_are_joined_again_from_the_store_alone(several, lost):
    archive_everything(several)
    context = lost()
    for outcome in rebuild(context):
        assert outcome.finding.kind is FileKind.CHUNK
    assert rows_of(context.ledger) == rows_of(several.ledger)
    assert object_bytes(context, "huge") == HUGE
    assert [part.chunk for part in context.ledger.lookup.locate("src", "huge").ranges] == parts_of(
        several
    )
    assert not plan(context).plan


@pytest.mark.thorough
def test_a_rebuilt_plan_of_parts_alone_has_their_object(several, lost):
    several.objects.bodies = {"huge": HUGE}
    archive_everything(several)
    (planned,) = several.ledger.plans.list("src")
    context = lost()
    list(rebuild(context))
    (restored,) = context.ledger.plans.list("src")
    assert (restored.record.object_count, restored.record.object_bytes) == (1, len(HUGE))
    assert (restored.record.name, restored.chunks) == (planned.record.name, planned.chunks)


@pytest.mark.thorough
@pytest.mark.parametrize("missing", sampled(range(4), every=4))
def test_parts_of_which_the_store_lacks_one_are_no_object(several, lost, missing):
    archive_everything(several)
    several.store.forget(several.ledger.lookup.locate("src", "huge").ranges[missing].posting)
    context = lost()
    list(rebuild(context))
    assert is_nowhere(context)
    assert plan(context).plan.object_count == 1


@pytest.mark.thorough
def test_parts_of_two_plans_are_never_mixed(several, lost):
    plan(several)
    first = parts_of(several)
    for name in first[:3]:
        archive_chunk(several, name)
    chunk_steps.withdraw(several, first[3])
    again = plan(several)
    for chunk in again.chunks[3:]:
        archive_chunk(several, chunk.name)
    context = lost()
    list(rebuild(context))
    assert is_nowhere(context)  # parts 1 to 3 of one plan, part 4 of another
    for chunk in again.chunks[:3]:
        archive_chunk(several, chunk.name)
    list(rebuild(context))
    assert [part.chunk for part in context.ledger.lookup.locate("src", "huge").ranges] == [
        chunk.name for chunk in again.chunks
    ]
    assert object_bytes(context, "huge") == HUGE
    assert [chunk.part for chunk in plan(context).chunks] == [0]


@pytest.mark.thorough
def test_the_doctor_has_nothing_to_say_of_parts(several):
    plan(several)
    names = parts_of(several)
    for name in names[:2]:
        archive_chunk(several, name)
    archive_chunk(several, names[2], until=chunk_steps.seal_chunk)
    assert [
        rows
        for rows in several.ledger.stray_rows.by_chunk("src")
        if rows.claims and rows.state is ChunkState.LOCATED
    ] == []
    assert [
        several.ledger.stray_rows.drop(rows.caf_file_id)
        for rows in several.ledger.stray_rows.by_chunk("src")
    ] == [0] * 5
    for name in [*names[2:], *whole_chunks(several)]:
        archive_chunk(several, name)
    assert several.ledger.lookup.locate("src", "huge")


# --- S3 -------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("versions", [True, False], ids=["versions", "no versions"])
def test_parts_are_read_by_range_bound_to_content(tmp_path, new_bucket, ledger, versions):
    if versions:
        new_bucket.keep_versions()
    new_bucket.put("huge", HUGE)
    context = a_run_context(tmp_path, new_bucket.source(), ledger, target="128KiB")
    plan(context)
    names = parts_of(context)
    archive_chunk(context, names[0])
    new_bucket.put("huge", HUGE[::-1])
    for name in names[1:]:
        archive_chunk(context, name)
    if versions:  # the version that was planned is still there
        assert object_bytes(context, "huge") == HUGE
    else:
        assert ledger.lookup.locate("src", "huge") is None
    archive_everything(context)
    assert object_bytes(context, "huge") == HUGE[::-1]
