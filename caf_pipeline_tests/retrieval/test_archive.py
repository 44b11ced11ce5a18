"""The Python API: results, numbers of requests, and cached locations."""

import asyncio
import contextlib
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
from caf_pipeline_tests.contracts.chunk_store import corrupt
from caf_pipeline_tests.support.breaking_folders import BreakingFolders
from caf_pipeline_tests.support.ledger_rows import end, skip
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
    """Corrupt one byte of an object at some or all providers."""
    location = archive.find("src", key).location
    for provider in providers or context.store.folders:
        corrupt(context.store.file(provider, location.posting), at=location.row.start_byte + offset)


def test_neighbouring_objects_share_one_request(context, archive):
    assert archive.read("src", "dir/007") == BODIES["dir/007"]
    assert len(context.store.asked) == 1
    with archive.open("src", "dir/008") as file:
        file.seek(100)
        assert (file.read(), file.raw.compared) == (BODIES["dir/008"][100:], True)
    assert len(context.store.asked) == 2
    wanted = random.sample(sorted(BODIES), len(BODIES))
    reads = list(archive.read_many("src", wanted))
    assert {read.number: read.body for read in reads} == {
        number: BODIES[key] for number, key in enumerate(wanted)
    }
    assert all(read.compared and read.key == wanted[read.number] for read in reads)
    assert len(context.store.asked) == 3


def test_distant_ranges_are_read_in_offset_order(context, archive, monkeypatch):
    monkeypatch.setattr(bulk, "MERGE_GAP_BYTES", 1000)
    monkeypatch.setattr(bulk, "REQUEST_BYTES", 4000)
    keys = sorted(BODIES)
    wanted = [*keys[:30], keys[100], keys[199]]
    assert {read.key: read.body for read in archive.read_many("src", reversed(wanted))} == {
        key: BODIES[key] for key in wanted
    }
    asked = sorted(context.store.asked, key=lambda one: one[1])
    assert all(end - start <= 4000 for _, start, end in asked)
    assert len(asked) < len(wanted) / 3
    assert (
        sum(end - start for _, start, end in asked)
        < sum(len(BODIES[key]) for key in wanted) + 30 * 1000
    )


@pytest.mark.thorough
@pytest.mark.parametrize("in_memory", [0, 600, 1 << 20])
def test_ranges_behave_like_slices(context, archive, monkeypatch, in_memory):
    for module in (bulk, object_file):
        monkeypatch.setattr(module, "IN_MEMORY_BYTES", in_memory)
    monkeypatch.setattr(bulk, "REQUEST_BYTES", 5000)
    dice = random.Random(5)
    edges = [None, 0, 1, -1, 5, -5, 300, 10_000, -10_000]
    wanted = [
        (dice.choice(sorted(BODIES)), dice.choice(edges), dice.choice(edges)) for _ in range(400)
    ]
    reads = sorted(archive.read_many("src", wanted), key=lambda one: one.number)
    assert [read.body for read in reads] == [BODIES[key][start:end] for key, start, end in wanted]
    for one in reads:
        size = len(BODIES[one.key])
        assert one.compared == (size <= in_memory or one.end_byte - one.start_byte in (0, size))
    assert len(context.store.asked) < len(wanted) / 3


def test_only_an_object_that_every_provider_falsifies_fails(context, archive):
    put_at(context, archive, "dir/003", "anna")
    put_at(context, archive, "dir/005", offset=1)
    reads = {read.key: read for read in archive.read_many("src", BODIES)}
    assert reads.keys() == BODIES.keys()
    assert {key: one.body for key, one in reads.items() if not one.error} == {
        key: body for key, body in BODIES.items() if key != "dir/005"
    }
    with pytest.raises(IntegrityError, match=r"(?s)'dir/005'.*anna: .*bert: .*carl: "):
        _ = reads["dir/005"].body


def test_provider_with_wrong_bytes_is_not_asked_again(context, archive, monkeypatch):
    for module in (bulk, object_file):
        monkeypatch.setattr(module, "IN_MEMORY_BYTES", 600)
    for key in BODIES:
        put_at(context, archive, key, "anna", offset=1)
    wanted = [(key, 0, 10) for key in BODIES]  # ranges of the larger half cannot be verified
    reads = list(archive.read_many("src", wanted))
    assert {read.key: read.body for read in reads} == {
        key: body[:10] for key, body in BODIES.items()
    }
    assert len(context.store.asked) == 2
    for key in sorted(BODIES)[:3]:
        for provider in ("bert", "carl"):
            put_at(context, archive, key, provider, offset=2)
    reads = {read.key: read for read in archive.read_many("src", BODIES)}
    assert [key for key, one in reads.items() if isinstance(one.error, IntegrityError)] == sorted(
        BODIES
    )[:3]
    assert all(one.body == BODIES[key] for key, one in reads.items() if not one.error)


def test_other_providers_are_asked_after_a_suspect_failed(context, archive, monkeypatch):
    context.store.breaks = {"anna": 50_000}
    put_at(context, archive, "dir/000", "anna")
    put_at(context, archive, "dir/199", "bert")
    put_at(context, archive, "dir/198", "bert")
    assert {read.key: read.body for read in archive.read_many("src", BODIES)} == BODIES


def test_providers_that_are_away_are_not_asked_for_each_object(context, archive):
    context.store.away = set(context.store.folders)
    reads = list(archive.read_many("src", BODIES))
    assert {type(read.error) for read in reads} == {StoreUnreachable}
    assert len(context.store.asked) == 3
    context.store.away = {"anna", "bert"}
    assert all(read.body == BODIES[read.key] for read in archive.read_many("src", BODIES))


def test_missing_objects_are_explained_and_do_not_stop_others(context, archive):
    context.ledger.skips.record("src", [skip("cold")])
    reads = {
        read.key: read for read in archive.read_many("src", ["dir/001", "cold", "never", "dir/002"])
    }
    assert (reads["dir/001"].body, reads["dir/002"].body) == (BODIES["dir/001"], BODIES["dir/002"])
    assert "cold_storage" in str(reads["cold"].error)
    assert "'never'" in str(reads["never"].error)
    for call in (lambda: archive.read("other", "a"), lambda: list(archive.ls("other"))):
        with pytest.raises(NotLocated, match="no source 'other'"):
            call()
    with pytest.raises(NotLocated, match="'v9'"):
        archive.open("src", "dir/001", "v9")
    assert list(archive.ls("src", "nothing")) == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", [None, b"dir/001", 1])
def test_a_name_that_is_not_text_is_refused(archive, name):
    for call in (
        lambda: archive.read("src", name),
        lambda: archive.read(name, "dir/001"),
        lambda: archive.find("src", name),
        lambda: archive.open("src", "dir/001", name or 0),
        lambda: archive.read_many(name, ["dir/001"]),
        lambda: next(archive.ls("src", name)),
        lambda: next(archive.ls(name)),
    ):
        with pytest.raises(TypeError, match="must be text"):
            call()


@pytest.mark.thorough
@pytest.mark.parametrize("source", ["\udcff", "s\0", "", "s" * 2000])
def test_impossible_source_names_are_not_located(archive, source):
    now = datetime.now(UTC)
    for call in (
        lambda: archive.read(source, "a"),
        lambda: archive.find(source, "a", "v1"),
        lambda: archive.open(source, "a", as_of=now),
        lambda: list(archive.ls(source, "a")),
        lambda: list(archive.ls(source, recursive=True, as_of=now)),
        lambda: next(archive.read_many(source, ["a"])).body,
    ):
        with pytest.raises(NotLocated, match="no source"):
            call()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("moment", "error"),
    [
        (MOMENT.replace(tzinfo=None), UsageError),
        ("2026-01-01", TypeError),
        (MOMENT.date(), TypeError),
    ],
)
def test_invalid_times_are_refused_even_without_objects(archive, moment, error):
    for call in (
        lambda: archive.read("src", "dir/001", as_of=moment),
        lambda: archive.find("src", "never", as_of=moment),
        lambda: next(archive.ls("src", as_of=moment)),
        lambda: next(archive.ls("src", "never", as_of=moment)),
    ):
        with pytest.raises(error, match=r"zone|datetime"):
            call()


def test_times_that_utc_has_not_are_times_like_others(archive):
    first = datetime.min.replace(tzinfo=timezone(timedelta(hours=14)))
    last = datetime.max.replace(tzinfo=timezone(timedelta(hours=-14)))
    with pytest.raises(NotLocated, match=r"'dir/001'.* 0001-01-01 00:00:00[+]14:00"):
        archive.read("src", "dir/001", as_of=first)
    assert list(archive.ls("src", recursive=True, as_of=first)) == []
    assert archive.read("src", "dir/001", as_of=last) == BODIES["dir/001"]
    assert {location.status for location in archive.ls("src", recursive=True, as_of=last)} == {
        "archived"
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    "one",
    [None, b"dir/001", ("dir/001", 0), (b"dir", 0, 4), ("dir/001", "0", "4"), ("dir/001", 0.5, 4)],
)
def test_invalid_read_requests_are_refused(archive, one):
    with pytest.raises(TypeError, match=r"[(]key, start, end[)]"):
        list(archive.read_many("src", ["dir/001", one]))


def test_single_text_is_refused_as_requests(archive):
    with pytest.raises(TypeError, match=r"\['dir/001'\]"):
        next(archive.read_many("src", "dir/001"))


def test_keys_are_looked_up_in_batches(context, archive, monkeypatch):
    monkeypatch.setattr(bulk, "LOOKUP_KEYS", 10)
    taken = []
    keys = (taken.append(key) or key for key in sorted(BODIES) * 10)
    reads = archive.read_many("src", keys)
    assert next(reads).body
    assert len(taken) < 1000
    reads.close()


def test_closed_archive_reads_nothing(context, archive, tmp_path):
    archive.read("src", "dir/001")  # its location is cached
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
    for call in (
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
        with pytest.raises(UsageError, match="closed"):
            call()
    for one in (file, begun):
        with pytest.raises(ValueError, match="closed"):
            one.read(1)
    assert (context.store.asked, list(tmp_path.glob("one"))) == ([], [])


# --- cached locations
# ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted_look_ups(lookup, monkeypatch):
    calls = []
    locate = lookup.locate
    with monkeypatch.context() as patched:
        patched.setattr(
            lookup, "locate", lambda *args, **more: calls.append(args) or locate(*args, **more)
        )
        yield calls


def test_cached_location_is_used_only_for_verified_reads(context, archive, monkeypatch):
    with counted_look_ups(context.ledger.lookup, monkeypatch) as calls:
        for _ in range(3):
            assert archive.read("src", "dir/001") == BODIES["dir/001"]
        assert len(calls) == 1
        archive.open("src", "dir/001").close()
        archive.find("src", "dir/001")
        assert len(calls) == 3
        monkeypatch.setattr("caf_pipeline.retrieval.archive.LOOKUP_SECONDS", 0)
        archive.read("src", "dir/001")
        assert len(calls) == 4


@pytest.mark.thorough
def test_stale_cached_location_is_looked_up_again(context, archive):
    before = archive.find("src", "dir/001").location
    archive.read("src", "dir/001")
    end(context.ledger, before.chunk, ChunkState.EXPIRED)
    context.store.forget(before.posting)
    with pytest.raises(NotLocated, match=f"{before.chunk}.* 'expired'"):
        archive.read("src", "dir/001")
    assert archive_everything(context)
    assert archive.read("src", "dir/001") == BODIES["dir/001"]
    assert archive.find("src", "dir/001").location.chunk != before.chunk


def test_cached_location_never_returns_wrong_bytes(context, archive, monkeypatch):
    archive.read("src", "dir/001")
    put_at(context, archive, "dir/001")
    context.store.asked.clear()
    with pytest.raises(IntegrityError):
        archive.read("src", "dir/001")
    # It asks each provider once for the object's bytes, then for the manifest.
    places = [place for _, *place in context.store.asked]
    assert places.count(places[0]) == 3


def test_few_look_ups_are_remembered(context, archive, monkeypatch):
    monkeypatch.setattr("caf_pipeline.retrieval.archive.MAX_LOOKUPS", 2)
    with counted_look_ups(context.ledger.lookup, monkeypatch) as calls:
        for number in (1, 2, 3, 1):
            archive.read("src", f"dir/{number:03}")
    assert len(calls) == 4


def test_archive_reads_again_after_a_database_outage(context, archive, database, postgres_url):
    name = database.name
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,)
        )
        for call in (
            lambda: archive.read("src", "dir/001"),
            lambda: list(archive.read_many("src", ["dir/001"])),
        ):
            with pytest.raises(LedgerError, match=name):
                call()
        admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    assert archive.read("src", "dir/001") == BODIES["dir/001"]


def test_async_programs_read_in_threads(archive):
    async def read():
        return await asyncio.gather(
            *(asyncio.to_thread(archive.read, "src", key) for key in ("dir/001", "dir/002"))
        )

    assert asyncio.run(read()) == [BODIES["dir/001"], BODIES["dir/002"]]
