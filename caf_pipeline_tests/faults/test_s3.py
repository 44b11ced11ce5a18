"""S3 misbehaves during a whole run; the archive ends right, immediately or by the next run.

Every archived byte is compared with what the bucket ever had; see `World.examine`.
"""

import random
from contextlib import ExitStack
from datetime import timedelta
from urllib.parse import urlsplit

import msgspec
import psycopg
import pytest

from caf_pipeline.errors import (
    CafError,
    ListingRefused,
    ObjectReadFailed,
    SourceError,
    SourceUnreachable,
)
from caf_pipeline.formats.chunkio import LogReader
from caf_pipeline.steps import inventories, planning
from caf_pipeline_tests.faults.s3_faults import PASSING
from caf_pipeline_tests.faults.world import ONE_CHUNK, SOURCE
from caf_pipeline_tests.support.kills import Fatal

GROUP = "S3 misbehaves"
PLAIN = "some/key-001"
HOURS = timedelta(hours=7)


@pytest.fixture
def small_world(new_world, unruly_s3, new_bucket):
    """One chunk of few objects behind the proxy; one request at a time, in a fixed order."""

    def make(*, large=1, **packing):
        packing = {
            "request_attempts": 2,
            "max_requests": 1,
            "part_size": "64KiB",
            "window_size": "1MiB",
        } | packing
        world = new_world(bucket=unruly_s3.in_front_of(new_bucket), packing=packing)
        world.fill(small=6, large=large)
        return world

    return make


def require_one_clear_sentence(error):
    assert str(error)
    assert "\n" not in str(error)


def fails_clearly(world, kind=SourceError, *, naming=""):
    """Run until the fault is reported by one error with S3's exit code."""
    with pytest.raises(kind) as failed:
        world.finish()
    require_one_clear_sentence(failed.value)
    assert failed.value.exit_code == SourceError.exit_code
    assert naming in str(failed.value)


def ends_right(case, world, unruly_s3):
    """Let S3 behave, run again, and examine everything."""
    assert unruly_s3.struck, "no request was struck"
    unruly_s3.well_behaved()
    world.finish()
    return case.check(world)


# --- answers that fail ----------------------------------------------------------------------------

LASTING = {what: spoil for what, spoil in PASSING.items() if "hangs" not in what}


def test_what_passes_is_asked_again_and_the_run_ends_right(fault, small_world, unruly_s3):
    world = small_world()
    with ExitStack() as stack:
        cases = [stack.enter_context(fault(GROUP, f"{what}, once")) for what in PASSING]
        for number, (what, spoil) in enumerate(PASSING.items()):
            for size_bytes in (10_000, 100_000):  # the second comes in ranges
                world.put(f"{what} {size_bytes}", random.Random(number).randbytes(size_bytes))
                spoil(unruly_s3, key=f"{what} {size_bytes}", times=1)
        world.finish()
        assert unruly_s3.struck == 2 * len(PASSING)
        ends_right(cases[0], world, unruly_s3)


@pytest.mark.parametrize("size_bytes", [10_000, 80_000], ids=["whole", "in ranges"])
def test_lasting_fault_fails_run_and_next_run_ends_right(fault, small_world, unruly_s3, size_bytes):
    world = small_world(large=0, request_attempts=1)  # one chunk
    with ExitStack() as stack:
        cases = [
            stack.enter_context(fault(GROUP, f"{what}, for as long as the run goes on"))
            for what in LASTING
        ]
        keys = {
            what: f"{number} {what}" for number, what in enumerate(LASTING)
        }  # in the order in which they are packed
        for key in keys.values():
            world.put(key, random.Random(key).randbytes(size_bytes))
        for what, spoil in LASTING.items():
            spoil(unruly_s3, key=keys[what])
            fails_clearly(world, ObjectReadFailed, naming=keys[what])
            assert unruly_s3.struck
            unruly_s3.well_behaved()
        world.finish()
        cases[0].check(world)


@pytest.mark.parametrize("times", [1, None], ids=["once", "always"])
def test_another_objects_bytes_are_never_archived(fault, small_world, unruly_s3, new_bucket, times):
    world = small_world()
    world.put("twin", random.Random(1).randbytes(len(world.objects[PLAIN])))
    with fault(GROUP, "another object of the same length is answered") as case:
        unruly_s3.other_object(new_bucket, "twin", key=PLAIN, times=times)
        if times is None:
            fails_clearly(world, ObjectReadFailed, naming=PLAIN)
        else:
            world.finish()
        ends_right(case, world, unruly_s3)


@pytest.mark.parametrize("size_bytes", [5_000, 300_000], ids=["whole", "in ranges"])
@pytest.mark.parametrize("times", [1, None], ids=["once", "always"])
def test_changed_bytes_are_found_by_the_checksum_that_s3_keeps(
    fault, small_world, unruly_s3, times, size_bytes
):
    world = small_world()
    world.put("guarded", random.Random(1).randbytes(size_bytes), ChecksumAlgorithm="SHA256")
    with fault(
        GROUP, "other bytes of the right length and ETag, where S3 keeps a checksum"
    ) as case:
        unruly_s3.other_bytes(key="guarded", times=times)
        if (
            times is None or size_bytes == 300_000
        ):  # a large object is not hashed again in the same run
            fails_clearly(world, ObjectReadFailed, naming="guarded")
        else:
            world.finish()
        ends_right(case, world, unruly_s3)


def test_a_storm_of_slow_downs_is_waited_out(fault, small_world, unruly_s3):
    world = small_world(request_attempts=6, max_requests=4)
    with fault(GROUP, "503 SlowDown in bursts, for objects and listings") as case:
        unruly_s3.slow_down(3, 8, kind="object")
        unruly_s3.slow_down(2, 5, kind="listing")
        unruly_s3.slow_down(1, 2, kind="other")
        world.finish()
        ends_right(case, world, unruly_s3)


@pytest.mark.parametrize("kind", ["object", "listing", "other"])
def test_a_storm_that_lasts_fails_the_run_in_one_sentence(fault, small_world, unruly_s3, kind):
    world = small_world()
    with fault(GROUP, "503 SlowDown for as long as the run goes on") as case:
        unruly_s3.slow_down(1, 1, kind=kind)
        fails_clearly(world, (SourceUnreachable, ObjectReadFailed), naming="SlowDown")
        assert world.query("SELECT count(*) FROM skipped_objects") == [(0,)]
        ends_right(case, world, unruly_s3)


def test_source_down_for_many_runs_makes_no_object_unreadable(fault, small_world, unruly_s3):
    world = small_world(request_attempts=1)
    with fault(GROUP, "503 SlowDown for everything, run after run") as case:
        world.plan()
        unruly_s3.slow_down(1, 1, kind=None)
        for _ in range(3):  # after so many runs, an unreadable object is skipped
            assert world.run(world.chunks()[0].name) == SourceError.exit_code
        ends_right(case, world, unruly_s3)
        assert world.query("SELECT count(*) FROM skipped_objects") == [(0,)]


# --- listings -------------------------------------------------------------------------------------

GARBAGE = {
    "cut XML": b'<?xml version="1.0"?><ListBucketResult><Contents><Key>a</K',
    "a page to log in": b"<html><body>Please log in</body></html>",
    "no XML at all": b"\x00\xff garbage",
    "nothing": b"",
    "an entry without an ETag": b"<ListBucketResult><IsTruncated>false</IsTruncated>"
    b"<Contents><Key>a</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified>"
    b"</Contents></ListBucketResult>",
    "an invalid size": b"<ListBucketResult><IsTruncated>false</IsTruncated>"
    b"<Contents><Key>a</Key><Size>x</Size></Contents></ListBucketResult>",
}


def test_listing_of_garbage_is_refused_without_snapshot(fault, small_world, unruly_s3):
    world = small_world(request_attempts=1)
    with fault(GROUP, "a listing of garbage") as case:
        case.tried = 2 * len(GARBAGE)
        for body in GARBAGE.values():
            for page in (1, 2):
                unruly_s3.page_keys = 4
                unruly_s3.say(
                    body, kind="listing", when=lambda asked, page=page: asked.number >= page
                )
                fails_clearly(
                    world, (ListingRefused, SourceUnreachable)
                )  # botocore treats an empty answer as a 500
                with world.run_context() as context:
                    assert list(context.inventories().iterdir()) == []
                assert unruly_s3.struck
                unruly_s3.well_behaved()
        world.finish()
        case.check(world)


LIES = {
    "pages repeat entries": lambda entries: entries + entries,
    "pages are out of order": lambda entries: entries[::-1],
    "pages leave entries out": lambda entries: entries[1:],
    "pages are empty": lambda entries: [],
}


def test_a_listing_that_lies_loses_nothing_and_doubles_nothing(fault, small_world, unruly_s3):
    world = small_world()
    with ExitStack() as stack:
        cases = [stack.enter_context(fault(GROUP, f"a listing whose {what}")) for what in LIES]
        for number, change in enumerate(LIES.values()):
            world.put(f"another-{number}", b"another")
            unruly_s3.page_keys = 4
            unruly_s3.list_otherwise(change)
            world.finish()
            assert unruly_s3.struck
            unruly_s3.well_behaved()
        world.finish()
        cases[0].check(world)


@pytest.mark.sample
def test_listing_that_loops_is_refused(fault, small_world, unruly_s3):
    world = small_world()
    pages = []

    def again(asked, answer):
        pages.append(answer)
        return (
            answer if len(pages) % 2 else pages[0]
        )  # the parallel listing gives up, and pages are listed in sequence

    with fault(GROUP, "a listing that serves one page twice") as case:
        unruly_s3.page_keys = 4
        unruly_s3.order(again, kind="listing")
        fails_clearly(world, ListingRefused, naming="circles")
        ends_right(case, world, unruly_s3)


def test_a_listing_that_changes_meanwhile_loses_nothing_and_doubles_nothing(
    fault, small_world, unruly_s3
):
    world = small_world()

    def change():
        world.put("a-new one before", b"1")
        world.put("z-new one behind", b"2")
        world.put(PLAIN, b"overwritten")
        world.delete("some/key-003")
        world.put("empty", b"no longer")

    with fault(
        GROUP, "objects put, deleted and overwritten between two pages of a listing"
    ) as case:
        unruly_s3.page_keys = 4
        unruly_s3.after_page(change)
        world.finish()
        ends_right(case, world, unruly_s3)


# --- objects that change under their GET ----------------------------------------------------------


REPLACED, DELETED = "some/key-001", "some/key-002"
LARGE_REPLACED, LARGE_DELETED = "large/0", "large/1"


def skips(world):
    return {
        (key, reason)
        for key, reason in world.query("SELECT file_path, reason FROM skipped_objects")
    }


def located(world, key):
    ((count,),) = world.query("SELECT count(*) FROM file_locations WHERE file_path = %s", key)
    return count


def changing(world, unruly_s3, replaced, deleted, **at):
    """Replace one object and delete another during their GETs."""
    unruly_s3.meanwhile(lambda: world.put(replaced, b"new" * 9), key=replaced, times=1, **at)
    unruly_s3.meanwhile(lambda: world.delete(deleted), key=deleted, times=1, **at)


def test_object_changed_after_broken_body_is_skipped_successor_archived(
    fault, small_world, unruly_s3
):
    world = small_world()
    with fault(GROUP, "objects replaced and deleted during their GETs, which break off") as case:
        case.tried = 2
        changing(world, unruly_s3, REPLACED, DELETED, at=100, cut=True)
        world.finish()
        assert skips(world) == {(REPLACED, "changed"), (DELETED, "deleted")}
        ends_right(case, world, unruly_s3)
        assert (located(world, REPLACED), located(world, DELETED)) == (1, 0)


def test_object_changed_during_its_body_is_archived_unchanged(fault, small_world, unruly_s3):
    world = small_world()
    with fault(GROUP, "objects replaced and deleted during their GETs, which go on") as case:
        case.tried = 2
        changing(world, unruly_s3, REPLACED, DELETED, at=100)
        world.finish()
        ends_right(case, world, unruly_s3)
        assert (located(world, REPLACED), located(world, DELETED)) == (2, 1)


def third(asked):
    return asked.number == 3


def test_object_changed_between_ranges_is_skipped_never_mixed(fault, small_world, unruly_s3):
    world = small_world(large=2)
    with fault(
        GROUP, "large objects replaced and deleted between two of their ranged GETs"
    ) as case:
        case.tried = 2
        changing(world, unruly_s3, LARGE_REPLACED, LARGE_DELETED, when=third)
        world.finish()
        assert skips(world) == {(LARGE_REPLACED, "changed"), (LARGE_DELETED, "deleted")}
        ends_right(case, world, unruly_s3)
        assert (located(world, LARGE_REPLACED), located(world, LARGE_DELETED)) == (1, 0)


CHECKPOINT, OPEN_OBJECT = 1, 6
"""Tag of a checkpoint, and the position of its open object. Its second field has the outcomes."""


def journaled_in_its_middle(world):
    """Return the large object that is open in the journal, or ""."""
    for path in world.staging.glob("*.journal"):
        data = path.read_bytes()
        log = LogReader(lambda start, end, data=data: data[start:end], len(data))
        said = [
            msgspec.msgpack.decode(log.content(entry) or b"\x91\x00") for entry in log.entries()
        ]
        checkpoints = [entry for entry in said if entry[0] == CHECKPOINT]
        if checkpoints and checkpoints[-1][OPEN_OBJECT]:
            return sorted(world.objects)[sum(len(outcomes) for _, outcomes, *_ in checkpoints)]
    return ""


@pytest.mark.parametrize("becomes", ["changed", "deleted"])
def test_object_changed_before_resumed_run_is_never_mixed(fault, new_world, becomes):
    world = new_world(source={"target_size": ONE_CHUNK})
    world.fill(small=6, large=3)
    with fault(
        GROUP, "large objects replaced and deleted after a run was killed in their middle"
    ) as case:
        (chunk,) = world.plan()
        chance = random.Random(becomes)
        inside = ""
        while not inside.startswith("large/"):
            assert len(world.runs) < 20, "no large object was open when a run was killed"
            world.run(chunk, fatal=Fatal("pack_chunk", chance.randrange(80, 100)))
            inside = journaled_in_its_middle(world)
        if becomes == "changed":
            world.put(inside, b"new" * 100_000)
        else:
            world.delete(inside)
        world.finish()
        assert skips(world) == {(inside, becomes)}
        case.check(world)


def test_version_is_archived_whatever_becomes_of_its_key(fault, small_world, unruly_s3, new_bucket):
    new_bucket.keep_versions()
    world = small_world(large=2)
    with fault(GROUP, "versions replaced and deleted between two of their ranged GETs") as case:
        case.tried = 2
        changing(world, unruly_s3, LARGE_REPLACED, LARGE_DELETED, when=third)
        world.finish()
        assert skips(world) == set()
        ends_right(case, world, unruly_s3)
        assert (located(world, LARGE_REPLACED), located(world, LARGE_DELETED)) == (2, 1)


def test_chunk_without_remaining_objects_is_empty_and_free(fault, small_world, unruly_s3):
    world = small_world()
    with fault(GROUP, "every object deleted between the inventory and its GET") as case:
        unruly_s3.hang(0.0)
        world.plan()
        for key in list(world.objects):
            world.delete(key)
        world.finish()
        ends_right(case, world, unruly_s3)
        assert {chunk.state.value for chunk in world.chunks()} == {"empty"}


# --- clocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [HOURS, -HOURS], ids=["ahead", "behind"])
def test_a_clock_of_s3_that_is_hours_wrong_changes_nothing(fault, small_world, unruly_s3, by):
    world = small_world()
    for key, body in [*world.objects.items()]:
        world.put(
            key, body, ChecksumAlgorithm="SHA256"
        )  # proves that a rewritten object is the same
    with fault(GROUP, "S3's clock is hours wrong, then right") as case:
        unruly_s3.skew(by)
        world.finish()
        ends_right(
            case, world, unruly_s3
        )  # the times of all objects have changed, and they are not planned again
        assert len(world.chunks()) == 1


@pytest.mark.parametrize(
    "by", ["+ interval '7 hours'", "- interval '7 hours'"], ids=["ahead", "behind"]
)
def test_wrong_database_clock_changes_nothing(fault, small_world, unruly_s3, database_url, by):
    skew_database(database_url, by)
    world = small_world()
    with fault(GROUP, "the database's clock is hours off ours, then right") as case:
        unruly_s3.hang(0.0)
        (chunk,) = world.plan()
        run = world.start(chunk)
        assert run.wait() == 0, run.printed
        world.put("later", b"later")
        world.finish()
        skew_database(database_url, "")
        ends_right(case, world, unruly_s3)


def skew_database(url, by):
    """Shift `now()` and `clock_timestamp()` of new connections by an interval."""
    name = urlsplit(url).path[1:]
    with psycopg.connect(url, autocommit=True) as connection:
        if not by:
            connection.execute(f"ALTER DATABASE {name} RESET search_path")
            return
        connection.execute("CREATE SCHEMA skew")
        for clock in ("now", "clock_timestamp"):
            connection.execute(
                f"CREATE FUNCTION skew.{clock}() RETURNS timestamptz LANGUAGE sql AS $$SELECT "
                f"pg_catalog.{clock}() {by}$$"
            )
        connection.execute(f"ALTER DATABASE {name} SET search_path = skew, pg_catalog, public")


# --- an inventory under all of it -----------------------------------------------------------------


def test_everything_at_once_ends_right(fault, small_world, unruly_s3, soak):
    """Random faults of all kinds, run after run, then none; many seeds in the long form."""
    world = small_world(request_attempts=3, max_requests=4)
    seeds = range(100 if soak else 3)
    with fault(GROUP, "faults of all kinds at random") as case:
        case.tried = len(seeds)
        for seed in seeds:
            chance = random.Random(seed)
            world.put(f"some/key-{seed:03d}", chance.randbytes(chance.randrange(20_000)))
            for spoil in PASSING.values():
                spoil(unruly_s3, when=lambda asked, chance=chance: chance.random() < 0.05)
            unruly_s3.fail(
                503, "SlowDown", kind=None, when=lambda asked, chance=chance: chance.random() < 0.1
            )
            unruly_s3.page_keys = chance.choice([1, 3, 1000])
            try:
                with world.run_context() as context:
                    planning.cut_plan(context, inventories.take_inventory(context))
                for chunk in world.chunks():
                    status = world.run(chunk.name)
                    assert status in (0, SourceError.exit_code), world.runs[-1].answer
            except CafError as error:
                require_one_clear_sentence(error)
        ends_right(case, world, unruly_s3)
    assert world.query("SELECT name FROM sources") == [(SOURCE,)]
