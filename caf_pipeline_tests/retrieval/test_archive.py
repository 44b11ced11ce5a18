"""The archive as other programs read it: what is asked for, by how many requests, and what a
remembered location can do.
"""

import asyncio
import contextlib
import inspect
import os
import random
from datetime import UTC, datetime, timedelta, timezone

import psycopg
import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    IntegrityError,
    LedgerError,
    NotLocated,
    StoreUnreachable,
    UsageError,
)
from caf_pipeline.retrieval import bulk, object_file
from caf_pipeline.retrieval.archive import Archive
from caf_pipeline.retrieval.async_archive import AsyncArchive
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.contracts.ledger import end, skip
from caf_pipeline_tests.retrieval.test_object_file import BreakingFolders
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.plans import MOMENT
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything

BODIES = {f"dir/{number:03}": os.urandom(500 + number) for number in range(200)}


@pytest.fixture
def context(tmp_path, ledger):
    context = a_run_context(
        tmp_path, MemorySource(dict(BODIES)), ledger, store=BreakingFolders(tmp_path / "store")
    )
    archive_everything(context)
    context.store.asked.clear()
    return context


@pytest.fixture
def archive(context):
    return Archive(context.ledger.lookup, context.store)


def put_at(context, archive, key, *providers, offset=0):
    """Let providers give another byte of an object."""
    location = archive.find("src", key).location
    for provider in providers or context.store.folders:
        corrupt(context.store.file(provider, location.posting), at=location.row.start_byte + offset)


def test_one_object_is_one_request_and_all_of_a_chunk_are_one_too(context, archive):
    assert archive.read("src", "dir/007") == BODIES["dir/007"]
    assert len(context.store.asked) == 1
    with archive.open("src", "dir/008") as file:
        file.seek(100)
        assert (file.read(), file.raw.compared) == (BODIES["dir/008"][100:], True)
    assert len(context.store.asked) == 2
    wanted = random.sample(sorted(BODIES), len(BODIES))
    reads = list(archive.read_many("src", wanted))
    assert {one.number: one.body for one in reads} == {
        number: BODIES[key] for number, key in enumerate(wanted)
    }
    assert all(one.compared and one.key == wanted[one.number] for one in reads)
    assert len(context.store.asked) == 3


def test_what_is_far_apart_or_too_much_for_one_request_is_asked_for_in_the_order_of_offsets(
    context, archive, monkeypatch
):
    monkeypatch.setattr(bulk, "MERGE_GAP_BYTES", 1000)
    monkeypatch.setattr(bulk, "REQUEST_BYTES", 4000)
    keys = sorted(BODIES)
    wanted = [*keys[:30], keys[100], keys[199]]
    assert {one.key: one.body for one in archive.read_many("src", reversed(wanted))} == {
        key: BODIES[key] for key in wanted
    }
    asked = sorted(context.store.asked, key=lambda one: one[1])
    assert all(end - start <= 4000 for _, start, end in asked)
    assert len(asked) < len(wanted) / 3
    assert (
        sum(end - start for _, start, end in asked)
        < sum(len(BODIES[key]) for key in wanted) + 30 * 1000
    )


@pytest.mark.parametrize("in_memory", [0, 600, 1 << 20])
def test_any_ranges_are_what_slices_of_the_bytes_are(context, archive, monkeypatch, in_memory):
    for module in (bulk, object_file):
        monkeypatch.setattr(module, "IN_MEMORY_BYTES", in_memory)
    monkeypatch.setattr(bulk, "REQUEST_BYTES", 5000)
    dice = random.Random(5)
    edges = [None, 0, 1, -1, 5, -5, 300, 10_000, -10_000]
    wanted = [
        (dice.choice(sorted(BODIES)), dice.choice(edges), dice.choice(edges)) for _ in range(400)
    ]
    reads = sorted(archive.read_many("src", wanted), key=lambda one: one.number)
    assert [one.body for one in reads] == [BODIES[key][start:end] for key, start, end in wanted]
    for one in reads:
        size = len(BODIES[one.key])
        assert one.compared == (size <= in_memory or one.end_byte - one.start_byte in (0, size))
    assert len(context.store.asked) < len(wanted) / 3


def test_a_lying_provider_spoils_no_object_and_where_all_lie_only_that_one_is_refused(
    context, archive
):
    put_at(context, archive, "dir/003", "anna")
    put_at(context, archive, "dir/005", offset=1)
    reads = {one.key: one for one in archive.read_many("src", BODIES)}
    assert reads.keys() == BODIES.keys()
    assert {key: one.body for key, one in reads.items() if not one.error} == {
        key: body for key, body in BODIES.items() if key != "dir/005"
    }
    with pytest.raises(IntegrityError, match=r"'dir/005'.*anna: .*bert: .*carl: "):
        _ = reads["dir/005"].body


def test_a_provider_that_gives_everything_wrong_is_left_with_its_first_request(
    context, archive, monkeypatch
):
    for module in (bulk, object_file):
        monkeypatch.setattr(module, "IN_MEMORY_BYTES", 600)
    for key in BODIES:
        put_at(context, archive, key, "anna", offset=1)
    wanted = [(key, 0, 10) for key in BODIES]  # of the larger half it cannot be known by themselves
    reads = list(archive.read_many("src", wanted))
    assert {one.key: one.body for one in reads} == {key: body[:10] for key, body in BODIES.items()}
    assert len(context.store.asked) == 2
    for key in sorted(BODIES)[:3]:
        for provider in ("bert", "carl"):
            put_at(context, archive, key, provider, offset=2)
    reads = {one.key: one for one in archive.read_many("src", BODIES)}
    assert [key for key, one in reads.items() if isinstance(one.error, IntegrityError)] == sorted(
        BODIES
    )[:3]
    assert all(one.body == BODIES[key] for key, one in reads.items() if not one.error)


def test_where_who_broke_off_may_have_lied_the_others_are_asked(context, archive, monkeypatch):
    context.store.breaks = {"anna": 50_000}
    put_at(context, archive, "dir/000", "anna")
    put_at(context, archive, "dir/199", "bert")
    put_at(context, archive, "dir/198", "bert")
    assert {one.key: one.body for one in archive.read_many("src", BODIES)} == BODIES


def test_providers_that_are_away_are_not_asked_for_each_object(context, archive):
    context.store.away = set(context.store.folders)
    reads = list(archive.read_many("src", BODIES))
    assert {type(one.error) for one in reads} == {StoreUnreachable}
    assert len(context.store.asked) == 3
    context.store.away = {"anna", "bert"}
    assert all(one.body == BODIES[one.key] for one in archive.read_many("src", BODIES))


def test_what_is_not_archived_says_why_and_keeps_nothing_else_from_being_read(context, archive):
    context.ledger.skips.record("src", [skip("cold")])
    reads = {
        one.key: one for one in archive.read_many("src", ["dir/001", "cold", "never", "dir/002"])
    }
    assert (reads["dir/001"].body, reads["dir/002"].body) == (BODIES["dir/001"], BODIES["dir/002"])
    assert "it was skipped as cold_storage" in str(reads["cold"].error)
    assert str(reads["never"].error) == "'never' of source src is not archived"
    for asked in (lambda: archive.read("other", "a"), lambda: list(archive.ls("other"))):
        with pytest.raises(NotLocated, match="no source 'other'"):
            asked()
    with pytest.raises(NotLocated, match="not archived as version 'v9'"):
        archive.open("src", "dir/001", "v9")
    assert list(archive.ls("src", "nothing")) == []


@pytest.mark.parametrize("name", [None, b"dir/001", 1])
def test_a_name_that_is_not_text_is_refused(archive, name):
    for asked in (
        lambda: archive.read("src", name),
        lambda: archive.read(name, "dir/001"),
        lambda: archive.find("src", name),
        lambda: archive.open("src", "dir/001", name or 0),
        lambda: archive.read_many(name, ["dir/001"]),
        lambda: next(archive.ls("src", name)),
        lambda: next(archive.ls(name)),
    ):
        with pytest.raises(TypeError, match="a source, a key and a version are text"):
            asked()


@pytest.mark.parametrize("source", ["\udcff", "s\0", "", "s" * 2000])
def test_what_can_be_no_source_is_not_located_as_any_other_that_is_not_there(archive, source):
    now = datetime.now(UTC)
    for asked in (
        lambda: archive.read(source, "a"),
        lambda: archive.find(source, "a", "v1"),
        lambda: archive.open(source, "a", as_of=now),
        lambda: list(archive.ls(source, "a")),
        lambda: list(archive.ls(source, recursive=True, as_of=now)),
        lambda: next(archive.read_many(source, ["a"])).body,
    ):
        with pytest.raises(NotLocated, match="the ledger has no source"):
            asked()


@pytest.mark.parametrize(
    ("moment", "error"),
    [
        (MOMENT.replace(tzinfo=None), UsageError),
        ("2026-01-01", TypeError),
        (MOMENT.date(), TypeError),
    ],
)
def test_what_is_no_time_with_a_zone_is_refused_also_where_nothing_is_archived(
    archive, moment, error
):
    for asked in (
        lambda: archive.read("src", "dir/001", as_of=moment),
        lambda: archive.find("src", "never", as_of=moment),
        lambda: next(archive.ls("src", as_of=moment)),
        lambda: next(archive.ls("src", "never", as_of=moment)),
    ):
        with pytest.raises(error, match="zone"):
            asked()


def test_times_that_utc_has_not_are_times_like_others(archive):
    first = datetime.min.replace(tzinfo=timezone(timedelta(hours=14)))
    last = datetime.max.replace(tzinfo=timezone(timedelta(hours=-14)))
    with pytest.raises(
        NotLocated,
        match=r"'dir/001' of source src is not archived as it was at 0001-01-01 00:00:00[+]14:00",
    ):
        archive.read("src", "dir/001", as_of=first)
    assert list(archive.ls("src", recursive=True, as_of=first)) == []
    assert archive.read("src", "dir/001", as_of=last) == BODIES["dir/001"]
    assert {one.status for one in archive.ls("src", recursive=True, as_of=last)} == {"archived"}


@pytest.mark.parametrize(
    "one",
    [None, b"dir/001", ("dir/001", 0), (b"dir", 0, 4), ("dir/001", "0", "4"), ("dir/001", 0.5, 4)],
)
def test_what_is_neither_a_key_nor_a_range_of_one_is_refused(archive, one):
    with pytest.raises(TypeError, match=r"is neither a key nor [(]key, start, end[)]"):
        list(archive.read_many("src", ["dir/001", one]))


def test_one_text_is_not_read_as_keys_of_a_character_each(archive):
    with pytest.raises(
        TypeError, match=r"several keys and ranges, and not one text: \['dir/001'\]"
    ):
        next(archive.read_many("src", "dir/001"))


def test_a_batch_is_one_look_up_and_memory_does_not_hold_all(context, archive, monkeypatch):
    monkeypatch.setattr(bulk, "LOOKUP_KEYS", 10)
    taken = []
    keys = (taken.append(key) or key for key in sorted(BODIES) * 10)
    reads = archive.read_many("src", keys)
    assert next(reads).body
    assert len(taken) < 1000
    reads.close()


def test_by_a_closed_archive_nothing_is_read(context, archive, tmp_path):
    archive.read("src", "dir/001")  # its location is remembered
    file, listed, listed_on = (
        archive.open("src", "dir/002"),
        archive.ls("src"),
        archive.ls("src", recursive=True),
    )
    reads, reads_on = archive.read_many("src", BODIES), archive.read_many("src", BODIES)
    begun = archive.open("src", "dir/003")
    assert all((next(listed_on), next(reads_on), begun.read(1)))
    archive.close()
    archive.close()
    context.store.asked.clear()
    for asked in (
        archive.sources,
        lambda: archive.read("src", "dir/001"),
        lambda: archive.find("src", "dir/001"),
        lambda: archive.open("src", "dir/001"),
        lambda: archive.save("src", "dir/001", tmp_path / "one"),
        lambda: archive.read_many("src", ["dir/001"]),
        lambda: next(listed),
        lambda: next(listed_on),
        lambda: next(reads),
        lambda: next(reads_on),
    ):
        with pytest.raises(UsageError, match="the archive is closed"):
            asked()
    for one in (file, begun):
        with pytest.raises(ValueError, match="closed"):
            one.read(1)
    assert (context.store.asked, list(tmp_path.glob("one"))) == ([], [])


# --- what is remembered
# ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted_look_ups(lookup, monkeypatch):
    asked = []
    locate = lookup.locate
    with monkeypatch.context() as patched:
        patched.setattr(
            lookup, "locate", lambda *args, **more: asked.append(args) or locate(*args, **more)
        )
        yield asked


def test_a_look_up_is_used_again_for_a_moment_and_only_where_the_bytes_are_compared(
    context, archive, monkeypatch
):
    with counted_look_ups(context.ledger.lookup, monkeypatch) as asked:
        for _ in range(3):
            assert archive.read("src", "dir/001") == BODIES["dir/001"]
        assert len(asked) == 1
        archive.open("src", "dir/001").close()
        archive.find("src", "dir/001")
        assert len(asked) == 3
        monkeypatch.setattr("caf_pipeline.retrieval.archive.LOOKUP_SECONDS", 0)
        archive.read("src", "dir/001")
        assert len(asked) == 4


def test_a_location_that_was_given_up_meanwhile_is_looked_up_again(context, archive):
    before = archive.find("src", "dir/001").location
    archive.read("src", "dir/001")
    end(context.ledger, before.chunk, ChunkState.EXPIRED)
    context.store.forget(before.posting)
    with pytest.raises(
        NotLocated, match=f"was archived in chunk {before.chunk}, which is 'expired'"
    ):
        archive.read("src", "dir/001")
    assert archive_everything(context)
    assert archive.read("src", "dir/001") == BODIES["dir/001"]
    assert archive.find("src", "dir/001").location.chunk != before.chunk


def test_a_remembered_location_gives_no_wrong_byte_and_its_failure_is_told_once(
    context, archive, monkeypatch
):
    archive.read("src", "dir/001")
    put_at(context, archive, "dir/001")
    context.store.asked.clear()
    with pytest.raises(IntegrityError):
        archive.read("src", "dir/001")
    assert len(context.store.asked) == 3


def test_few_look_ups_are_remembered(context, archive, monkeypatch):
    monkeypatch.setattr("caf_pipeline.retrieval.archive.MAX_LOOKUPS", 2)
    with counted_look_ups(context.ledger.lookup, monkeypatch) as asked:
        for number in (1, 2, 3, 1):
            archive.read("src", f"dir/{number:03}")
    assert len(asked) == 4


def test_a_database_that_is_away_is_said_and_the_archive_reads_again_once_it_is_back(
    context, archive, database, postgres_url
):
    name = database.name
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,)
        )
        for ask in (
            lambda: archive.read("src", "dir/001"),
            lambda: list(archive.read_many("src", ["dir/001"])),
        ):
            with pytest.raises(LedgerError, match=name):
                ask()
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    assert archive.read("src", "dir/001") == BODIES["dir/001"]


# --- by await
# ------------------------------------------------------------------------------------------


def test_by_await_the_same_is_read(context, archive, tmp_path):
    async def read():
        async with AsyncArchive(archive) as awaited:
            one, two = await asyncio.gather(
                awaited.read("src", "dir/001"), awaited.read("src", "dir/002")
            )
            with await awaited.open("src", "dir/003") as file:
                three = await asyncio.to_thread(file.read)
            many = {
                read.key: read.body
                async for read in awaited.read_many("src", ["dir/004", "dir/005"])
            }
            listed = [entry async for entry in awaited.ls("src")]
            await awaited.save("src", "dir/006", tmp_path / "six")
            assert (
                await awaited.sources(),
                (await awaited.find("src", "dir/006")).location.size_bytes,
            ) == (["src"], 506)
            async for _ in awaited.read_many("src", BODIES):
                break
            return [one, two, three, *(many[key] for key in sorted(many))], listed

    bodies, listed = asyncio.run(read())
    assert bodies == [BODIES[key] for key in sorted(BODIES)[1:6]]
    assert listed == ["dir/"]
    assert (tmp_path / "six").read_bytes() == BODIES["dir/006"]


def test_by_await_there_are_the_same_methods(context):
    closed = []
    asyncio.run(
        AsyncArchive(
            Archive(context.ledger.lookup, context.store, lambda: closed.append(True))
        ).close()
    )
    assert closed
    plain, awaited = (
        {
            name: inspect.signature(method).parameters
            for name, method in vars(one).items()
            if name[0] != "_"
        }
        for one in (Archive, AsyncArchive)
    )
    assert plain == awaited


def test_a_read_that_is_cancelled_lets_the_next_one_go_on(context, archive):
    async def read():
        awaited = AsyncArchive(archive)
        task = asyncio.create_task(anext(awaited.read_many("src", BODIES)))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return await awaited.read("src", "dir/001")

    assert asyncio.run(read()) == BODIES["dir/001"]
