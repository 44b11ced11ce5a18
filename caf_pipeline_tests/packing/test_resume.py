"""Interrupted packings are resumed: same bytes, few repeated requests."""

import contextlib
import errno
import itertools
import os
import signal
import zlib
from pathlib import Path

import pytest

from caf_pipeline.caf.merkle import merkle_root
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import CafError, LeaseLost, ObjectReadFailed, RootRefused, StagingError
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.inventory.plan import read_chunk_objects, read_chunk_plan
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import chunk_lease
from caf_pipeline.packing import pack_chunk
from caf_pipeline.packing.journal.format import Journal
from caf_pipeline.packing.journal.takeover import find_resumable_part
from caf_pipeline.packing.journal.writer import (
    MAX_LOST_BYTES,
    MIN_AHEAD_BYTES,
    CheckpointPace,
    Checkpoints,
    pace_of,
    part_of,
    window_of,
)
from caf_pipeline.packing.sink import PartFile
from caf_pipeline.packing.staging import leftovers, staged_path
from caf_pipeline.reading.chunk_reader import ChunkFile, StagedSource
from caf_pipeline.settings import PackingSettings
from caf_pipeline.source.protocol import Checksum
from caf_pipeline.steps import chunk_steps
from caf_pipeline_tests.support import steady_source
from caf_pipeline_tests.support.broken_packings import broken_chunk
from caf_pipeline_tests.support.journaled_packing import PART, SETTINGS, Broken, Packing, a_source
from caf_pipeline_tests.support.kills import KILLED, Fatal, call
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_chunk, plan
from caf_pipeline_tests.support.steady_source import SteadySource, a_steady_source, ends_right

VECTORS = Path(__file__).parents[1] / "vectors"
SCALED = CheckpointPace(due_bytes=4 * PART, due_outcomes=1000, ahead_bytes=8 * PART)


def undisturbed(folder, source, **changes):
    packing = Packing(folder, source, **changes)
    return packing, packing.run()


def broken_off(folder, source, after, **changes):
    """A killed packing: its files end at the last checkpoint, its space is still reserved."""
    packing = Packing(folder, source, **changes)
    with pytest.raises(Broken):
        packing.run(break_after=after)
    os.truncate(packing.part, 1 << 20)
    return packing


# --- the same bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(1, 21, 6))
def test_a_resumed_chunk_is_that_of_an_undisturbed_packing(tmp_path, after):
    first, packed = undisturbed(tmp_path / "whole", a_source())
    second = broken_off(tmp_path / "broken", a_source(), after)
    resumed = second.run()
    assert second.part.read_bytes() == first.part.read_bytes()
    assert resumed.merkle_root == packed.merkle_root
    assert (resumed.member_count, resumed.member_bytes) == (
        packed.member_count,
        packed.member_bytes,
    )
    assert resumed.resumed_bytes > 512


@pytest.mark.parametrize("after", [3, 9, 17])
def test_a_resumed_chunk_tells_the_times_of_the_same_logs(tmp_path, after):
    log = (VECTORS / "clps" / "two_files_0.12.1b0.clps").read_bytes()
    untimed = (VECTORS / "clps" / "no_timestamp_key.clps").read_bytes()

    def source():
        made = a_source()
        return SteadySource(
            made.bodies
            | {
                "a001-log": log,
                "a010": log[:100],
                "b-large": log + made.bodies["b-large"],
                "d": untimed,
            }
        )

    first, packed = undisturbed(tmp_path / "whole", source())
    second = broken_off(tmp_path / "broken", source(), after)
    assert second.run().merkle_root == packed.merkle_root
    assert second.part.read_bytes() == first.part.read_bytes()
    manifest = ChunkFile(StagedSource(first.part), "it").manifest(packed.tail_start)
    members = {row["start_byte"]: row["key"] for row in manifest.rows(("key", "start_byte"))}
    log_times = {
        members[archive.start_byte]: (archive.first_ms, archive.last_ms)
        for archive in manifest.logs()
    }
    times = (1_700_000_000_000, 1_700_001_009_500)
    assert log_times == {
        "a001-log": times,
        "a010": (None, None),
        "b-large": times,
        "d": (None, None),
    }


def test_a_resumed_chunk_has_every_header_and_skip(tmp_path):
    def source():
        made = a_source()
        made.headers = {
            key: ObjectHeaders(
                content_type=f"text/{number}", user_metadata={"n": str(number), "a": "æ"}
            )
            for number, key in enumerate(made.bodies)
        }
        made.unavailable = {"a003": (SkipReason.CHANGED, -1), "a007": (SkipReason.COLD_STORAGE, -1)}
        return made

    first, _ = undisturbed(tmp_path / "whole", source())
    second = broken_off(tmp_path / "broken", source(), 10)
    assert second.run().skipped_count == 2
    assert second.part.read_bytes() == first.part.read_bytes()


@pytest.mark.thorough
def test_chunk_of_several_row_groups_survives_kill_in_each(tmp_path):
    chance = {f"k{number:05d}": b"%d" % number for number in range(9000)}
    first, _ = undisturbed(tmp_path / "whole", SteadySource(chance), pace=CheckpointPace())
    second = broken_off(
        tmp_path / "broken", SteadySource(chance), 1500, pace=CheckpointPace(due_outcomes=500)
    )
    for after in (2500, 4000):
        with pytest.raises(Broken):
            second.run(break_after=after)
    second.run()
    assert second.part.read_bytes() == first.part.read_bytes()


def test_progress_counts_resumed_objects_too(tmp_path):
    packing = broken_off(tmp_path, a_source(), 10)
    packing.run()
    assert sum(objects for objects, _ in packing.told) == len(packing.source.bodies)


def test_second_ctrl_c_during_last_checkpoint_keeps_safe_bytes(tmp_path, monkeypatch):
    packing = Packing(tmp_path, a_source())
    packer = packing.packer(break_after=10)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "end", interrupted)
    journal = Journal.open(packing.journal, packer.opening)
    with pytest.raises(KeyboardInterrupt):
        packer.pack(
            read_chunk_objects(packing.plan.folder, 1),
            PartFile.create(packing.part),
            tmp_path / "chunk.manifest",
            journal,
        )
    journal.close()
    assert packer.kept_bytes > 512  # tells the caller to keep the files
    monkeypatch.undo()
    assert packing.run().resumed_bytes == packer.kept_bytes


def test_packing_without_journal_starts_again_and_reports_why(tmp_path):
    packing = broken_off(tmp_path, a_source(), 15)
    packing.journal.write_bytes(b"of a version that nobody knows")
    packed = packing.run()
    assert (packed.resumed_bytes, packed.fetched_bytes) == (0, packed.member_bytes)
    assert "opening" in packed.not_resumed


# --- inside a large object ------------------------------------------------------------------------


def in_the_middle(folder, source=None):
    """Interrupted behind three of the large object's six parts."""
    packing = Packing(folder, source or a_source())
    packing.source.failing = {"b-large": 3 * PART + 1}
    with pytest.raises(ObjectReadFailed):
        packing.run()
    packing.source.failing = {}
    return packing


def test_large_object_resumes_at_first_missing_byte(tmp_path):
    first, _ = undisturbed(tmp_path / "whole", a_source())
    packing = in_the_middle(tmp_path / "broken")
    packing.run()
    assert min(start for key, start, _ in packing.source.reads if key == "b-large") == 3 * PART
    assert packing.part.read_bytes() == first.part.read_bytes()


def test_resumed_object_may_continue_in_other_parts(tmp_path):
    first, _ = undisturbed(tmp_path / "whole", a_source())
    packing = in_the_middle(tmp_path / "broken")
    packing.settings = SETTINGS.model_copy(update={"part_size": 1 << 20})
    packing.run()
    assert packing.part.read_bytes() == first.part.read_bytes()


@pytest.mark.parametrize("reason", [SkipReason.CHANGED, SkipReason.DELETED])
def test_changed_resumed_object_leaves_no_byte(tmp_path, reason):
    gone = a_source()
    gone.unavailable = {"b-large": (reason, 4 * PART)}
    first, _ = undisturbed(tmp_path / "whole", gone)
    packing = in_the_middle(tmp_path / "broken")
    packing.source.unavailable = {"b-large": (reason, 4 * PART)}
    packed = packing.run()
    assert packed.skipped_count == 1
    assert packing.part.read_bytes() == first.part.read_bytes()
    assert packed.merkle_root == merkle_root(packing.part, 3)


@pytest.mark.parametrize("after", [1, 4, 9])
def test_kill_after_rollback_of_large_object_resumes_its_skip(tmp_path, after):
    gone = a_source()
    gone.unavailable = {"b-large": (SkipReason.CHANGED, 4 * PART)}
    first, _ = undisturbed(tmp_path / "whole", gone)
    packing = in_the_middle(tmp_path / "broken")
    packing.source.unavailable = gone.unavailable
    with pytest.raises(Broken):
        packing.run(break_after=after)
    packing.run()
    assert packing.part.read_bytes() == first.part.read_bytes()


@pytest.mark.parametrize("begun", ["in the run before", "in the same run"])
def test_members_behind_rolled_back_object_are_resumed(tmp_path, begun):
    gone = a_source()
    gone.unavailable = {"b-large": (SkipReason.CHANGED, 4 * PART)}
    packing = (
        in_the_middle(tmp_path) if begun == "in the run before" else Packing(tmp_path, a_source())
    )
    packing.source.unavailable = gone.unavailable
    whole = packing.run()
    finished = packing.part.read_bytes()
    again = packing.run()
    assert (again.not_resumed, again.merkle_root) == ("", whole.merkle_root)
    assert (packing.source.reads, packing.part.read_bytes()) == ([], finished)


def test_damage_behind_rolled_back_object_costs_only_what_follows(tmp_path):
    packing = Packing(tmp_path, a_source())
    packing.source.unavailable = {"b-large": (SkipReason.CHANGED, 4 * PART)}
    packing.run()
    finished = packing.part.read_bytes()
    for key in ("c000", "a003", "c001"):
        at = finished.index(packing.source.bodies[key])
        packing.put(
            finished[:at] + bytes([finished[at] ^ 1]) + finished[at + 1 :],
            packing.journal.read_bytes(),
        )
        assert packing.run().resumed_bytes == at
        assert packing.part.read_bytes() == finished


def with_checksum(digest=None):
    source = a_source()
    right = zlib.crc32(source.bodies["b-large"]).to_bytes(4, "big")
    source.checksums["b-large"] = Checksum("crc32", digest or right)
    return source


def test_s3s_own_checksum_is_compared_over_a_resumed_object(tmp_path):
    packing = in_the_middle(tmp_path / "right", with_checksum())
    assert packing.run().skipped_count == 0
    packing = in_the_middle(tmp_path / "wrong", with_checksum(b"\0\0\0\0"))
    with pytest.raises(ObjectReadFailed, match="crc32"):
        packing.run()


def test_object_with_wrong_checksum_is_fetched_again_from_start(tmp_path):
    packing = in_the_middle(tmp_path, with_checksum(b"\0\0\0\0"))
    with pytest.raises(ObjectReadFailed):
        packing.run()
    packing.source.checksums = with_checksum().checksums
    packing.run()
    assert ("b-large", 0, PART) in packing.source.reads


# --- how much is fetched twice --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "part"), [("64MiB", "8MiB"), ("1GiB", "16MiB"), ("1GiB", "1GiB"), ("1MiB", "64KiB")]
)
def test_what_a_kill_costs_is_bounded_whatever_the_settings(window, part):
    settings = PackingSettings.model_validate({"window_size": window, "part_size": part})
    pace = pace_of(settings)
    assert window_of(settings) + pace.ahead_bytes + 2 * part_of(settings) <= MAX_LOST_BYTES
    assert pace.ahead_bytes >= MIN_AHEAD_BYTES
    assert window_of(settings) >= part_of(settings)
    assert pace.due_seconds + pace.ahead_seconds <= 11


@pytest.mark.parametrize("after", [20, 80])
def test_kill_loses_at_most_unsafe_bytes_and_window(tmp_path, after):
    source = a_source(small=200, large=40)
    packing = Packing(tmp_path, source, pace=SCALED)
    with pytest.raises(Broken):
        packing.run(break_after=after)
    first = packing.read_bytes()
    packing.run()
    size_bytes = sum(map(len, source.bodies.values()))
    window = SETTINGS.window_size
    assert first + packing.read_bytes() - size_bytes <= SCALED.ahead_bytes + window + 2 * PART


# --- real kills -----------------------------------------------------------------------------------


@pytest.fixture
def context(tmp_path, ledger):
    return a_run_context(tmp_path, a_steady_source(), ledger, target="8MiB")


def root_of_undisturbed(context, name, folder):
    chunk = context.ledger.chunks.get(name)
    with context.ledger.leases.hold(chunk_lease(name), context.holder) as lease:
        packer = pack_chunk.packer_of(
            context, lease, chunk, read_chunk_plan(Path(chunk.plan_folder), chunk.number)
        )
        objects = read_chunk_objects(Path(chunk.plan_folder), chunk.number)
        part, journal = (
            PartFile.create(folder / "undisturbed"),
            Journal.open(folder / "undisturbed.journal", packer.opening),
        )
        try:
            return packer.pack(objects, part, folder / "manifest", journal).merkle_root
        finally:
            journal.close()


def safe_bytes(context, name):
    """Return the bytes that a next run would resume."""
    chunk = context.ledger.chunks.get(name)
    packer = pack_chunk.packer_of(
        context, None, chunk, read_chunk_plan(Path(chunk.plan_folder), chunk.number)
    )
    part, _ = find_resumable_part(leftovers(context, name))
    journal = Journal.open(part.path.with_suffix(".journal"), packer.opening)
    try:
        return max(
            checkpoint.durable_bytes
            for _, checkpoint in journal.checkpoints()
            if checkpoint.durable_bytes <= part.size_bytes
        )
    finally:
        journal.close()
        part.close()


@pytest.mark.thorough
@pytest.mark.parametrize("moment", range(1, 40, 8))
def test_run_killed_while_resuming_keeps_all_safe_bytes(context, tmp_path, database_url, moment):
    (chunk,) = plan(context).chunks
    fatal = Fatal("pack_chunk", 120)
    assert steady_source.run(tmp_path, database_url, chunk.name, fatal=fatal) == KILLED
    before = safe_bytes(context, chunk.name)
    assert before > 500_000
    fatal = Fatal("pack_chunk", moment)
    assert steady_source.run(tmp_path, database_url, chunk.name, fatal=fatal) == KILLED
    assert safe_bytes(context, chunk.name) >= before
    steady_source.run(tmp_path, database_url, chunk.name)
    ends_right(context, chunk.name)
    assert context.ledger.chunks.get(chunk.name).merkle_root == root_of_undisturbed(
        context, chunk.name, tmp_path
    )


READ = Fatal(call(SteadySource.read), 81, signal.SIGSTOP)
TAKEN_OVER = Fatal("caf_pipeline.packing.pack_chunk:take_over", 2, signal.SIGSTOP)


@pytest.fixture
def second(tmp_path, database):
    """A run context of a second run, whose lease and that of the first are short."""
    ledger = Ledger(database, lease_seconds=1.5)
    return a_run_context(tmp_path, a_steady_source(), ledger, run="second", target="8MiB")


@pytest.fixture
def paused(tmp_path, database_url):
    """Starts a run of a chunk and waits until it is paused."""
    with contextlib.ExitStack() as stack:

        def start(chunk, fatal):
            named = {"fatal": fatal, "lease_seconds": 1.5}
            run = steady_source.start_run(tmp_path, database_url, chunk, **named)
            stack.enter_context(run).wait_until_paused()
            assert run.runs
            return run

        yield start


def woken(run):
    run.resume()
    return run.answer.error


def wake_at_first_read(source, run):
    """Let a paused run end when the source is first read; return a list for its error."""
    original, errors, reads = source.read, [], itertools.count()

    def read(obj, start_byte, end_byte):
        if not next(reads):  # several threads fetch
            errors.append(woken(run))
        return original(obj, start_byte, end_byte)

    source.read = read
    return errors


@pytest.mark.thorough
def test_suspended_run_without_lease_changes_nothing(second, paused):
    (chunk,) = plan(second).chunks
    run = paused(chunk.name, READ)
    archive_chunk(second, chunk.name, until=chunk_steps.seal_chunk)
    report = chunk_steps.seal_chunk(second, chunk.name)
    assert report.resumed_bytes > 512  # its writer was alive, so it was copied
    before = staged_path(second, chunk.name).read_bytes()
    assert woken(run) == "LeaseLost"
    assert staged_path(second, chunk.name).read_bytes() == before
    archive_chunk(second, chunk.name)
    ends_right(second, chunk.name)


@pytest.mark.thorough
def test_suspended_run_shares_no_byte_with_next_packing(second, paused):
    (chunk,) = plan(second).chunks
    errors = wake_at_first_read(second.objects, paused(chunk.name, READ))
    archive_chunk(second, chunk.name)
    assert errors == ["LeaseLost"]
    ends_right(second, chunk.name)


@pytest.mark.thorough
def test_suspended_run_removes_no_file_of_the_next(second, paused):
    name = broken_chunk(second).name
    errors = wake_at_first_read(second.objects, paused(name, TAKEN_OVER))
    archive_chunk(second, name, until=chunk_steps.seal_chunk)
    assert errors == ["LeaseLost"]
    assert chunk_steps.seal_chunk(second, name).resumed_bytes > 1_000_000
    assert [file.kind for file in leftovers(second, name)] == ["sealed", "record"]


def refused_by_staging(context, name, error, *, slept):
    with chunk_steps.lease_chunk(context, name, though_paused=True) as lease:
        if slept:
            lease._good_until = 0.0
        raise error


@pytest.mark.thorough
@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), StagingError("gone")])
def test_staging_error_after_lost_lease_is_reported_as_lost_lease(context, error):
    (chunk,) = plan(context).chunks
    with pytest.raises(LeaseLost):
        refused_by_staging(context, chunk.name, error, slept=True)
    with pytest.raises(StagingError):
        refused_by_staging(context, chunk.name, error, slept=False)


# --- full disks, and what others leave in staging -------------------------------------------------


def test_full_disk_during_journaling_ends_packing_without_loss(tmp_path, small_disk):
    source = a_source(small=40, large=2)
    source.headers = {
        key: ObjectHeaders(user_metadata={"m": os.urandom(15_000).hex()}) for key in source.bodies
    }
    first, _ = undisturbed(tmp_path / "whole", source)
    packing = Packing(small_disk, source)
    with pytest.raises(StagingError):
        packing.run()
    elsewhere = Packing(tmp_path / "elsewhere", source)
    elsewhere.put(*packing.files())
    assert elsewhere.run().resumed_bytes > 512
    assert elsewhere.part.read_bytes() == first.part.read_bytes()


def test_a_failed_run_is_resumed_and_the_report_says_so(context):
    name = broken_chunk(context).name
    context.objects.reads.clear()
    archive_chunk(context, name, until=chunk_steps.pack_chunk)
    report = chunk_steps.seal_chunk(context, name)
    assert report.resumed_bytes > 1_000_000
    assert (report.not_resumed, {key for key, _, _ in context.objects.reads}) == (
        "",
        {f"key-{n:03d}" for n in range(50, 60)},
    )
    assert [file.kind for file in leftovers(context, name)] == ["sealed", "record"]


@pytest.mark.thorough
@pytest.mark.parametrize("refusal", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_what_an_earlier_run_left_is_copied(context, monkeypatch, refusal):
    def refused(*_):
        raise OSError(refusal, os.strerror(refusal))

    name = broken_chunk(context).name
    monkeypatch.setattr("fcntl.flock", refused)
    (part,) = context.staging().glob("*.part")
    inode = part.stat().st_ino
    archive_chunk(context, name, until=chunk_steps.seal_chunk)
    assert chunk_steps.seal_chunk(context, name).resumed_bytes > 1_000_000
    assert staged_path(context, name).stat().st_ino != inode
    archive_chunk(context, name)
    ends_right(context, name)


def test_part_of_older_version_is_packed_again_and_reported(context):
    name = broken_chunk(context).name
    next(context.staging().glob("*.journal")).unlink()
    archive_chunk(context, name)
    ends_right(context, name)


def test_part_and_journal_of_different_epochs_are_no_pair(context):
    name = broken_chunk(context).name
    (journal,) = context.staging().glob("*.journal")
    journal.rename(journal.with_name(f"{name}.1.journal"))
    archive_chunk(context, name, until=chunk_steps.pack_chunk)
    report = chunk_steps.seal_chunk(context, name)
    assert report.resumed_bytes == 0
    assert "journal" in report.not_resumed
    assert [file.kind for file in leftovers(context, name)] == ["sealed", "record"]


def test_newest_of_several_pairs_is_resumed_others_removed(context):
    name = broken_chunk(context).name
    for path in sorted(context.staging().iterdir()):
        data = path.read_bytes()
        path.with_name(f"{name}.1{path.suffix}").write_bytes(data[: len(data) // 2])
    archive_chunk(context, name, until=chunk_steps.pack_chunk)
    assert chunk_steps.seal_chunk(context, name).resumed_bytes > 1_500_000
    assert [file.kind for file in leftovers(context, name)] == ["sealed", "record"]


def test_a_withdrawn_chunk_leaves_neither_part_nor_journal(context):
    name = broken_chunk(context).name
    chunk_steps.withdraw(context, name)
    assert list(context.staging().iterdir()) == []


def test_a_kept_prefix_does_not_count_twice_against_the_limit(tmp_path, ledger):
    context = a_run_context(
        tmp_path,
        a_steady_source(),
        ledger,
        target="8MiB",
        packing={"part_size": "64KiB", "staging_limit": "3MiB"},
    )
    name = broken_chunk(context).name
    archive_chunk(context, name)
    assert ledger.chunks.get(name).state is ChunkState.LOCATED


def test_finished_packing_with_damaged_record_resumes_without_get(context):
    (chunk,) = plan(context).chunks
    archive_chunk(context, chunk.name, until=chunk_steps.pack_chunk)
    (record,) = context.staging().glob("*.packed.json")
    data = bytearray(record.read_bytes())
    data[30] ^= 1
    record.write_bytes(data)
    context.objects.reads.clear()
    archive_chunk(context, chunk.name)
    assert context.objects.reads == []
    ends_right(context, chunk.name)


def test_leftovers_name_every_file_of_the_folder(context):
    name = broken_chunk(context).name
    (context.staging() / "notes.txt").write_bytes(b"mine")
    files = {(file.kind, file.chunk, file.epoch is not None) for file in leftovers(context)}
    assert files == {("part", name, True), ("journal", name, True), ("foreign", "", False)}


# --- flipped bytes of a sealed chunk --------------------------------------------------------------


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def between_samples(context, name):
    """A byte outside of all samples."""
    chunk = context.ledger.chunks.get(name)
    covered = {
        at // 4096
        for sample in chunk.samples
        for at in range(sample.offset, sample.offset + sample.length, 4096)
    }
    covered |= {(sample.offset + sample.length) // 4096 for sample in chunk.samples}
    return next(
        at for at in range(4096, chunk.stored_size_bytes, 4096) if at // 4096 not in covered
    )


def test_flipped_byte_is_found_before_another_run_posts(context, tmp_path, ledger):
    (chunk,) = plan(context).chunks
    archive_chunk(context, chunk.name, until=chunk_steps.seal_chunk)
    root = ledger.chunks.get(chunk.name).merkle_root
    flip(staged_path(context, chunk.name), between_samples(context, chunk.name))
    other = a_run_context(tmp_path, a_steady_source(), ledger, run="second", target="8MiB")
    chunk_steps.post_file(other, chunk.name)
    assert merkle_root(staged_path(context, chunk.name), 3) == root
    archive_chunk(other, chunk.name)
    ends_right(context, chunk.name)


class CheckingStore:
    """The folder store, but it checks the root of an upload, as a provider does."""

    def __init__(self, store):
        self.store = store
        self.refused = 0

    def __getattr__(self, name):
        return getattr(self.store, name)

    def put(self, posting, staged, progress, *, wrong=()):
        if merkle_root(staged, 3) != posting.merkle_root:
            self.refused += 1
            raise RootRefused("these are other bytes")
        self.store.put(posting, staged, progress)


def refusing(tmp_path, ledger):
    context = a_run_context(tmp_path, a_steady_source(), ledger, target="8MiB")
    store = CheckingStore(context.store)
    return a_run_context(
        tmp_path, a_steady_source(), ledger, target="8MiB", store=lambda *_: store
    ), store


def test_file_damaged_after_post_is_packed_and_uploaded_again(tmp_path, ledger):
    context, store = refusing(tmp_path, ledger)
    (chunk,) = plan(context).chunks
    archive_chunk(context, chunk.name, until=chunk_steps.post_file)
    flip(staged_path(context, chunk.name), between_samples(context, chunk.name))
    archive_chunk(context, chunk.name)
    assert store.refused == 1
    ends_right(context, chunk.name)


def test_a_damaged_file_of_objects_that_have_changed_is_abandoned(tmp_path, ledger):
    context, _ = refusing(tmp_path, ledger)
    (chunk,) = plan(context).chunks
    archive_chunk(context, chunk.name, until=chunk_steps.post_file)
    flip(staged_path(context, chunk.name), between_samples(context, chunk.name))
    context.objects.unavailable = {"key-000": (SkipReason.CHANGED, -1)}
    with pytest.raises(CafError, match="have changed since"):
        chunk_steps.upload_chunk(context, chunk.name)
    assert ledger.chunks.get(chunk.name).state is ChunkState.ABANDONED


@pytest.mark.thorough
@pytest.mark.parametrize("record", ["kept", "gone"])
def test_rows_never_come_from_a_flipped_manifest(context, record):
    (chunk,) = plan(context).chunks
    archive_chunk(context, chunk.name, until=chunk_steps.verify_stored)
    path = staged_path(context, chunk.name)
    if record == "gone":
        (context.staging() / f"{chunk.name}.packed.json").unlink()
    data = bytearray(path.read_bytes())
    manifest = data.rindex(b"PAR1", 0, data.rindex(b"PAR1"))
    data[manifest + 40] ^= 1
    path.write_bytes(data)
    archive_chunk(context, chunk.name)
    ends_right(context, chunk.name)


def test_a_packed_file_whose_manifest_is_damaged_is_not_sealed(context):
    (chunk,) = plan(context).chunks
    archive_chunk(context, chunk.name, until=chunk_steps.pack_chunk)
    (packed,) = context.staging().glob("*.packed")
    flip(packed, -200)
    archive_chunk(context, chunk.name)
    ends_right(context, chunk.name)
