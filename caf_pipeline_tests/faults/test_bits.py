"""Flipped bytes are detected by their reader and never returned, and the next run ends right.

The long form tries each random place with many seeds.
"""

import json
import os
import random
from pathlib import Path

import pytest

from caf_pipeline.caf.archive import CafReader
from caf_pipeline.caf.merkle import merkle_root
from caf_pipeline.errors import CafError, IntegrityError, ObjectReadFailed, StoreError
from caf_pipeline.inventory.snapshot import read_objects, verify_snapshot
from caf_pipeline.packing.staging import staged_path
from caf_pipeline.reading.chunk_reader import StagedSource
from caf_pipeline.retrieval.reader import fetch, save
from caf_pipeline.settings import StoreSettings, load_settings
from caf_pipeline.steps import chunk_steps, inventories, planning
from caf_pipeline.wiring import open_run_context
from caf_pipeline_tests.faults.world import COPIES, SOURCE
from caf_pipeline_tests.support.command_line import CommandLine
from caf_pipeline_tests.support.jackal_command_line import S3_KEYS
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.payers import then
from caf_pipeline_tests.support.run_contexts import (
    CHUNK_STEPS,
    a_run_context,
    archive_chunk,
    archive_everything,
    plan,
)

GROUP = "Bytes are flipped"
MIB = 1 << 20
LAST = "zz/last of the chunk"


@pytest.fixture
def small_world(new_world, unruly_s3, new_bucket):
    """One chunk of few objects; one GET at a time."""
    world = new_world(
        bucket=unruly_s3.in_front_of(new_bucket),
        packing={"max_requests": 1, "request_attempts": 1},
    )
    world.fill(small=6, large=1)
    return world


@pytest.fixture
def large_world(new_world):
    """One chunk of about 3 MiB; a third of it is sampled."""
    world = new_world(source={"target_size": 8 * MIB})
    chance = random.Random(5)
    for number in range(6):
        world.put(f"key-{number}", chance.randbytes(MIB // 2))
    return world


def flip(path, at, *, bits=0x10):
    """Flip bits of one byte; a negative `at` counts from the end."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        place = file.tell()
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ bits]))


def flip_somewhere(path, chance):
    flip(path, chance.randrange(path.stat().st_size), bits=1 << chance.randrange(8))


def staged(world, kind):
    return sorted(world.staging.glob(f"*.{kind}"))


# --- while a chunk is packed ----------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("part",), ("journal",), ("part", "journal")], ids="-and-".join)
def test_a_packing_is_resumed_over_flipped_bytes_and_ends_right(
    fault, small_world, unruly_s3, soak, kinds
):
    """Every run fails at the last object; then bytes of its remains are flipped."""
    small_world.put(LAST, b"last" * 100)
    (name,) = small_world.plan()
    with fault(
        GROUP, f"in the {' and the '.join(kinds)} of a packing that was interrupted"
    ) as case:
        case.tried = 300 if soak else 12
        chance = random.Random(str(kinds))
        unruly_s3.fail(500, "InternalError", key=LAST)
        for _ in range(case.tried):
            with small_world.run_context() as context, pytest.raises(ObjectReadFailed):
                archive_chunk(context, name)
            for kind in kinds:
                (path,) = staged(small_world, kind)
                assert path.stat().st_size
                for _ in range(chance.choice([1, 1, 5])):
                    flip_somewhere(path, chance)
        unruly_s3.well_behaved()
        small_world.finish()
        case.check(small_world)


def test_staged_file_contradicting_its_journal_is_not_resumed(fault, small_world, unruly_s3):
    small_world.put(LAST, b"last" * 100)
    (name,) = small_world.plan()
    with fault(GROUP, "in all of an interrupted part, and its journal emptied or cut") as case:
        unruly_s3.fail(500, "InternalError", key=LAST)
        spoils = [
            lambda part, journal: part.write_bytes(bytes(part.stat().st_size)),
            lambda part, journal: part.write_bytes(b""),
            lambda part, journal: journal.write_bytes(b""),
            lambda part, journal: os.truncate(journal, journal.stat().st_size // 2),
            lambda part, journal: journal.write_bytes(os.urandom(5_000)),
            lambda part, journal: part.unlink(),
            lambda part, journal: journal.unlink(),
        ]
        case.tried = len(spoils)
        for spoil in spoils:
            with small_world.run_context() as context, pytest.raises(ObjectReadFailed):
                archive_chunk(context, name)
            spoil(*staged(small_world, "part"), *staged(small_world, "journal"))
        unruly_s3.well_behaved()
        small_world.finish()
        case.check(small_world)


# --- a staged chunk -------------------------------------------------------------------------------


def places(path):
    """Name a place in each part of a chunk's file."""
    reader = CafReader.open(StagedSource(path), name=path.name)
    members = sorted(reader.members, key=lambda member: member.start_byte)
    return {
        "head": members[0].start_byte + 10,
        "member": members[len(members) // 2].start_byte + 3,
        "manifest": (members[-1].start_byte + members[-1].end_byte) // 2,
        "index": reader.data_size_bytes + 5,
        "footer": -3,
    }


WHERE = ("head", "member", "manifest", "index", "footer")


@pytest.fixture
def several_chunks(new_world):
    """A world with a small chunk for each place, and their names."""
    world = new_world(source={"target_size": 70_000})
    for number in range(len(WHERE)):
        for part in range(3):
            world.put(f"chunk-{number}/{part}", random.Random(f"{number} {part}").randbytes(20_000))
    names = world.plan()
    assert len(names) == len(WHERE)
    return world, names


def test_a_packed_file_that_is_flipped_before_it_is_sealed(fault, several_chunks):
    world, names = several_chunks
    with fault(GROUP, "in a packed file, before the seal") as case, world.run_context() as context:
        case.tried = len(WHERE)
        for name, where in zip(names, WHERE, strict=True):
            archive_chunk(context, name, until=chunk_steps.pack_chunk)
            (path,) = world.staging.glob(f"{name}.*.packed")
            flip(path, places(path)[where])
            finishes(world, context, name)
        case.check(world)


def test_a_record_of_a_packing_that_is_flipped(fault, small_world, soak):
    (name,) = small_world.plan()
    with (
        fault(GROUP, "in the record of a finished packing") as case,
        small_world.run_context() as context,
    ):
        archive_chunk(context, name, until=chunk_steps.pack_chunk)
        (path,) = staged(small_world, "packed.json")
        kept = path.read_bytes()
        offsets = range(0, len(kept), 1 if soak else len(kept) // 12)
        case.tried = len(offsets)
        for offset in offsets:
            path.write_bytes(kept)
            flip(
                path, offset % len(kept)
            )  # a rewritten record may be shorter, as it has the seconds
            try:
                chunk_steps.pack_chunk(context, name)  # packs rejected bytes again
            except CafError as error:
                is_one_sentence(error)
            (path,) = staged(small_world, "packed.json")
            kept = path.read_bytes()
            assert json.loads(kept)
        finishes(small_world, context, name)
        case.check(small_world)


def finishes(world, context, name):
    """Run the chunk. If the flip is an error, the next run must end right."""
    try:
        archive_chunk(context, name)
    except CafError as error:
        is_one_sentence(error)
        archive_chunk(context, name)


def is_one_sentence(error):
    assert "\n" not in str(error), repr(error)


AFTER = ("seal_chunk", "post_file", "verify_stored")


@pytest.mark.parametrize("after", AFTER)
def test_a_sealed_file_that_is_flipped_after_a_step(fault, several_chunks, after):
    world, names = several_chunks
    with fault(GROUP, f"in a sealed file, after {after}") as case, world.run_context() as context:
        case.tried = len(WHERE)
        for name, where in zip(names, WHERE, strict=True):
            for step in CHUNK_STEPS:
                step(context, name)
                if step.__name__ == after:
                    path = staged_path(context, name)
                    flip(path, places(path)[where])
        world.finish()
        case.check(world)


def unsampled(chunk):
    """Return a byte outside of all samples."""
    covered = [(sample.offset, sample.offset + sample.length) for sample in chunk.samples]
    return next(
        at
        for at in range(100_000, chunk.stored_size_bytes, 10_000)
        if not any(first <= at < end for first, end in covered)
    )


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("another_run", [False, True], ids=["same run", "another run"])
def test_a_sealed_file_that_is_flipped_where_no_sample_looks(
    fault, large_world, after, another_run
):
    """Providers refuse a wrong root; the chunk is packed again and paid once."""
    (name,) = large_world.plan()
    with fault(GROUP, f"in a sealed file where no sample looks, after {after}") as case:
        with large_world.run_context() as context:
            for step in CHUNK_STEPS:
                step(context, name)
                if step.__name__ == after:
                    flip(staged_path(context, name), unsampled(context.ledger.chunks.get(name)))
                    if another_run:
                        break
        large_world.finish()
        case.check(large_world)


def test_a_sealed_file_that_is_flipped_while_it_is_uploaded(fault, large_world):
    (name,) = large_world.plan()
    with (
        fault(GROUP, "in a sealed file while it is uploaded") as case,
        large_world.run_context() as context,
    ):
        archive_chunk(context, name, until=chunk_steps.post_file)
        at = unsampled(context.ledger.chunks.get(name))
        then(context.store, "put", lambda: flip(staged_path(context, name), at), before=True)
        finishes(large_world, context, name)
        case.check(large_world)


@pytest.mark.sample
def test_folder_store_refuses_file_that_was_not_posted(fault, tmp_path, ledger):
    """Samples taken of a flipped file would let it pass."""
    source = MemorySource(
        {f"key-{number}": random.Random(number).randbytes(30_000) for number in range(10)}
    )
    context = a_run_context(tmp_path, source, ledger)
    with fault(GROUP, "in a packed file, before the seal, to be stored in a folder") as case:
        (chunk,) = plan(context).chunks
        archive_chunk(context, chunk.name, until=chunk_steps.pack_chunk)
        (path,) = context.staging().glob("*.packed")
        flip(path, 1_000)
        archive_chunk(context, chunk.name)
        assert (
            merkle_root(next(context.store.folder.glob("chunks/*.caf")), 3)
            == context.ledger.chunks.get(chunk.name).merkle_root
        )
        for key, body in source.bodies.items():
            assert b"".join(fetch(ledger.lookup, context.store, "src", key).pieces) == body
        case.objects, case.size_bytes = len(source.bodies), sum(map(len, source.bodies.values()))


# --- inventories and plans ------------------------------------------------------------------------


def test_flipped_plan_is_never_archived_as_something_else(fault, small_world, soak):
    """Either it does not matter, or the chunk fails and is withdrawn, and its objects replanned."""
    times = {row[0]: row[1] for row in listed(small_world)}
    with (
        fault(GROUP, "in the Parquet files of a plan") as case,
        small_world.run_context() as context,
    ):
        case.tried = 0
        for seed in range(150 if soak else 8):
            names = [
                chunk.name
                for chunk in planning.cut_plan(context, inventories.take_inventory(context)).chunks
            ]
            if not names:  # the flip did not matter: add something new
                small_world.put(f"new-{seed}", b"new" * seed)
                times = {row[0]: row[1] for row in listed(small_world)}
                continue
            chance = random.Random(seed)
            folder = Path(context.ledger.chunks.get(names[0]).plan_folder)
            case.tried += 1
            flip_somewhere(chance.choice(sorted(folder.iterdir())), chance)
            for name in names:
                try:
                    archive_chunk(context, name)
                except CafError as error:
                    is_one_sentence(error)
                    chunk_steps.withdraw(context, name)
        assert case.tried > 2
        small_world.finish()
        case.check(small_world)
        for key, moment in small_world.query("SELECT file_path, last_modified FROM file_locations"):
            assert times.get(key, moment) == moment


def listed(world):
    with world.run_context() as context:
        return [
            (obj.key.decode(), obj.last_modified)
            for page in context.objects.list_pages()
            for obj in page
        ]


def test_a_snapshot_that_is_flipped_is_refused_or_the_same(fault, small_world, soak):
    with fault(GROUP, "in an inventory's snapshot") as case, small_world.run_context() as context:
        snapshot = inventories.take_inventory(context)
        whole, objects = snapshot.path.read_bytes(), list(read_objects(snapshot.path))
        offsets = range(0, len(whole), 1 if soak else max(1, len(whole) // 60))
        case.tried = len(offsets)
        refused = 0
        for offset in offsets:
            flip(snapshot.path, offset)
            try:
                again = inventories.open_snapshot(context, snapshot.name)
                verify_snapshot(again.path)
                assert again == snapshot, offset
                assert list(read_objects(again.path)) == objects, offset
            except CafError as error:
                is_one_sentence(error)
                refused += 1
            snapshot.path.write_bytes(whole)
        assert refused > case.tried // 2
        flip(snapshot.path, 60)  # of the first page
        with pytest.raises(IntegrityError):
            planning.cut_plan(context, snapshot)
        assert small_world.query("SELECT count(*) FROM claims") == [(0,)]
        small_world.finish()
        case.check(small_world)


# --- at providers ---------------------------------------------------------------------------------


def spoil(world, *providers, at=-1):
    for number in providers:
        world.network.misbehave(provider=number, flip_byte=at)


def everybody(world):
    return range(len(world.network.state()["providers"]))


def test_flipped_copies_are_not_verified_and_no_location_is_written(fault, small_world):
    (name,) = small_world.plan()
    with fault(GROUP, "at all providers, before the copies are verified") as case:
        with small_world.run_context() as context:
            archive_chunk(context, name, until=chunk_steps.upload_chunk)
            spoil(small_world, *everybody(small_world))
            with pytest.raises((IntegrityError, StoreError)):
                chunk_steps.verify_stored(context, name)
        assert small_world.query("SELECT count(*) FROM file_locations") == [(0,)]
        small_world.network.well_behaved()
        small_world.finish()
        case.check(small_world)


def holders_of(world, name):
    with world.run_context() as context:
        listed = {
            copy.provider
            for copy in context.store.copies(
                chunk_steps.posting_of(context.ledger.chunks.get(name))
            )
        }
    return [
        number
        for number, address in enumerate(world.network.provider_addresses)
        if address in listed
    ]


def test_flipped_copy_is_skipped_and_objects_read_right(fault, small_world):
    (name,) = small_world.plan()
    assert small_world.run(name) == 0
    with fault(GROUP, "at one provider after the other, located") as case:
        numbers = holders_of(small_world, name)
        assert len(numbers) == COPIES
        case.tried = len(numbers)
        for number in numbers:
            spoil(small_world, number)
            with small_world.run_context() as context:
                for key, body in small_world.objects.items():
                    assert (
                        b"".join(fetch(context.ledger.lookup, context.store, SOURCE, key).pieces)
                        == body
                    )
            small_world.network.well_behaved()
        case.check(small_world)


def test_where_all_copies_are_flipped_nothing_is_handed_out(fault, small_world, tmp_path):
    (name,) = small_world.plan()
    assert small_world.run(name) == 0
    with fault(GROUP, "at all providers, located: nothing is handed to a user") as case:
        spoil(small_world, *everybody(small_world))
        with small_world.run_context() as context:
            keys = [key for key, body in small_world.objects.items() if body]
            case.tried = len(keys)
            for key in keys:
                with pytest.raises(IntegrityError):
                    next(fetch(context.ledger.lookup, context.store, SOURCE, key).pieces)
                with pytest.raises(IntegrityError):
                    save(
                        fetch(context.ledger.lookup, context.store, SOURCE, key), tmp_path / "saved"
                    )
            assert not (tmp_path / "saved").exists()
        small_world.network.well_behaved()
        case.check(small_world)


# --- in a store that is a folder, as a user meets it ----------------------------------------------


@pytest.fixture
def caf(tmp_path, new_bucket, database_url, ledger):
    """A command line over an archive of one chunk in a folder, and the chunk's file."""
    bodies = {f"key-{number}": random.Random(number).randbytes(20_000) for number in range(3)}
    for key, body in bodies.items():
        new_bucket.put(key, body)
    folder = tmp_path / "home"
    folder.mkdir()
    caf = CommandLine(folder, S3_KEYS | {"CAF_DATABASE_URL": database_url})
    caf.settings(
        f'[sources.src]\nbucket = "{new_bucket.name}"\nendpoint_url = "{new_bucket.endpoint}"\n'
        "public = true\n"
    )
    settings = load_settings(folder / "caf.toml").model_copy(
        update={"store": StoreSettings(kind="directory", folder=folder / ".caf" / "store")}
    )
    archive_everything(
        open_run_context(settings, "src", run="run-1", ledger=ledger, client=new_bucket.client)
    )
    (chunk,) = folder.glob(".caf/store/chunks/*.caf")
    return caf, chunk, bodies


def test_caf_get_hands_out_no_flipped_byte(fault, caf, tmp_path):
    caf, chunk, bodies = caf
    kept = chunk.read_bytes()
    with fault(GROUP, "at a provider, then `caf get`") as case:
        case.tried = len(bodies)
        for key, body in bodies.items():
            chunk.write_bytes(kept)
            flip(chunk, kept.index(body) + 7)
            target = tmp_path / "got"
            done = caf("get", "src", key, "--output", str(target))
            assert done.status == IntegrityError.exit_code, done.err
            assert "Traceback" not in done.err
            assert (done.out, target.exists()) == (b"", False)
        chunk.write_bytes(kept)
        done = caf("get", "src", key)
        assert (done.status, done.out) == (0, body)
