"""The doctor: every leftover of a crash is reported, mended, and gone afterwards.

Processes that are really killed make the leftovers, if a crash can make them at all.
"""

import os
import time
from contextlib import contextmanager
from dataclasses import replace

import psycopg
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import HeldByOther
from caf_pipeline.ledger.chunk_moves import ChunkMoves
from caf_pipeline.ledger.sources import Plans
from caf_pipeline.maintenance.deletion.assessment import ProgressReporter
from caf_pipeline.maintenance.doctor import examine, findings
from caf_pipeline.maintenance.doctor.findings import Actor, Kind
from caf_pipeline.steps import chunk_steps
from caf_pipeline.steps.inventories import take_inventory
from caf_pipeline.steps.planning import account_for, cut_plan
from caf_pipeline.system.processes import this_process
from caf_pipeline_tests.support import steady_source
from caf_pipeline_tests.support.doctors import (
    doctor_process,
    everything,
    examined,
    found,
    holding,
    killed_holding,
    mended,
)
from caf_pipeline_tests.support.kills import KILLED, Fatal, call
from caf_pipeline_tests.support.ledger_rows import settled
from caf_pipeline_tests.support.new_ledgers import new_ledger  # noqa: F401 - a fixture
from caf_pipeline_tests.support.run_contexts import (
    a_run_context,
    archive_chunk,
    archive_everything,
    every_object_reads_back,
    plan,
)
from caf_pipeline_tests.support.tiers import sampled

pytestmark = pytest.mark.thorough

EVERY = int(os.environ.get("CAF_TEST_KILL_EVERY", "12"))
"""Kill the doctor at every n-th moment."""

S = ChunkState


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch):
    monkeypatch.setattr(
        findings, "BETWEEN_STEPS_SECONDS", 0.05
    )  # runs of these tests are between two steps only shortly


@pytest.fixture
def context(tmp_path, ledger):
    """Return a run context of one chunk, in a folder store."""
    return a_run_context(tmp_path, steady_source.a_steady_source(), ledger, target="8MiB")


@pytest.fixture
def name(context):
    """Return its planned chunk."""
    (chunk,) = plan(context).chunks
    return chunk.name


@pytest.fixture
def found_then_mended(context, tmp_path, database_url):
    """Return a function that checks findings: reported unchanged, then mended, then gone."""

    def check(*expected, context=context):
        before = everything(tmp_path, database_url)
        assert sorted(found(context)) == sorted(expected)
        assert everything(tmp_path, database_url) == before
        done = mended(context)
        assert found(context) == []
        return {(kind, name): what for kind, name, what in done}

    return check


def sql(url, statement):
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


def touch(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"left")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_source_in_good_order_gives_no_finding(context):
    archive_everything(context)
    assert found(context, reported=True) == []


def test_all_bytes_of_a_bar_are_counted(context, monkeypatch):
    monkeypatch.setattr(examine, "_MANY_OBJECTS", 1)
    (name,) = archive_everything(context)
    plan(context)  # keeps rows of the ledger
    notes, done = [], {}

    @contextmanager
    def progress(title, total_bytes):
        done[title] = [total_bytes]
        yield done[title].append

    reporter = ProgressReporter(notes.append, progress)
    assert list(examine.examine(context, alive=lambda holder: None, reporter=reporter)) == []
    kept_bytes = sum(path.stat().st_size for path in context.kept_locations().iterdir())
    stored_bytes = context.ledger.chunks.get(name).stored_size_bytes
    assert [total for total, *_ in done.values()] == [kept_bytes, stored_bytes]
    assert all(total == sum(parts) for total, *parts in done.values())
    assert len(notes) == 1


# --- leases
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["chunk", "plan/src", "account/jackal-1/jkl1x"])
def test_lease_of_a_killed_process_is_released(name, found_then_mended, database_url, ledger, what):
    what = f"chunk/{name}" if what == "chunk" else what
    killed_holding(database_url, what)
    (dead,) = ledger.leases.list()
    assert found_then_mended((Kind.LEASE, what)) == {(Kind.LEASE, what): "given back"}
    assert ledger.leases.list() == []
    with ledger.leases.hold(what, this_process("next")) as lease:
        assert lease.epoch > dead.epoch


def test_expired_lease_of_another_machine_is_released(
    context, found_then_mended, database_url, ledger
):
    with ledger.leases.hold(
        "plan/src", replace(this_process("far away"), boot_id="another machine")
    ):
        assert found(context, reported=True) == []
        sql(database_url, "UPDATE leases SET expires_at = now() - interval '1 s'")
        found_then_mended((Kind.LEASE, "plan/src"))


@pytest.mark.parametrize("paused", [False, True])
def test_lease_of_a_live_or_paused_process_stays(context, database_url, ledger, paused):
    with holding(database_url, "plan/src", seconds=0.5 if paused else 600) as holder:
        if paused:
            holder.pause()
            while any(lease.live for lease in ledger.leases.list()):
                time.sleep(0.05)
        (lease,) = ledger.leases.list()
        assert found(context) == []
        assert found(context, reported=True) == ([(Kind.LEASE, "plan/src")] if paused else [])
        assert not ledger.leases.end("plan/src", lease.epoch)
        assert ledger.leases.list() == [lease]
        holder.resume()
        if paused:  # it renews its lease
            while not any(lease.live for lease in ledger.leases.list()):
                time.sleep(0.05)
        assert holder.keeps_its_lease()


# --- the staging folder
# ------------------------------------------------------------------------------------------


def test_files_of_a_withdrawn_chunk_are_removed(context, name, found_then_mended):
    chunk_steps.withdraw(context, name)
    left = [
        f"{name}.{ending}" for ending in ("1.part", "1.journal", "1.packed", "packed.json", "caf")
    ]
    touch(context.staging(), *left)
    found_then_mended(*((Kind.STAGED, file) for file in left))
    assert names(context.staging()) == []


def test_leftovers_of_a_located_chunk_are_removed(
    context, name, found_then_mended, tmp_path, database_url
):
    located = Fatal(call(ChunkMoves.load_locations), 2)
    assert steady_source.run(tmp_path, database_url, name, fatal=located) == KILLED
    touch(context.staging(), f"{name}.1.download")
    assert context.ledger.chunks.get(name).state is S.LOCATED
    done = found_then_mended(
        (Kind.LEASE, f"chunk/{name}"),
        # The sealed file is removed in time anyway.
        *((Kind.STAGED, file) for file in names(context.staging()) if not file.endswith(".caf")),
        (Kind.RESERVATION, name),
    )
    assert set(done.values()) == {"given back", "removed"}
    assert names(context.staging()) == []


def test_leftovers_of_a_sealed_chunk_are_removed_except_its_file(context, name, found_then_mended):
    archive_chunk(context, name, until=chunk_steps.seal_chunk)
    before = names(context.staging())
    left = [
        f"{name}.1.{ending}"
        for ending in ("part", "journal", "copy", "manifest", "packed", "download")
    ]
    touch(context.staging(), *left)
    found_then_mended(*((Kind.STAGED, file) for file in left))
    assert names(context.staging()) == before
    archive_chunk(context, name)
    every_object_reads_back(context)


def test_a_killed_packing_is_left_to_the_next_run(context, name, tmp_path, database_url):
    steady_source.run(tmp_path, database_url, name, fatal=Fatal("pack_chunk", 30))
    chunk = context.ledger.chunks.get(name)
    assert chunk.state is S.PACKING
    kept = [each for each in names(context.staging()) if not each.endswith((".manifest", ".json"))]
    assert kept
    mended(context)
    assert [each for each in names(context.staging()) if each in kept] == kept
    (finding,) = [one for one in examined(context) if one.actor is Actor.RUN]
    assert (finding.kind, finding.name) == (Kind.CHUNK, name)
    assert "caf run src" in finding.remedy
    archive_chunk(context, name)
    every_object_reads_back(context)


def test_foreign_files_are_reported_and_stay(context, name):
    touch(context.staging(), "notes.txt", "other-00000000-00001.1.part")
    (context.staging() / "folder").mkdir()
    findings = [finding for finding in examined(context) if finding.kind is Kind.STAGED]
    assert {finding.actor for finding in findings} == {Actor.NOBODY}
    assert [finding.name for finding in findings] == [
        "folder",
        "notes.txt",
        "other-00000000-00001.1.part",
    ]


def test_packing_of_an_unknown_chunk_is_removed(context, found_then_mended):
    whole = [
        "src-00000000-00001.caf",
        "src-00000000-00002.1.packed",
        "src-00000000-00002.packed.json",
    ]
    touch(context.staging(), "src-00000000-00001.1.part", *whole)
    found_then_mended((Kind.STAGED, "src-00000000-00001.1.part"))
    assert [(finding.name, finding.actor) for finding in examined(context)] == [
        (each, Actor.OPERATOR) for each in whole
    ]
    assert names(context.staging()) == whole


def test_staging_files_of_a_live_run_stay(context, name, database_url):
    archive_chunk(context, name, until=chunk_steps.seal_chunk)
    with holding(database_url, f"chunk/{name}"):
        touch(context.staging(), f"{name}.1.part")
        assert found(context, reported=True) == []


def test_files_of_a_run_between_steps_stay(context, name, monkeypatch):
    archive_chunk(context, name, until=chunk_steps.load_locations)
    touch(context.staging(), f"{name}.packed.json")

    def goes_on(_):
        archive_chunk(context, name)

    monkeypatch.setattr(findings.time, "sleep", goes_on)
    assert found(context) == []


def test_run_that_begins_during_the_repair_keeps_its_files(context, name, database_url):
    chunk_steps.withdraw(context, name)
    touch(context.staging(), f"{name}.1.part")
    (finding,) = examined(context)
    with holding(database_url, f"chunk/{name}"), pytest.raises(HeldByOther):
        finding.mend()
    assert names(context.staging()) == [f"{name}.1.part"]


def test_reservation_without_files_is_released(context, name, found_then_mended):
    with context.ledger.leases.hold(f"chunk/{name}", context.holder) as lease:
        context.ledger.staging.reserve(lease, name, str(context.staging()), 1000, 0)
    found_then_mended((Kind.RESERVATION, name))
    assert context.ledger.staging.list() == []


def test_a_reservation_of_a_packing_that_goes_on_is_left(context, name):
    with context.ledger.leases.hold(f"chunk/{name}", context.holder) as lease:
        context.ledger.staging.reserve(lease, name, str(context.staging()), 1000, 0)
    touch(context.staging(), f"{name}.1.part", f"{name}.1.journal")
    assert found(context) == []


# --- plans, half copies
# ---------------------------------------------------------------------------------


def test_first_copy_stays_after_ordering_a_second(context, tmp_path, new_ledger):
    (name,) = archive_everything(context)
    with context.ledger.leases.hold(f"chunk/{name}", context.holder) as lease:
        context.ledger.moves.move(lease, name, S.LOCATED, S.DAMAGED, reason="lost")
        context.ledger.moves.move(lease, name, S.DAMAGED, S.WITHDRAWN)
    lost = a_run_context(
        tmp_path, context.objects, new_ledger(), target="8MiB", packing={"part_size": "128KiB"}
    )
    lost.objects.bodies = dict(context.objects.bodies) | {"later": b"x"}  # for another plan
    archive_everything(lost)
    assert mended(lost) == []
    assert len(lost.ledger.chunks.list()) == 1


def test_a_plan_that_is_cut_at_this_moment_is_left(context, database_url, monkeypatch):
    seen = []
    original = Plans.register
    monkeypatch.setattr(
        Plans,
        "register",
        lambda *given: (seen.append(found(context, reported=True)), original(*given))[1],
    )
    cut_plan(context, take_inventory(context))
    assert seen == [[]]


def test_half_copy_in_a_folder_store_is_removed(context, name, found_then_mended, database_url):
    archive_chunk(context, name, until=chunk_steps.post_file)
    chunks = context.store.folder / "chunks"
    left = chunks / f".part-{context.ledger.chunks.get(name).merkle_root.hex()}.caf-abc"
    touch(chunks, left.name)
    with holding(database_url, f"chunk/{name}"):
        assert found(context) == []
    killed_holding(database_url, f"chunk/{name}")
    found_then_mended((Kind.LEASE, f"chunk/{name}"), (Kind.LEFTOVER, str(left)))
    assert names(chunks) == []


# --- rows
# ------------------------------------------------------------------------------------------


def test_rows_of_unknown_chunks_are_removed(context, name, found_then_mended, database_url):
    archive_chunk(context, name)
    sql(
        database_url,
        "INSERT INTO file_locations (source_id, file_path, version_id, etag, size_bytes, "
        "caf_file_id, start_byte, end_byte,"
        " last_modified, sha256) SELECT source_id, 'stray', 'v', '', 0, 999, 0, 0, now(), '' FROM "
        "sources",
    )
    sql(
        database_url,
        "INSERT INTO claims (source_id, file_path, version_id, etag, size_bytes, caf_file_id)"
        " SELECT source_id, 'stray', 'v', '', 0, 999 FROM sources",
    )
    found_then_mended((Kind.ROWS, "src, chunk number 999 of the table"))
    every_object_reads_back(context)


def test_claims_of_a_chunk_that_claims_nothing_are_ended(
    context, name, found_then_mended, database_url
):
    chunk_steps.withdraw(context, name)
    sql(
        database_url,
        "INSERT INTO claims (source_id, file_path, version_id, etag, size_bytes, caf_file_id)"
        " SELECT source_id, 'stray', 'v', '', 0, caf_file_id FROM caf_files",
    )
    found_then_mended((Kind.ROWS, name))
    assert settled(context.ledger, [("stray", "v")]) == set()


def test_rows_of_lost_chunks_stay_as_history(context, name, tmp_path, database_url):
    archive_chunk(context, name)
    for state in (S.DAMAGED, S.WITHDRAWN):
        with context.ledger.leases.hold(f"chunk/{name}", context.holder) as lease:
            context.ledger.moves.move(
                lease, name, context.ledger.chunks.get(name).state, state, reason="lost"
            )
        before = everything(tmp_path, database_url)["file_locations"]
        assert Kind.ROWS not in {kind for kind, _ in found(context, reported=True)}
        assert everything(tmp_path, database_url)["file_locations"] == before


def test_chunk_with_too_few_locations_is_reported(context, name, database_url):
    archive_chunk(context, name)
    sql(database_url, "DELETE FROM file_locations WHERE file_path = 'key-007'")
    (finding,) = examined(context)
    assert (finding.kind, finding.name, finding.actor) == (Kind.ROWS, name, Actor.OPERATOR)
    assert finding.problem == "59 of 60 locations"


def test_outdated_kept_locations_are_removed(context, name, found_then_mended, database_url):
    archive_chunk(context, name)
    assert account_for(context, take_inventory(context)).holds
    lie = "etag = 'other'"
    sql(database_url, f"UPDATE file_locations SET {lie} WHERE file_path = 'key-007'")
    folder = context.kept_locations()
    assert found_then_mended((Kind.ROWS, str(folder))) == {(Kind.ROWS, str(folder)): "removed"}
    assert account_for(context, take_inventory(context)).unaccounted == 1


# --- chunks
# ------------------------------------------------------------------------------------------


def test_unlisted_located_chunk_becomes_damaged(context, name, found_then_mended):
    archive_chunk(context, name)
    for path in (context.store.folder / "chunks").iterdir():
        path.unlink()
    done = found_then_mended((Kind.COPIES, name))
    assert f"caf repair {name}" in done[Kind.COPIES, name]
    assert context.ledger.chunks.get(name).state is S.DAMAGED
    (finding,) = examined(context)
    assert (finding.kind, finding.actor) == (Kind.COPIES, Actor.OPERATOR)


def test_parked_chunk_is_reported_with_a_hint(context, name):
    chunk_steps.park(context, name, "failed")
    (finding,) = examined(context)
    assert (finding.actor, finding.problem) == (Actor.OPERATOR, "parked: failed")
    assert f"caf unpark {name}" in finding.remedy


def test_planned_chunks_are_reported_in_one_line(context, name):
    (finding,) = examined(context)
    assert (finding.kind, finding.name, finding.actor) == (Kind.CHUNK, "src", Actor.RUN)


@pytest.mark.parametrize(
    "step",
    [
        chunk_steps.load_batch,
        chunk_steps.seal_chunk,
        chunk_steps.post_file,
        chunk_steps.verify_stored,
    ],
)
def test_abandoned_run_is_reported_with_its_next_step(context, name, step):
    archive_chunk(context, name, until=step)
    (finding,) = examined(context)
    assert (finding.kind, finding.name, finding.actor) == (Kind.CHUNK, name, Actor.RUN)


# --- the doctor itself
# ------------------------------------------------------------------------------------------


@pytest.fixture
def wrecked(context, name, database_url):
    """Return a source with every kind of leftover, and a check of the mended source."""
    archive_chunk(context, name)
    touch(
        context.staging(),
        f"{name}.1.part",
        f"{name}.1.journal",
        f"{name}.caf",
        "src-00000000-00001.1.part",
        "notes.txt",
    )
    touch(
        context.store.folder / "chunks",
        f".part-{context.ledger.chunks.get(name).merkle_root.hex()}.caf-abc",
    )
    with context.ledger.leases.hold(f"chunk/{name}", context.holder) as lease:
        context.ledger.staging.reserve(lease, name, str(context.staging()), 1000, 0)
    sql(
        database_url,
        "INSERT INTO claims (source_id, file_path, version_id, etag, size_bytes, caf_file_id)"
        " SELECT source_id, 'stray', 'v', '', 0, 999 FROM sources",
    )
    sql(
        database_url,
        "INSERT INTO claims (source_id, file_path, version_id, etag, size_bytes, caf_file_id)"
        " SELECT source_id, 'stray', 'w', '', 0, caf_file_id FROM caf_files",
    )
    killed_holding(database_url, "plan/src")
    killed_holding(database_url, f"chunk/{name}")

    def is_right():
        assert found(context) == []
        assert names(context.staging()) == ["notes.txt"]
        assert len(names(context.store.folder / "chunks")) == 1
        assert context.ledger.staging.list() == context.ledger.leases.list() == []
        assert [
            (rows.locations, rows.claims) for rows in context.ledger.stray_rows.by_chunk("src")
        ] == [(60, 0)]
        every_object_reads_back(context)

    return is_right


@pytest.mark.parametrize("fatal", sampled(range(1, 40, EVERY), every=4))
def test_killed_doctor_is_completed_by_the_next(wrecked, context, tmp_path, database_url, fatal):
    doctor = doctor_process(tmp_path, database_url, fatal=Fatal("", fatal))
    assert doctor.wait() == KILLED
    mended(context)
    wrecked()


def test_concurrent_doctors_do_no_harm(wrecked, context, tmp_path, database_url):
    doctors = [doctor_process(tmp_path, database_url) for _ in range(2)]
    assert [doctor.wait() for doctor in doctors] == [0, 0]
    mended(context)  # one doctor left alone what the other held
    wrecked()
