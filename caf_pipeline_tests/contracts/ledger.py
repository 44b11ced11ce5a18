"""The contract of a ledger.

A test class of an implementation inherits `LedgerContract` and provides the fixture `ledger`. The
functions prepare a ledger for a test; other test modules use them, too.
"""

import contextlib
import hashlib
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from caf_pipeline.caf.archive import Member
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.errors import (
    ClaimConflict,
    HeldByOther,
    IllegalMove,
    IntegrityError,
    LeaseLost,
    LedgerError,
    NotLocated,
    StagingError,
    UsageError,
)
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.ledger_rows import LOCATED_SCHEMA, STANDING_SCHEMA
from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.inventory.manifest import CHECKSUM_COLUMNS, LOCATION_SCHEMA, LogTimes
from caf_pipeline.inventory.objects import CurrentException, S3Object, SkipReason, is_rewritten
from caf_pipeline.inventory.plan import CLAIM_COLUMNS, PLAN_SCHEMA, ChunkPlan
from caf_pipeline.ledger.processes import this_process
from caf_pipeline.ledger.records import (
    CopyCheck,
    Holder,
    InventoryRecord,
    OperatorControls,
    PlanRecord,
    RemoteChunk,
    Reservation,
    SealRecord,
    Skip,
    plan_lease,
)
from caf_pipeline.store.protocol import Copy, PostedFile, PostRecord, Sample
from caf_pipeline_tests.support.postgres import connected

SOURCE = "src"
ROOT = b"\x01" * 32
EARLY = datetime(2024, 1, 1, tzinfo=UTC)
VERSION = "etag:abc:10"

ODD_KEYS = [
    "plain",
    "with 'single' and \"double\" quotes",
    "tab\tnewline\ncarriage\rreturn",
    "back\\slash \\N \\. \\x41",
    "\\.",
    "comma,semicolon;{brace}",
    unicodedata.normalize("NFC", "é"),
    unicodedata.normalize("NFD", "é"),
    "🗄" * 256,  # 1,024 bytes
    " leading and trailing ",
    "/",
    "a//b/../c",
    "\x01\x1f\x7f\u0085\u2028\ufeff",
]

_serial = itertools.count(1)


def holder(run: str = "run-1") -> Holder:
    return this_process(run)


def planned(number: int, keys: Sequence[str]) -> ChunkPlan:
    return ChunkPlan(number, len(keys), 10 * len(keys), 1000, ".caf/chunk", ".caf/manifest.parquet")


def _batches(rows: Iterable[dict[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield rows as batches: the first row alone, so that there are several, and the rest."""
    remaining, size = iter(rows), 1
    while batch := list(islice(remaining, size)):
        yield pa.RecordBatch.from_pylist(batch, schema)
        size = 500


def claims(*rows: tuple[int, str], version: str = VERSION) -> Iterator[pa.RecordBatch]:
    """Yield batches of claims on keys by chunk number."""
    identity = {
        "object_version": version,
        "version_id": version_id(version),
        "etag": "abc",
        "size_bytes": 10,
    }
    values = (
        {"chunk_number": number, "key": key.encode(), **identity, "last_modified": EARLY}
        for number, key in rows
    )
    return _batches(values, pa.schema([PLAN_SCHEMA.field(name) for name in CLAIM_COLUMNS]))


def version_id(object_version: str) -> str | None:
    return None if object_version == VERSION else object_version


def plan_record(chunks: int = 1, source: str = SOURCE) -> PlanRecord:
    sha256 = hashlib.sha256(f"{source} {next(_serial)}".encode()).digest()
    return PlanRecord(
        source, sha256, sha256.hex()[:8], "snapshot.parquet", "plans/x", chunks, 10 * chunks
    )


def register_plan(
    ledger: Any, plan: PlanRecord, chunks: Sequence[ChunkPlan], claimed: Iterable[pa.RecordBatch]
) -> None:
    with ledger.leases.hold(plan_lease(plan.source), holder()) as lease:
        ledger.plans.register(lease, plan, chunks, claimed)


def register(
    ledger: Any, *batches: Sequence[str], source: str = SOURCE, skips: Iterable[Skip] = ()
) -> list[str]:
    """Register a plan with a chunk for each batch of keys; return the chunks' names."""
    ledger.sources.register(source, f"s3://{source}")
    plan = plan_record(source=source)
    names = [f"{source}-{plan.name}-{number:05}" for number in range(1, len(batches) + 1)]
    chunks = [planned(number, keys) for number, keys in enumerate(batches, 1)]
    register_plan(
        ledger,
        plan,
        chunks,
        claims(*((number, key) for number, keys in enumerate(batches, 1) for key in keys)),
    )
    ledger.skips.record(source, skips)
    return names


def remove(ledger: Any, source: str = SOURCE) -> None:
    with ledger.leases.hold(plan_lease(source), holder("remover")) as lease:
        ledger.removal.remove(lease, source)


def settled(
    ledger: Any, asked: Sequence[tuple[str, str]], *, modified: datetime = EARLY
) -> set[tuple[str, str]]:
    """Return the objects (key, object version), with this LastModified, that need no plan."""
    listed = [
        S3Object(key.encode(), version_id(version), "abc", 10, modified) for key, version in asked
    ]
    return ledger.content.settled_objects(SOURCE, listed)


def skip(key: str, reason: SkipReason = SkipReason.COLD_STORAGE) -> Skip:
    return Skip(key, VERSION, reason, "as S3 said", "abc", 10)


def seal_facts(members: int, skipped: int = 0, released: int = 0) -> SealRecord:
    samples = [Sample(0, 100, b"\x02" * 32), Sample(900, 100, b"\x03" * 32)]
    return SealRecord(
        1000, 1000, members, 10 * members, skipped, released, ROOT, 3, samples, 900, bytes(32)
    )


def location(
    key: str, *, modified: datetime = EARLY, version: str = VERSION, start: int = 0
) -> LocationRow:
    return LocationRow(
        key,
        version,
        version_id(version),
        start,
        start + 10,
        "abc",
        modified,
        hashlib.sha256(key.encode()).digest(),
    )


def batches(
    rows: Iterable[LocationRow], headers: ObjectHeaders | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield rows as batches, with the keys' `CHECKSUMS` and these headers (None: not known)."""
    columns = (
        {**asdict(headers), "user_metadata": sorted(headers.user_metadata.items())}
        if headers
        else {}
    )
    return _batches(
        (location_values(row) | dict(CHECKSUMS.get(row.key, {})) | columns for row in rows),
        LOCATION_SCHEMA,
    )


def location_values(row: LocationRow) -> dict[str, Any]:
    """Return a row of LOCATION_SCHEMA without checksums and headers."""
    again = is_rewritten(row.object_version, row.etag, row.end_byte - row.start_byte)
    return asdict(row) | {"rewritten_at": row.last_modified if again else None}


CHECKSUMS = {"with-checksums": {"crc64nvme": b"\0" * 7 + b"\1", "s3_checksum": "crc32:00000002"}}


POSTING = PostRecord(ROOT, "jkl1owner", 42, 1000)


def claimed(ledger: Any, chunk: str, *, modified: datetime = EARLY) -> list[LocationRow]:
    """Return a row for each object that the chunk claims."""
    query = """SELECT file_path, object_version(version_id, claims.etag, size_bytes, rewritten_at)
        FROM claims JOIN caf_files USING (caf_file_id) WHERE caf_files.name = %(chunk)s ORDER BY
            1"""
    with connected(ledger.database) as connection:
        rows = connection.execute(query, {"chunk": chunk}).fetchall()
    return [location(key, modified=modified, version=version) for key, version in rows]


def seal(
    ledger: Any,
    lease: Any,
    chunk: str,
    skips: Sequence[Skip] = (),
    released: Sequence[tuple[str, str]] = (),
    *,
    rows: Sequence[LocationRow] | None = None,
    facts: SealRecord | None = None,
    headers: ObjectHeaders | None = None,
) -> None:
    """Seal a chunk with these rows, or with its claims without skipped and released objects."""
    if rows is None:
        excluded = {one.key for one in skips} | {key for key, _ in released}
        rows = [row for row in claimed(ledger, chunk) if row.key not in excluded]
    facts = facts or seal_facts(len(rows), len(skips), len(released))
    ledger.moves.seal(lease, chunk, facts, skips, released, rows=lambda: batches(rows, headers))


def bring_to(
    ledger: Any,
    chunk: str,
    state: ChunkState,
    *,
    modified: datetime = EARLY,
    headers: ObjectHeaders | None = None,
) -> None:
    """Move a planned chunk along the flow until it is in `state`."""
    S = ChunkState
    with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
        moves = {
            S.PACKING: lambda: ledger.moves.move(lease, chunk, S.PLANNED, S.PACKING),
            S.SEALED: lambda: seal(
                ledger,
                lease,
                chunk,
                rows=claimed(ledger, chunk, modified=modified),
                headers=headers,
            ),
            S.POSTING: lambda: ledger.moves.move(lease, chunk, S.SEALED, S.POSTING),
            S.POSTED: lambda: ledger.moves.record_posting(lease, chunk, POSTING),
            S.UPLOADING: lambda: ledger.moves.move(lease, chunk, S.POSTED, S.UPLOADING),
            S.VERIFIED: lambda: ledger.replicas.record_verified(
                lease, chunk, [Copy("provider", "proof")]
            ),
            S.LOCATED: lambda: ledger.moves.load_locations(lease, chunk),
        }
        for reached, move in moves.items():
            move()
            if reached is state:
                return


def archive(
    ledger: Any, keys: Sequence[str], *, modified: datetime = EARLY, source: str = SOURCE
) -> str:
    """Plan and archive a chunk of these keys; return its name."""
    (chunk,) = register(ledger, keys, source=source)
    bring_to(ledger, chunk, ChunkState.LOCATED, modified=modified)
    return chunk


def restored(
    number: int, keys: Sequence[str], *, skipped: int = 0, archive_id: str | None = None
) -> RemoteChunk:
    """Return a chunk of these keys as read from a store, posted in the block of its number."""
    return RemoteChunk(
        archive_id=archive_id,
        file=PostedFile(replace(POSTING, start=number), 3),
        copies=[Copy("p", "proof")],
        read_from=["p"],
        silent={},
        wrong={},
        name=f"src-0a0b0c0d-{number:05d}",
        source=SOURCE,
        plan="0a0b0c0d",
        number=number,
        snapshot="snap",
        plan_sha256=None,
        object_count=None,
        object_bytes=None,
        member_count=len(keys),
        member_bytes=10 * len(keys),
        skipped_count=skipped,
        samples=seal_facts(1).samples,
        manifest=Member(".caf/manifest.parquet", 900, 950),
        manifest_sha256=b"m" * 32,
    )


def restore(
    ledger: Any,
    chunk: RemoteChunk,
    rows: Iterable[pa.RecordBatch],
    skips: Iterable[Skip],
    *,
    fault: str = "",
) -> int:
    all_batches = list(rows)
    return ledger.rebuilds.restore_chunk(
        chunk, lambda: all_batches, skips, plan_folder="plans/x", fault=fault
    )


def address_in(ledger: Any) -> str:
    """Return the address of the only source."""
    (archive,) = ledger.sources.archives()
    return archive.address


def end(ledger: Any, chunk: str, *states: ChunkState) -> None:
    with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
        for state in states:
            ledger.moves.move(lease, chunk, ledger.chunks.get(chunk).state, state)


def look(
    ledger: Any, chunk: str, *checks: CopyCheck, again_in: float | None = None, enough: int = 0
) -> None:
    """Record a check of a chunk's copies."""
    with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
        ledger.replicas.record_checks(lease, chunk, checks, again_in=again_in, enough=enough)


def windows_after(ledger: Any, chunk: str, *windows: int | None, apart: bool = False) -> int:
    """Return how many windows count after checks that found the copy proven in these windows."""
    for window in windows:
        look(ledger, chunk, CopyCheck(Copy("provider", "proof", 1), window, apart=apart))
    (copy,) = ledger.replicas.list(chunk)
    return int(copy.windows)


def seen(ledger: Any, chunk: str) -> list[tuple[str, bool, int | None, int, str]]:
    """Return a chunk's copies without their times."""
    known_copies = ledger.replicas.list(chunk)
    return [
        (copy.provider, copy.listed, copy.last_proven, copy.windows, copy.fault)
        for copy in known_copies
    ]


def standing(
    ledger: Any, path: Any, source: str = SOURCE
) -> set[tuple[str, str, str | None, bool]]:
    """Return the rows of the export as (key, standing, reason, due)."""
    count = ledger.exports.standing(source, path)
    table = pq.read_table(path)
    assert table.schema.equals(STANDING_SCHEMA)
    assert table.num_rows == count
    rows = table.to_pylist()
    assert all(row["object_version"] == VERSION for row in rows)
    return {(row["key"].decode(), row["standing"], row["reason"], row["due"]) for row in rows}


def read_back(ledger: Any, chunk: str, opened_with: str | None = None) -> None:
    with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
        ledger.replicas.record_full_read(lease, chunk, "provider", opened_with=opened_with)


def pending(ledger: Any, chunk: str) -> int:
    """Return the number of a sealed chunk's pending rows."""
    return next(rows.pending for rows in ledger.stray_rows.by_chunk(SOURCE) if rows.chunk == chunk)


def located(ledger: Any, path: Any) -> list[dict[str, Any]]:
    """Return the rows of the export of locations, by key."""
    count = ledger.exports.located(SOURCE, path)
    table = pq.read_table(path)
    assert table.schema.equals(LOCATED_SCHEMA)
    assert table.num_rows == count
    rows: list[dict[str, Any]] = table.to_pylist()
    return sorted(rows, key=lambda row: row["key"])


class LedgerContract:
    # --- checksums ---

    def test_recorded_checksums_are_returned(self, ledger, tmp_path):
        archive(ledger, ["with-checksums"])
        (version,) = ledger.content.located_versions(SOURCE, ["with-checksums"])
        sha256 = hashlib.sha256(b"with-checksums").digest()
        assert version.checksums == {
            "sha256": sha256,
            "crc64nvme": b"\0" * 7 + b"\1",
            "crc32": b"\0\0\0\2",
        }
        (row,) = located(ledger, tmp_path / "located.parquet")
        assert {name: row[name] for name in CHECKSUM_COLUMNS} == CHECKSUMS["with-checksums"]

    # --- sources and plans ---

    def test_an_address_is_replaced_until_there_is_a_chunk(self, ledger):
        ledger.sources.register(SOURCE, "s3://typo/")
        ledger.skips.record(SOURCE, [Skip("key", "etag:1:1", SkipReason.TOO_LARGE, "", "1", 1)])
        ledger.rebuilds.begin(SOURCE)
        assert ledger.sources.address(SOURCE) is None
        ledger.sources.register(SOURCE, "s3://a/")
        assert address_in(ledger) == "s3://a/"
        assert ledger.chunks.account(SOURCE).skipped == {}
        assert ledger.rebuilds.began_at(SOURCE) is None

    def test_address_of_a_planning_run_is_kept(self, ledger):
        ledger.sources.register(SOURCE, "s3://a/")
        with ledger.leases.hold(plan_lease(SOURCE), holder()) as lease:
            with pytest.raises(HeldByOther):
                ledger.sources.register(SOURCE, "s3://b/")
            ledger.sources.register(SOURCE, "s3://b/", lease=lease)
        assert address_in(ledger) == "s3://b/"

    def test_another_address_under_the_same_name_is_refused(self, ledger):
        ledger.sources.register(SOURCE, "s3://a/")
        ledger.sources.register(SOURCE, "s3://a/")
        register_plan(ledger, plan_record(), [planned(1, ["a"])], claims((1, "a")))
        with pytest.raises(LedgerError, match="s3://b/"):
            ledger.sources.register(SOURCE, "s3://b/")
        assert ledger.lookup.sources() == [SOURCE]
        assert address_in(ledger) == "s3://a/"

    def test_each_source_gets_its_own_archive_id(self, ledger):
        for name in (SOURCE, "another"):
            ledger.sources.register(name, "s3://a/")
        ids = [ledger.sources.archive_id(name) for name in (SOURCE, "another")]
        assert all(re.fullmatch("[0-9a-f]{32}", archive_id) for archive_id in ids)
        assert len({*ids}) == 2

    def test_source_keeps_its_archive_id(self, ledger):
        assert ledger.sources.archive_id(SOURCE) is None
        ledger.sources.register(SOURCE, "s3://a/")
        archive_id = ledger.sources.archive_id(SOURCE)
        ledger.sources.register(SOURCE, "s3://a/")
        assert ledger.sources.archive_id(SOURCE) == archive_id

    def test_concurrent_registrations_make_one_archive_id(self, ledger):
        def register_source(_):
            ledger.sources.register(SOURCE, "s3://a/")
            return ledger.sources.archive_id(SOURCE)

        with ThreadPoolExecutor(4) as pool:
            assert len({*pool.map(register_source, range(8))}) == 1

    def test_id_of_stored_archive_replaces_that_of_an_empty_source(self, ledger):
        ledger.sources.register(SOURCE, "s3://a/")
        log = ledger.transactions(holder())
        log.record_look("account", ledger.sources.archive_id(SOURCE), 5, 1)
        ledger.sources.restore_archive_id(SOURCE, "a" * 32)
        assert ledger.sources.archive_id(SOURCE) == "a" * 32
        assert ledger.rebuilds.unknown_posts(SOURCE) == 0
        register(ledger, ["a"])
        ledger.sources.restore_archive_id(SOURCE, "b" * 32)
        assert ledger.sources.archive_id(SOURCE) == "a" * 32

    def test_restored_chunk_keeps_the_archive_id_of_its_post(self, ledger):
        ledger.sources.register(SOURCE, "s3://a/")
        source_id = ledger.sources.archive_id(SOURCE)
        for number, archive_id in enumerate([source_id, "b" * 32], 1):
            key = f"key-{number}"
            chunk = restored(number, [key], archive_id=archive_id)
            restore(ledger, chunk, batches([location(key)]), ())
            assert ledger.chunks.get(chunk.name).archive_id == archive_id
        assert ledger.sources.archive_ids(SOURCE) == {source_id, "b" * 32}
        assert {chunk.archive_id for chunk in ledger.chain_listings.located_copies()[1]} == {
            source_id,
            "b" * 32,
        }

    def test_archives_are_set_aside_until_the_address_changes(self, ledger):
        ledger.sources.register(SOURCE, "s3://a/")
        ledger.sources.set_aside(SOURCE, ["b" * 32])
        ledger.sources.set_aside(SOURCE, ["a" * 32])
        assert ledger.sources.ids_set_aside(SOURCE) == {"a" * 32, "b" * 32}
        ledger.sources.register(SOURCE, "s3://b/")
        assert ledger.sources.ids_set_aside(SOURCE) == set()

    def test_a_source_with_nothing_stored_is_removed(self, ledger):
        names = register(ledger, ["a"], ["b"], ["c"], ["d"], skips=[skip("s")])
        kept = archive(ledger, ["a"], source="another")
        bring_to(ledger, names[1], ChunkState.PACKING)
        bring_to(ledger, names[2], ChunkState.SEALED)
        end(ledger, names[3], ChunkState.PARKED, ChunkState.WITHDRAWN)
        ledger.read_failures.count(names[1], [("b", VERSION)], "run-1")
        removable = ledger.removal.removable(SOURCE)
        assert (removable.address, removable.plans, removable.chunks) == (f"s3://{SOURCE}", 1, 4)
        remove(ledger)
        assert ledger.lookup.sources() == ["another"]
        assert [chunk.name for chunk in ledger.chunks.list()] == [kept]
        with pytest.raises(NotLocated):
            ledger.removal.removable(SOURCE)

    def test_a_removed_source_may_be_planned_again(self, ledger):
        plan = plan_record()
        epochs = []
        for address in ("s3://typo/", "s3://right/"):
            ledger.sources.register(SOURCE, address)
            register_plan(ledger, plan, [planned(1, ["a"])], claims((1, "a")))
            (chunk,) = ledger.chunks.list(SOURCE)
            bring_to(ledger, chunk.name, ChunkState.SEALED)
            epochs.append(ledger.chunks.get(chunk.name).epoch)
            if address == "s3://typo/":
                remove(ledger)
        assert epochs[1] > epochs[0]
        end(ledger, chunk.name, ChunkState.POSTING)
        with pytest.raises(IllegalMove):
            remove(ledger)

    def test_a_source_with_an_intended_chunk_goes_once_that_is_withdrawn(self, ledger):
        (chunk,) = register(ledger, ["a"])
        bring_to(ledger, chunk, ChunkState.POSTING)
        assert ledger.removal.removable(SOURCE).intended == [chunk]
        with pytest.raises(IllegalMove, match=chunk):
            remove(ledger)
        with pytest.raises(LedgerError):
            ledger.sources.register(SOURCE, "s3://b/")
        end(ledger, chunk, ChunkState.WITHDRAWN)
        assert ledger.removal.removable(SOURCE).intended == []
        remove(ledger)

    def test_given_up_chunks_let_the_address_and_the_archive_change(self, ledger):
        register(ledger, ["a"])
        (withdrawn,) = (chunk.name for chunk in ledger.chunks.list(SOURCE))
        end(ledger, withdrawn, ChunkState.WITHDRAWN)
        ledger.sources.register(SOURCE, "s3://b/")
        ledger.sources.restore_archive_id(SOURCE, "b" * 32)
        assert (address_in(ledger), ledger.sources.archive_id(SOURCE)) == ("s3://b/", "b" * 32)

    @pytest.mark.parametrize("state", ["posted", "uploading", "verified", "located"])
    def test_a_source_with_a_stored_chunk_stays(self, ledger, state):
        (chunk,) = register(ledger, ["a"])
        bring_to(ledger, chunk, ChunkState(state))
        with pytest.raises(IllegalMove, match=chunk):
            ledger.removal.removable(SOURCE)
        with pytest.raises(IllegalMove, match=chunk):
            remove(ledger)
        assert ledger.chunks.get(chunk).state == state

    def test_a_source_whose_parked_chunk_was_posted_stays(self, ledger):
        (chunk,) = register(ledger, ["a"])
        bring_to(ledger, chunk, ChunkState.POSTED)
        end(ledger, chunk, ChunkState.PARKED)
        with pytest.raises(IllegalMove, match=chunk):
            remove(ledger)

    def test_a_source_that_a_run_works_on_stays(self, ledger):
        first, second = register(ledger, ["a"], ["b"])
        with ledger.leases.hold(f"chunk/{second}", holder()), pytest.raises(HeldByOther):
            remove(ledger)
        with ledger.leases.hold(plan_lease(SOURCE), holder()), pytest.raises(HeldByOther):
            ledger.removal.removable(SOURCE)
        remove(ledger)
        with pytest.raises(NotLocated), ledger.leases.hold(f"chunk/{first}", holder()):
            pass

    def test_a_source_whose_rebuild_goes_on_stays(self, ledger):
        ledger.sources.register(SOURCE, "s3://a/")
        ledger.rebuilds.begin(SOURCE)
        with pytest.raises(LedgerError, match="rebuild"):
            remove(ledger)
        ledger.rebuilds.end(SOURCE)
        remove(ledger)
        assert ledger.lookup.sources() == []

    def test_a_removal_without_its_lease_removes_nothing(self, ledger):
        register(ledger, ["a"])
        with ledger.leases.hold(plan_lease(SOURCE), holder()) as lease:
            pass
        with pytest.raises(LeaseLost):
            ledger.removal.remove(lease, SOURCE)
        assert ledger.lookup.sources() == [SOURCE]

    def test_a_plan_is_found_by_hash_and_name(self, ledger):
        ledger.sources.register(SOURCE, "s3://a/")
        plan = plan_record()
        assert ledger.plans.find(plan.sha256) is None
        register_plan(ledger, plan, [planned(1, ["a"])], claims((1, "a")))
        assert ledger.plans.find(plan.sha256) == plan
        assert ledger.plans.is_name_taken(SOURCE, plan.name)
        assert not ledger.plans.is_name_taken("another", plan.name)

    def test_a_plan_makes_planned_chunks(self, ledger):
        names = register(ledger, ["a", "b"], ["c"])
        chunks = ledger.chunks.list(SOURCE)
        assert [chunk.name for chunk in chunks] == names
        assert [(chunk.state, chunk.number, chunk.object_count) for chunk in chunks] == [
            ("planned", 1, 2),
            ("planned", 2, 1),
        ]
        assert {chunk.archive_id for chunk in chunks} == {ledger.sources.archive_id(SOURCE)}

    def test_a_plan_registered_twice_changes_nothing(self, ledger):
        ledger.sources.register(SOURCE, "s3://a/")
        plan = plan_record()
        for _ in range(2):
            register_plan(ledger, plan, [planned(1, ["a"])], claims((1, "a")))
        assert len(ledger.chunks.list(SOURCE)) == 1
        assert ledger.chunks.account(SOURCE).claimed_objects == 1

    def test_conflicting_claim_names_the_object_and_writes_nothing(self, ledger):
        register(ledger, ["a", "b, c"])
        with pytest.raises(ClaimConflict, match="'b, c"):
            register(ledger, ["d", "b, c"])
        assert len(ledger.chunks.list(SOURCE)) == 1
        assert settled(ledger, [("d", VERSION)]) == set()

    def test_a_located_object_cannot_be_claimed(self, ledger):
        archive(ledger, ["a"])
        with pytest.raises(ClaimConflict, match="'a'"):
            register(ledger, ["a"])

    def test_the_same_key_in_another_source_is_another_object(self, ledger):
        archive(ledger, ["a"])
        archive(ledger, ["a"], source="other")
        assert ledger.lookup.sources() == ["other", SOURCE]

    def test_a_withdrawn_chunk_frees_its_objects(self, ledger):
        (chunk,) = register(ledger, ["a"])
        end(ledger, chunk, ChunkState.WITHDRAWN)
        register(ledger, ["a"])

    def test_an_abandoned_chunk_frees_its_objects(self, ledger):
        (chunk,) = register(ledger, ["a"])
        bring_to(ledger, chunk, ChunkState.POSTED)
        end(ledger, chunk, ChunkState.ABANDONED)
        register(ledger, ["a"])

    def test_a_parked_chunk_keeps_its_claims_and_its_reason(self, ledger):
        (chunk,) = register(ledger, ["a"])
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            ledger.moves.move(
                lease, chunk, ChunkState.PLANNED, ChunkState.PARKED, reason="no more money"
            )
        assert ledger.chunks.get(chunk).reason == "no more money"
        with pytest.raises(ClaimConflict):
            register(ledger, ["a"])

    def test_damage_reason_stays_until_the_chunk_is_repaired(self, ledger):
        chunk = archive(ledger, ["a"])
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            ledger.moves.move(
                lease, chunk, ChunkState.LOCATED, ChunkState.DAMAGED, reason="one copy"
            )
            assert ledger.chunks.get(chunk).reason == "one copy"
            ledger.moves.move(lease, chunk, ChunkState.DAMAGED, ChunkState.LOCATED)
            assert ledger.chunks.get(chunk).reason == ""

    def test_a_withdrawn_chunk_keeps_its_reason(self, ledger):
        (chunk,) = register(ledger, ["a"])
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            ledger.moves.move(
                lease, chunk, ChunkState.PLANNED, ChunkState.WITHDRAWN, reason="too large"
            )
        assert ledger.chunks.get(chunk).reason == "too large"

    # --- moves ---

    def test_an_unknown_chunk_is_not_located(self, ledger):
        with pytest.raises(NotLocated, match="src-none"):
            ledger.chunks.get("src-none")

    def test_packing_counts_attempts(self, ledger):
        (chunk,) = register(ledger, ["a"])
        end(ledger, chunk, ChunkState.PACKING, ChunkState.PACKING)
        assert ledger.chunks.get(chunk).attempts == 2

    def test_move_from_another_state_names_that_state(self, ledger):
        (chunk,) = register(ledger, ["a"])
        end(ledger, chunk, ChunkState.PACKING)
        with (
            ledger.leases.hold(f"chunk/{chunk}", holder()) as lease,
            pytest.raises(IllegalMove, match="it is 'packing'"),
        ):
            ledger.moves.move(lease, chunk, ChunkState.SEALED, ChunkState.POSTING)

    def test_a_move_that_the_life_cycle_forbids_is_illegal(self, ledger):
        (chunk,) = register(ledger, ["a"])
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease, pytest.raises(IllegalMove):
            ledger.moves.move(lease, chunk, ChunkState.PLANNED, ChunkState.LOCATED)

    def test_no_bare_move_makes_a_chunk_located(self, ledger):
        (chunk,) = register(ledger, ["a"])
        bring_to(ledger, chunk, ChunkState.VERIFIED)
        with (
            ledger.leases.hold(f"chunk/{chunk}", holder()) as lease,
            pytest.raises(IllegalMove, match="load_locations"),
        ):
            ledger.moves.move(lease, chunk, ChunkState.VERIFIED, ChunkState.LOCATED)

    @pytest.mark.parametrize("state", [ChunkState.SEALED, ChunkState.POSTED, ChunkState.VERIFIED])
    def test_an_unparked_chunk_cannot_skip_a_step(self, ledger, state):
        (chunk,) = register(ledger, ["a"])
        with pytest.raises(IllegalMove):
            end(ledger, chunk, ChunkState.PARKED, state)
        assert ledger.chunks.get(chunk).state is ChunkState.PARKED

    def test_the_lease_of_another_chunk_moves_nothing(self, ledger):
        one, two = register(ledger, ["a"], ["b"])
        with ledger.leases.hold(f"chunk/{one}", holder()) as lease, pytest.raises(LeaseLost):
            ledger.moves.move(lease, two, ChunkState.PLANNED, ChunkState.PACKING)

    def test_an_earlier_holding_of_a_lease_moves_nothing(self, ledger):
        (chunk,) = register(ledger, ["a"])
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as old:
            pass
        with ledger.leases.hold(f"chunk/{chunk}", holder("run-2")), pytest.raises(LeaseLost):
            ledger.moves.move(old, chunk, ChunkState.PLANNED, ChunkState.PACKING)
        assert ledger.chunks.get(chunk).state is ChunkState.PLANNED

    # --- sealing ---

    def test_a_seal_keeps_its_facts(self, ledger):
        (chunk,) = register(ledger, ["a", "b"])
        bring_to(ledger, chunk, ChunkState.SEALED)
        row = ledger.chunks.get(chunk)
        assert (row.state, row.merkle_root, row.proof_type, row.caf_size_bytes) == (
            ChunkState.SEALED,
            ROOT,
            3,
            1000,
        )
        assert row.samples == (Sample(0, 100, b"\x02" * 32), Sample(900, 100, b"\x03" * 32))

    def test_a_seal_ends_the_claims_of_skipped_and_released_objects(self, ledger, tmp_path):
        (chunk,) = register(ledger, ["a", "b", "c"])
        end(ledger, chunk, ChunkState.PACKING)
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            seal(ledger, lease, chunk, [skip("b")], [("c", VERSION)])
        assert standing(ledger, tmp_path / "s") == {
            ("a", "claimed", None, False),
            ("b", "skipped", "cold_storage", False),
        }
        assert ledger.chunks.account(SOURCE).claimed_objects == 1

    def test_a_chunk_without_members_is_empty_and_claims_nothing(self, ledger):
        (chunk,) = register(ledger, ["a", "b"])
        end(ledger, chunk, ChunkState.PACKING)
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            seal(ledger, lease, chunk, [skip("a"), skip("b")])
        assert ledger.chunks.get(chunk).state is ChunkState.EMPTY
        register(ledger, ["a", "b"])

    def test_a_seal_must_account_for_every_claim(self, ledger):
        (chunk,) = register(ledger, ["a", "b", "c"])
        end(ledger, chunk, ChunkState.PACKING)
        with (
            ledger.leases.hold(f"chunk/{chunk}", holder()) as lease,
            pytest.raises(LedgerError, match="claims 2"),
        ):
            seal(ledger, lease, chunk, [skip("b")], rows=[location("a")])
        assert ledger.chunks.get(chunk).state is ChunkState.PACKING
        assert ledger.chunks.account(SOURCE).skipped == {}

    def test_a_chunk_packed_again_may_archive_what_it_skipped_before(self, ledger):
        (chunk,) = register(ledger, ["a", "b"])
        end(ledger, chunk, ChunkState.PACKING)
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            seal(ledger, lease, chunk, [skip("b")])
            ledger.moves.move(lease, chunk, ChunkState.SEALED, ChunkState.PACKING)
            seal(ledger, lease, chunk)
        assert ledger.chunks.account(SOURCE).claimed_objects == 2

    def test_a_chunk_packed_again_cannot_archive_what_another_chunk_took(self, ledger):
        (chunk,) = register(ledger, ["a", "b"])
        end(ledger, chunk, ChunkState.PACKING)
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            seal(ledger, lease, chunk, [skip("b")])
            register(ledger, ["b"])
            ledger.moves.move(lease, chunk, ChunkState.SEALED, ChunkState.PACKING)
            with pytest.raises(LedgerError, match="claims 1"):
                seal(ledger, lease, chunk, rows=[location("a"), location("b")])

    # --- storing ---

    def test_a_posting_of_other_bytes_is_refused(self, ledger):
        (chunk,) = register(ledger, ["a"])
        bring_to(ledger, chunk, ChunkState.POSTING)
        other = PostRecord(b"\xff" * 32, "jkl1owner", 42, 1000)
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease, pytest.raises(IntegrityError):
            ledger.moves.record_posting(lease, chunk, other)
        assert ledger.chunks.get(chunk).state is ChunkState.POSTING

    def test_a_posted_chunk_knows_its_place(self, ledger):
        (chunk,) = register(ledger, ["a"])
        bring_to(ledger, chunk, ChunkState.POSTED)
        assert (ledger.chunks.get(chunk).owner, ledger.chunks.get(chunk).start) == ("jkl1owner", 42)

    # --- locations ---

    def test_odd_keys_are_located_byte_for_byte(self, ledger):
        chunk = archive(ledger, ODD_KEYS)
        for key in ODD_KEYS:
            located_object = ledger.lookup.locate(SOURCE, key)
            assert (located_object.row, located_object.chunk, located_object.posting) == (
                location(key),
                chunk,
                POSTING,
            )

    def test_a_seal_with_too_few_rows_writes_nothing(self, ledger):
        (chunk,) = register(ledger, ["a", "b"])
        end(ledger, chunk, ChunkState.PACKING)
        with (
            ledger.leases.hold(f"chunk/{chunk}", holder()) as lease,
            pytest.raises(LedgerError, match="2 members"),
        ):
            seal(ledger, lease, chunk, rows=[location("a")], facts=seal_facts(2))
        assert ledger.chunks.get(chunk).state is ChunkState.PACKING
        assert pending(ledger, chunk) == 0

    def test_an_interrupted_seal_writes_nothing_and_can_be_repeated(self, ledger):
        (chunk,) = register(ledger, ["a", "b"])
        end(ledger, chunk, ChunkState.PACKING)

        def broken():
            yield from batches([location("a")])
            raise ConnectionError("the cable")

        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            with pytest.raises(ConnectionError):
                ledger.moves.seal(lease, chunk, seal_facts(2), [], [], rows=broken)
            assert pending(ledger, chunk) == 0
            seal(ledger, lease, chunk)
        assert pending(ledger, chunk) == 2

    def test_no_look_up_finds_sealed_rows_before_they_are_located(self, ledger, tmp_path):
        (chunk,) = register(ledger, ["a"])
        bring_to(ledger, chunk, ChunkState.VERIFIED)
        assert pending(ledger, chunk) == 1
        assert ledger.lookup.locate(SOURCE, "a") is None
        assert (
            ledger.content.located_versions(SOURCE, ["a"]),
            located(ledger, tmp_path / "located.parquet"),
        ) == ([], [])
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            assert ledger.moves.load_locations(lease, chunk) == 1
        assert pending(ledger, chunk) == 0
        assert ledger.lookup.locate(SOURCE, "a").chunk == chunk

    @pytest.mark.parametrize(
        "states",
        [
            [ChunkState.PACKING],
            [ChunkState.WITHDRAWN],
            [ChunkState.PARKED, ChunkState.WITHDRAWN],
            [ChunkState.PARKED, ChunkState.SEALED, ChunkState.PACKING],
        ],
        ids="-".join,
    )
    def test_pending_rows_go_when_a_chunk_goes_back(self, ledger, states):
        chunk, other = register(ledger, ["log"], ["another"])
        bring_to(ledger, other, ChunkState.SEALED)
        end(ledger, chunk, ChunkState.PACKING)
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            ledger.moves.seal(
                lease,
                chunk,
                seal_facts(1),
                [],
                [],
                rows=lambda: batches([location("log")]),
                logs=[LogTimes(0, 1, 2)],
            )
        assert (pending(ledger, chunk), ledger.lookup.chunks_with_log_times([chunk])) == (
            1,
            {chunk},
        )
        end(ledger, chunk, *states)
        assert (pending(ledger, chunk), pending(ledger, other)) == (0, 1)
        assert ledger.lookup.chunks_with_log_times([chunk]) == set()

    def test_an_abandoned_chunk_has_no_pending_rows(self, ledger):
        (chunk,) = register(ledger, ["a"])
        bring_to(ledger, chunk, ChunkState.UPLOADING)
        end(ledger, chunk, ChunkState.ABANDONED)
        assert pending(ledger, chunk) == 0

    def test_a_parked_chunk_keeps_its_pending_rows(self, ledger):
        (chunk,) = register(ledger, ["a"])
        bring_to(ledger, chunk, ChunkState.UPLOADING)
        end(ledger, chunk, ChunkState.PARKED)
        assert pending(ledger, chunk) == 1

    # --- headers ---

    def test_objects_share_a_set_of_headers(self, ledger):
        headers = ObjectHeaders(
            "text/plain", cache_control="no-store", user_metadata={"b": "2", "a": "é"}
        )
        for keys in (["a", "b"], ["c"]):
            (chunk,) = register(ledger, keys)
            bring_to(ledger, chunk, ChunkState.LOCATED, headers=headers)
        assert {ledger.lookup.locate(SOURCE, key).row.header_set for key in "abc"} == {headers.id}
        assert [
            version.header_set for version in ledger.content.located_versions(SOURCE, ["a"])
        ] == [headers.id]
        assert ledger.lookup.header_sets([headers.id, bytes(16)]) == {headers.id: headers}

    def test_headers_that_are_not_known_have_no_set(self, ledger):
        archive(ledger, ["a"])
        assert ledger.lookup.locate(SOURCE, "a").row.header_set is None

    def test_newest_object_is_current_in_any_loading_order(self, ledger):
        ledger.sources.register(SOURCE, "s3://a/")
        for day, version in [(2, "v2"), (3, "v3"), (1, "v1")]:
            plan = plan_record()
            name = f"src-{plan.name}-00001"
            register_plan(ledger, plan, [planned(1, ["a"])], claims((1, "a"), version=version))
            bring_to(ledger, name, ChunkState.LOCATED, modified=EARLY + timedelta(days=day))
        assert ledger.lookup.locate(SOURCE, "a").row.object_version == "v3"
        assert ledger.lookup.locate(SOURCE, "a", "v1").row.object_version == "v1"
        assert ledger.lookup.locate(SOURCE, "a", "v4") is None
        assert [row.object_version for row in ledger.lookup.versions(SOURCE, "a", 2)[0]] == [
            "v3",
            "v2",
        ]
        assert ledger.lookup.versions(SOURCE, "a", 2)[1] == 3
        assert ledger.lookup.versions(SOURCE, "b", 2) == ([], 0)

    def test_later_chunk_wins_among_equal_modification_times(self, ledger):
        ledger.sources.register(SOURCE, "s3://src")
        plan = plan_record()
        names = [f"src-{plan.name}-{number:05d}" for number in (1, 2)]
        claimed = chain(claims((1, "a"), version="v1"), claims((2, "a"), version="v2"))
        register_plan(ledger, plan, [planned(number, ["a"]) for number in (1, 2)], claimed)
        for name in reversed(names):
            bring_to(ledger, name, ChunkState.LOCATED)
        assert ledger.lookup.locate(SOURCE, "a").chunk == names[1]

    def test_an_impossible_key_has_no_location(self, ledger):
        archive(ledger, ["a"])
        for key in ["", "a\0", "\ud800", "k" * 1025]:
            assert ledger.lookup.locate(SOURCE, key) is None

    def test_many_keys_give_the_answers_of_single_keys(self, ledger):
        first, second = archive(ledger, ["a", "b", "gone"]), archive(ledger, ["c", *ODD_KEYS])
        end(ledger, archive(ledger, ["expired"]), ChunkState.EXPIRED)
        later = EARLY + timedelta(days=1)
        register_plan(ledger, plan_record(), [planned(1, ["b"])], claims((1, "b"), version="newer"))
        stated = [
            CurrentException(*row)
            for row in (("gone", later, None), ("b", later, "newer"), ("c", later, VERSION))
        ]
        ledger.content.record_planned(
            InventoryRecord(SOURCE, "src-20240102T000000000000Z", later), stated
        )
        keys = ["a", "b", "c", "gone", "expired", "never", "", "\ud800", "a", *ODD_KEYS]
        locations = ledger.lookup.locate_many(SOURCE, keys)
        assert locations == {
            key: ledger.lookup.locate(SOURCE, key)
            for key in keys
            if ledger.lookup.locate(SOURCE, key)
        }
        assert {key: row.chunk for key, row in locations.items()} == (
            dict.fromkeys(["a", "b", "gone"], first) | dict.fromkeys(["c", *ODD_KEYS], second)
        )
        assert {key for key, row in locations.items() if not row.currency.is_current} == {
            "b",
            "gone",
        }
        assert locations["b"].currency.state == "planned"
        assert locations["gone"].currency.gone_at == later
        assert (
            ledger.lookup.locate_many("another", keys)
            == ledger.lookup.locate_many(SOURCE, [])
            == {}
        )

    @pytest.mark.parametrize(
        "states",
        [
            [ChunkState.EXPIRED],
            [ChunkState.DAMAGED, ChunkState.EXPIRED],
            [ChunkState.DAMAGED, ChunkState.WITHDRAWN],
        ],
    )
    def test_objects_of_a_lost_chunk_are_archived_again(self, ledger, states):
        old = archive(ledger, ["a", "b"])
        end(ledger, old, *states)
        assert ledger.lookup.locate(SOURCE, "a") is None
        new = archive(ledger, ["a", "c"])
        assert ledger.lookup.locate(SOURCE, "a").chunk == new
        assert ledger.lookup.locate(SOURCE, "b") is None
        assert ledger.chunks.account(SOURCE).located_objects == 2

    def test_a_damaged_chunk_still_counts(self, ledger):
        chunk = archive(ledger, ["a"])
        end(ledger, chunk, ChunkState.DAMAGED)
        assert ledger.lookup.locate(SOURCE, "a").chunk == chunk
        assert settled(ledger, [("a", VERSION)]) == {("a", VERSION)}

    def test_a_key_without_location_has_its_reason(self, ledger):
        lost = archive(ledger, ["lost", "again", "kept"])
        end(ledger, lost, ChunkState.EXPIRED)
        archive(ledger, ["again"])
        skips = [skip("skipped"), skip("a%FFb", SkipReason.UNSUPPORTED_KEY)]
        (chunk,) = register(ledger, ["claimed", "lost"], skips=skips)

        def reasons(key):
            return sorted(
                (row.chunk or "", str(row.state), row.detail)
                for row in ledger.lookup.not_archived(SOURCE, key)
            )

        assert reasons("claimed") == [(chunk, "planned", "")]
        assert reasons("lost") == sorted([(chunk, "planned", ""), (lost, "expired", "")])
        assert (reasons("kept"), reasons("again")) == ([(lost, "expired", "")], [])
        assert reasons("skipped") == [("", "cold_storage", "as S3 said")]
        assert reasons("a\udcffb") == [("", "unsupported_key", "as S3 said")]
        assert ledger.lookup.not_archived(SOURCE, "a\udcffb")[0].retry_at is None
        assert ledger.lookup.not_archived(SOURCE, "skipped")[0].retry_at > EARLY
        for key in ("never", "", "a\0", "\ud800"):
            assert reasons(key) == []
        assert ledger.lookup.not_archived("another", "lost") == []

    # --- skips ---

    def test_a_skip_seen_again_replaces_the_older_one(self, ledger):
        ledger.sources.register(SOURCE, "s3://a/")
        ledger.skips.record(
            SOURCE, [skip("a", SkipReason.TOO_LARGE), skip("b", SkipReason.UNSUPPORTED_KEY)]
        )
        ledger.skips.record(SOURCE, [skip("a", SkipReason.COLD_STORAGE)])
        assert ledger.chunks.account(SOURCE).skipped == {
            SkipReason.COLD_STORAGE: 1,
            SkipReason.UNSUPPORTED_KEY: 1,
        }

    def test_skips_end_only_for_objects_the_inventory_covers(self, ledger, tmp_path):
        ledger.sources.register(SOURCE, "s3://a/")
        listed_at = EARLY + timedelta(days=2)
        old, new = EARLY, listed_at - timedelta(hours=1)
        modified = {"gone": old, "listed": old, "just put": new}
        skips = [
            replace(skip(key, SkipReason.UNSUPPORTED_KEY), last_modified=at)
            for key, at in modified.items()
        ]
        ledger.skips.record(SOURCE, skips)
        unlisted = [
            ("gone", VERSION),
            ("just put", VERSION),
            ("listed", "another"),
            ("never seen", VERSION),
        ]
        ledger.skips.end(SOURCE, unlisted, listed_at=listed_at, silent_from=new)
        due = {key: is_due for key, _, _, is_due in standing(ledger, tmp_path / "s")}
        assert due == {"gone": True, "listed": False, "just put": False}

    def test_an_object_that_is_located_is_no_longer_skipped(self, ledger, tmp_path):
        ledger.sources.register(SOURCE, f"s3://{SOURCE}")
        ledger.skips.record(SOURCE, [skip("a"), skip("b")])
        archive(ledger, ["a"])
        assert standing(ledger, tmp_path / "s") == {
            ("a", "located", None, False),
            ("b", "skipped", "cold_storage", False),
        }

    # --- failures, staging ---

    def test_a_run_that_fails_on_an_object_twice_counts_once(self, ledger):
        (chunk,) = register(ledger, ["a"])
        for run in ("r1", "r1", "r2"):
            ledger.read_failures.count(chunk, [("a", VERSION)], run)
        ledger.read_failures.count(chunk, [("b", VERSION), ("a", VERSION)], "r3")
        failures = {
            key: (failure.times, failure.last_run)
            for (key, _), failure in ledger.read_failures.list(chunk).items()
        }
        assert failures == {"a": (3, "r3"), "b": (1, "r3")}

    def test_reservations_of_all_chunks_together_stay_under_the_limit(self, ledger):
        one, other = register(ledger, ["a"], ["b"])
        with (
            ledger.leases.hold(f"chunk/{one}", holder()) as first,
            ledger.leases.hold(f"chunk/{other}", holder()) as second,
        ):
            ledger.staging.reserve(first, one, "/s", 60, 100)
            ledger.staging.reserve(first, one, "/s", 70, 100)
            with pytest.raises(StagingError, match="70 of 100"):
                ledger.staging.reserve(second, other, "/s", 31, 100)
            ledger.staging.reserve(second, other, "/another", 31, 100)
            ledger.staging.reserve(second, other, "/s", 31, 0)
            ledger.staging.release(one)
            ledger.staging.reserve(second, other, "/s", 100, 100)

    def test_a_chunk_that_is_done_holds_no_staging(self, ledger):
        one, other = register(ledger, ["a"], ["b"])
        with ledger.leases.hold(f"chunk/{one}", holder()) as lease:
            ledger.staging.reserve(lease, one, "/s", 100, 100)
        end(ledger, one, ChunkState.WITHDRAWN)
        with ledger.leases.hold(f"chunk/{other}", holder()) as lease:
            ledger.staging.reserve(lease, other, "/s", 100, 100)

    # --- what stores keep ---

    def test_one_log_is_shared_by_all_holders(self, ledger):
        ledger.transactions(holder("run-1")).see_height("chain-1", 5)
        assert ledger.transactions(holder("run-2")).seen_height("chain-1") == 5

    def test_a_new_rate_is_the_mean_with_the_old(self, ledger):
        providers = ledger.providers
        providers.uploaded("p", 1000, 10)
        providers.uploaded("p", 1000, 5)
        providers.downloaded("p", 300, 1)
        providers.uploaded("p", 1000, 0)  # too short to be measured
        record = ledger.providers.all()["p"]
        assert (record.upload_rate, record.download_rate, record.failures, record.failed_at) == (
            150,
            300,
            0,
            None,
        )

    def test_failures_are_counted_in_a_row(self, ledger):
        providers = ledger.providers
        for _ in range(2):
            providers.failed("p")
        record = providers.all()["p"]
        assert (record.failures, record.upload_rate, record.failed_at.tzinfo) == (2, None, UTC)
        providers.downloaded("p", 1, 1)
        assert (providers.all()["p"].failures, providers.all()["p"].failed_at) == (
            0,
            record.failed_at,
        )
        assert set(providers.all()) == {"p"}

    def test_orders_hold_until_they_are_taken_back(self, ledger):
        board = ledger.controls
        assert board.current() == OperatorControls()
        board.set("paused", "the bill")
        board.set("bandwidth", "1000")
        board.set("bandwidth", "0")
        board.set("spend_cap", "-1")
        assert ledger.controls.current() == OperatorControls("the bill", 0, -1)
        for name in ("paused", "bandwidth", "spend_cap"):
            board.set(name, None)
        assert board.current() == OperatorControls()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("speed", "1"),
            ("speed", None),
            ("paused", " "),
            ("bandwidth", "-1"),
            ("spend_cap", "a few"),
        ],
    )
    def test_an_order_that_makes_no_sense_is_refused(self, ledger, name, value):
        with pytest.raises(UsageError):
            ledger.controls.set(name, value)
        assert ledger.controls.current() == OperatorControls()

    def test_only_chunks_that_a_live_run_uploads_share_the_bandwidth(self, ledger):
        names = register(ledger, ["a"], ["b"], ["c"], ["d"])
        for name in names[:3]:
            bring_to(ledger, name, ChunkState.UPLOADING)
        assert ledger.controls.current().uploads == 1
        with contextlib.ExitStack() as held:
            for name in (*names[1:3], names[3]):
                held.enter_context(ledger.leases.hold(f"chunk/{name}", holder()))
            assert ledger.controls.current().uploads == 2

    # --- copies and their proofs ---

    def test_the_copies_that_verified_a_chunk_are_known(self, ledger):
        (chunk,) = register(ledger, ["a"])
        assert ledger.replicas.list(chunk) == []
        bring_to(ledger, chunk, ChunkState.UPLOADING)
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            ledger.replicas.record_verified(
                lease, chunk, [Copy("p2", "proof 2", 9), Copy("p1", "proof 1")]
            )
        assert seen(ledger, chunk) == [("p1", True, None, 0, ""), ("p2", True, 9, 0, "")]
        assert [copy.proof for copy in ledger.replicas.list(chunk)] == ["proof 1", "proof 2"]

    def test_copies_of_a_repeated_upload_replace_the_first(self, ledger):
        (chunk,) = register(ledger, ["a"])
        bring_to(ledger, chunk, ChunkState.VERIFIED)
        end(ledger, chunk, ChunkState.UPLOADING)
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            ledger.replicas.record_verified(lease, chunk, [Copy("another", "proof", 9)])
        assert seen(ledger, chunk) == [
            ("another", True, 9, 0, ""),
            ("provider", False, None, 0, ""),
        ]

    def test_each_proof_window_counts_once(self, ledger):
        chunk = archive(ledger, ["a"])
        for last_proven, window in [(100, 1), (110, 1), (None, None), (205, 2), (120, 1), (305, 3)]:
            look(ledger, chunk, CopyCheck(Copy("provider", "proof", last_proven), window))
        assert seen(ledger, chunk) == [("provider", True, 305, 3, "")]
        assert ledger.replicas.list(chunk)[0].last_window == 3

    def test_a_gap_between_proof_windows_restarts_the_count(self, ledger):
        chunk = archive(ledger, ["a"])
        assert windows_after(ledger, chunk, 1, 2) == 2
        assert windows_after(ledger, chunk, 5) == 1
        assert windows_after(ledger, chunk, None, 7) == 1
        assert windows_after(ledger, chunk, None, 8) == 2

    def test_windows_that_count_apart_need_not_follow_each_other(self, ledger):
        chunk = archive(ledger, ["a"])
        assert windows_after(ledger, chunk, 1, 1, None, 5, apart=True) == 2

    def test_a_limited_number_of_waiting_chunks_come_first(self, ledger):
        names = [archive(ledger, [key]) for key in "abcd"]
        for chunk, again_in, enough in zip(names[1:], (0, 0, 3600), (1, 1, 1), strict=True):
            look(
                ledger,
                chunk,
                CopyCheck(Copy("provider", "proof", 1), 1),
                again_in=again_in,
                enough=enough,
            )
        assert [chunk.name for chunk in ledger.chunks.to_prove(SOURCE, 9)] == names
        assert [chunk.name for chunk in ledger.chunks.to_prove(SOURCE, 9, waiting=1)] == [
            names[1],
            names[0],
            names[2],
            names[3],
        ]
        assert [chunk.name for chunk in ledger.chunks.to_prove(SOURCE, 9, waiting=9)] == [
            names[1],
            names[2],
            names[0],
            names[3],
        ]

    def test_a_chunk_with_enough_windows_waits_for_none(self, ledger):
        first, second = (archive(ledger, [key]) for key in "ab")
        for window in (1, 2):
            look(
                ledger,
                second,
                CopyCheck(Copy("provider", "proof", 1), window),
                again_in=0,
                enough=1,
            )
        assert [chunk.name for chunk in ledger.chunks.to_prove(SOURCE, 9, waiting=9)] == [
            first,
            second,
        ]

    def test_a_random_object_of_limited_size_is_chosen(self, ledger):
        rows = [location(f"key-{number}") for number in range(9)]
        chunk = archive(ledger, [row.key for row in rows])
        archive(ledger, ["elsewhere"], source="other")
        size = rows[0].end_byte - rows[0].start_byte
        assert ledger.chunks.any_object(chunk, size) in [
            Sample(row.start_byte, size, row.sha256) for row in rows
        ]
        assert ledger.chunks.any_object(chunk, size - 1) is None

    def test_only_a_chunk_without_post_gets_another_root(self, ledger):
        *unposted, posted = register(ledger, ["a"], ["b"], ["c"])
        bring_to(ledger, posted, ChunkState.POSTED)
        other = [Sample(0, 3, b"\1" * 32)]
        for chunk, state in zip(unposted, (ChunkState.SEALED, ChunkState.POSTING), strict=True):
            bring_to(ledger, chunk, state)
            with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
                ledger.moves.record_root(lease, chunk, b"\2" * 64, 0, other)
            row = ledger.chunks.get(chunk)
            assert (row.merkle_root, row.proof_type, list(row.samples), row.state) == (
                b"\2" * 64,
                0,
                other,
                state,
            )
        with (
            ledger.leases.hold(f"chunk/{posted}", holder()) as lease,
            pytest.raises(IllegalMove, match="'posted'"),
        ):
            ledger.moves.record_root(lease, posted, b"\2" * 64, 0, other)
        assert ledger.chunks.get(posted).merkle_root == ROOT

    def test_window_0_counts(self, ledger):
        chunk = archive(ledger, ["a"])
        look(ledger, chunk, CopyCheck(Copy("provider", "proof", 1), 0))
        assert ledger.replicas.list(chunk)[0].windows == 1

    def test_a_copy_missing_from_a_check_is_unlisted(self, ledger):
        chunk = archive(ledger, ["a"])
        look(ledger, chunk, CopyCheck(Copy("new", "proof", 7), 0, "wrong bytes at 100"))
        assert seen(ledger, chunk) == [
            ("new", True, 7, 0, "wrong bytes at 100"),
            ("provider", False, None, 0, ""),
        ]
        look(ledger, chunk, CopyCheck(Copy("new", "proof", 7), 0))
        assert ledger.replicas.list(chunk)[0].fault == ""

    def test_only_a_located_or_damaged_chunk_is_checked(self, ledger):
        (chunk,) = register(ledger, ["a"])
        bring_to(ledger, chunk, ChunkState.VERIFIED)
        with pytest.raises(IllegalMove, match="'verified'"):
            look(ledger, chunk)
        assert ledger.replicas.list(chunk)[0].listed

    def test_a_check_without_the_lease_writes_nothing(self, ledger):
        chunk = archive(ledger, ["a"])
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as old:
            pass
        with ledger.leases.hold(f"chunk/{chunk}", holder("run-2")), pytest.raises(LeaseLost):
            ledger.replicas.record_checks(old, chunk, [])
        assert ledger.replicas.list(chunk)[0].listed
        assert ledger.chunks.get(chunk).checked_at is None

    def test_chunks_are_checked_in_turn_new_ones_by_age(self, ledger):
        names = [archive(ledger, [key]) for key in "abc"]
        register(ledger, ["d"])
        archive(ledger, ["a"], source="other")
        for chunk in (names[1], names[0]):
            look(ledger, chunk, CopyCheck(Copy("provider", "proof"), None))
        assert [chunk.name for chunk in ledger.chunks.to_prove(SOURCE, 9)] == [
            names[2],
            names[1],
            names[0],
        ]
        first, *_ = ledger.chunks.to_prove(SOURCE, 1)
        assert first == ledger.chunks.get(names[2])
        assert (
            ledger.chunks.get(names[0]).checked_at
            > ledger.chunks.get(names[1]).checked_at
            > first.located_at
        )

    def test_a_damaged_chunk_is_not_proven_but_repaired(self, ledger):
        end(ledger, archive(ledger, ["a"]), ChunkState.DAMAGED)
        assert ledger.chunks.to_prove(SOURCE, 9) == []

    def test_a_repaired_chunk_needs_a_right_copy(self, ledger):
        chunk = archive(ledger, ["a"])
        end(ledger, chunk, ChunkState.DAMAGED)
        for checks in ([], [CopyCheck(Copy("provider", "proof"), None, "wrong bytes")]):
            look(ledger, chunk, *checks)
            with pytest.raises(IllegalMove, match=chunk):
                end(ledger, chunk, ChunkState.LOCATED)
        look(ledger, chunk, CopyCheck(Copy("provider", "proof"), 3))
        end(ledger, chunk, ChunkState.LOCATED)
        assert ledger.lookup.locate(SOURCE, "a").chunk == chunk

    def test_a_reposted_chunk_is_read_from_its_new_place(self, ledger):
        chunk = archive(ledger, ["a"])
        end(ledger, chunk, ChunkState.DAMAGED)
        again = replace(POSTING, start=99)
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            ledger.moves.record_repost(lease, chunk, again)
        assert ledger.lookup.locate(SOURCE, "a").posting == again
        assert [copy.listed for copy in ledger.replicas.list(chunk)] == [False]

    def test_other_bytes_do_not_repair_a_chunk(self, ledger):
        chunk = archive(ledger, ["a"])
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            with pytest.raises(IllegalMove, match="'located'"):
                ledger.moves.record_repost(lease, chunk, POSTING)
            ledger.moves.move(lease, chunk, ChunkState.LOCATED, ChunkState.DAMAGED)
            with pytest.raises(IntegrityError):
                ledger.moves.record_repost(
                    lease, chunk, replace(POSTING, merkle_root=b"\xff" * 32, start=99)
                )
        assert ledger.chunks.get(chunk).start == POSTING.start

    # --- questions ---

    def test_objects_located_claimed_or_skipped_are_known(self, ledger):
        archive(ledger, ["located"])
        register(ledger, ["claimed"], skips=[skip("skipped")])
        versions = [(key, VERSION) for key in ("located", "claimed", "skipped", "new")] + [
            ("located", "v2")
        ]
        assert {key for key, _ in settled(ledger, versions)} == {"located", "claimed", "skipped"}

    def test_odd_keys_are_known(self, ledger):
        register(ledger, ODD_KEYS)
        versions = [(key, VERSION) for key in ODD_KEYS]
        assert settled(ledger, versions) == set(versions)

    def test_the_export_gives_each_standing_with_its_exact_key(self, ledger, tmp_path):
        odd = [f"1 {key}"[:250] for key in ODD_KEYS]
        archive(ledger, ODD_KEYS)
        register(ledger, odd, skips=[skip("a%FFb", SkipReason.UNSUPPORTED_KEY)])
        expected = {(key, "located", None, False) for key in ODD_KEYS} | {
            (key, "claimed", None, False) for key in odd
        }
        assert standing(ledger, tmp_path / "s") == expected | {
            ("a%FFb", "skipped", "unsupported_key", False)
        }

    def test_plans_are_listed_latest_first_with_chunk_states(self, ledger):
        (first,) = register(ledger, ["a", "b"])
        (second,) = register(ledger, ["c"])
        end(ledger, first, ChunkState.PACKING)
        assert [row.chunks for row in ledger.plans.list(SOURCE)] == [
            {ChunkState.PLANNED: 1},
            {ChunkState.PACKING: 1},
        ]
        (latest,) = ledger.plans.list(limit=1)
        assert latest.record.name == ledger.chunks.get(second).plan
        assert ledger.plans.list("another") == []

    def test_the_account_adds_up(self, ledger):
        archive(ledger, ["a", "b"])
        _, two = register(ledger, ["c", "d", "e"], ["f"], skips=[skip("g")])
        end(ledger, two, ChunkState.WITHDRAWN)
        account = ledger.chunks.account(SOURCE)
        assert (account.located_objects, account.located_bytes, account.claimed_objects) == (
            2,
            20,
            3,
        )
        assert account.chunks == {
            ChunkState.LOCATED: 1,
            ChunkState.PLANNED: 1,
            ChunkState.WITHDRAWN: 1,
        }
        assert account.skipped == {SkipReason.COLD_STORAGE: 1}

    def test_chunks_are_listed_by_source_and_state(self, ledger):
        done = archive(ledger, ["a"])
        (open_,) = register(ledger, ["b"])
        register(ledger, ["b"], source="other")
        assert [chunk.name for chunk in ledger.chunks.list(SOURCE, [ChunkState.LOCATED])] == [done]
        assert {chunk.name for chunk in ledger.chunks.list(SOURCE)} == {done, open_}
        assert len(ledger.chunks.list()) == 3
        assert ledger.chunks.list(states=[]) == []

    # --- what may be deleted at its source ---

    def test_proofs_before_a_fault_no_longer_count(self, ledger):
        chunk = archive(ledger, ["a"])
        for window, fault in [(1, ""), (2, ""), (3, "wrong bytes"), (3, ""), (3, "")]:
            look(ledger, chunk, CopyCheck(Copy("provider", "proof", window), window, fault))
        assert ledger.replicas.list(chunk)[0].windows == 1
        look(ledger, chunk, CopyCheck(Copy("provider", "proof", 4), 4))
        assert ledger.replicas.list(chunk)[0].windows == 2

    def test_proofs_before_an_unlisting_no_longer_count(self, ledger):
        chunk = archive(ledger, ["a"])
        for window in (1, 2):
            look(ledger, chunk, CopyCheck(Copy("provider", "proof", window), window))
        look(ledger, chunk)
        assert ledger.replicas.list(chunk)[0].windows == 0
        look(ledger, chunk, CopyCheck(Copy("provider", "proof", 2), 2))
        assert ledger.replicas.list(chunk)[0].windows == 1

    def test_windows_of_a_new_post_are_counted_again(self, ledger):
        chunk = archive(ledger, ["a"])
        for window in (7, 8):
            look(ledger, chunk, CopyCheck(Copy("provider", "proof", window), window))
        end(ledger, chunk, ChunkState.DAMAGED)
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            ledger.moves.record_repost(lease, chunk, replace(POSTING, start=99))
        for window in (0, 1):
            look(ledger, chunk, CopyCheck(Copy("provider", "proof", window), window))
            assert ledger.replicas.list(chunk)[0].windows == window + 1

    def test_a_chunk_knows_when_it_was_read_back(self, ledger):
        chunk = archive(ledger, ["a"])
        assert ledger.chunks.get(chunk).read_back_at is None
        read_back(ledger, chunk)
        assert ledger.chunks.get(chunk).read_back_at > ledger.chunks.get(chunk).located_at
        assert [row.read_back_at for row in ledger.chunks.list()] == [
            ledger.chunks.get(chunk).read_back_at
        ]

    def test_only_a_located_or_damaged_chunk_is_read_back(self, ledger):
        (chunk,) = register(ledger, ["a"])
        bring_to(ledger, chunk, ChunkState.VERIFIED)
        with pytest.raises(IllegalMove, match="'verified'"):
            read_back(ledger, chunk)

    def test_a_run_that_lost_the_chunk_records_no_read_back(self, ledger):
        chunk = archive(ledger, ["a"])
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as old:
            pass
        with ledger.leases.hold(f"chunk/{chunk}", holder("run-2")), pytest.raises(LeaseLost):
            ledger.replicas.record_full_read(old, chunk, "provider")
        assert ledger.chunks.get(chunk).read_back_at is None

    def test_a_full_read_counts_while_its_copy_does(self, ledger):
        chunk = archive(ledger, ["a"])
        right, other = CopyCheck(Copy("provider", "proof"), 3), CopyCheck(Copy("other", "proof"), 3)
        read_back(ledger, chunk)
        look(ledger, chunk, right, other)
        assert ledger.chunks.get(chunk).read_back_at is not None
        look(ledger, chunk, other)
        assert ledger.chunks.get(chunk).read_back_at is None

    def test_the_last_full_read_says_what_opened_it(self, ledger):
        chunk = archive(ledger, ["a"])
        for opened_with in (None, "age1recipient", None):
            read_back(ledger, chunk, opened_with)
            assert ledger.chunks.get(chunk).opened_with == opened_with
        read_back(ledger, chunk, "age1recipient")
        end(ledger, chunk, ChunkState.DAMAGED)
        assert ledger.chunks.get(chunk).opened_with is None

    def test_damage_repost_or_repair_ends_the_full_read(self, ledger):
        chunk = archive(ledger, ["a"])
        read_back(ledger, chunk)
        end(ledger, chunk, ChunkState.DAMAGED)
        assert ledger.chunks.get(chunk).read_back_at is None
        read_back(ledger, chunk)
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            ledger.moves.record_repost(lease, chunk, replace(POSTING, start=99))
        assert ledger.chunks.get(chunk).read_back_at is None
        read_back(ledger, chunk)
        look(ledger, chunk, CopyCheck(Copy("provider", "proof"), 3))
        end(ledger, chunk, ChunkState.LOCATED)
        assert ledger.chunks.get(chunk).read_back_at is None

    def test_exported_locations_equal_the_loaded_rows(self, ledger, tmp_path):
        chunk = archive(ledger, ODD_KEYS)
        archive(ledger, ["elsewhere"], source="other")
        rows = located(ledger, tmp_path / "l.parquet")
        expected = [location(key) for key in sorted(ODD_KEYS, key=str.encode)]
        assert [(row["key"].decode(), row["sha256"]) for row in rows] == [
            (row_of_key.key, row_of_key.sha256) for row_of_key in expected
        ]
        assert {(row["part"], row["part_count"]) for row in rows} == {(0, 0)}
        for name in ("object_version", "start_byte", "end_byte", "version_id", "etag"):
            assert [row[name] for row in rows] == [
                getattr(row_of_key, name) for row_of_key in expected
            ]
        assert {row["caf_file_id"] for row in rows} == {ledger.chunks.get(chunk).caf_file_id}

    def test_exported_locations_are_of_chunks_in_good_standing(self, ledger, tmp_path):
        chunks = [archive(ledger, [key]) for key in "abc"]
        end(ledger, chunks[1], ChunkState.DAMAGED)
        end(ledger, chunks[2], ChunkState.EXPIRED)
        assert [row["key"] for row in located(ledger, tmp_path / "l.parquet")] == [b"a", b"b"]

    # --- restoring ---

    def test_a_restored_chunk_has_plan_rows_skips_and_copies(self, ledger):
        ledger.sources.register(SOURCE, "s3://src")
        assert (
            restore(
                ledger,
                restored(1, ["a", "b"], skipped=1),
                batches(map(location, ["a", "b"])),
                [skip("c")],
            )
            == 2
        )
        chunk = ledger.chunks.get("src-0a0b0c0d-00001")
        assert (chunk.state, chunk.plan, chunk.plan_folder, chunk.number) == (
            ChunkState.LOCATED,
            "0a0b0c0d",
            "plans/x",
            1,
        )
        assert (chunk.merkle_root, chunk.owner, chunk.start, chunk.proof_type) == (
            ROOT,
            "jkl1owner",
            1,
            3,
        )
        assert (
            chunk.object_count,
            chunk.member_count,
            chunk.skipped_count,
            chunk.released_count,
        ) == (3, 2, 1, 0)
        assert chunk.samples == tuple(seal_facts(2).samples)
        assert ledger.lookup.locate(SOURCE, "a").row == location("a")
        assert [copy.provider for copy in ledger.replicas.list(chunk.name)] == ["p"]
        assert settled(ledger, [(key, VERSION) for key in "abcd"]) == {
            (key, VERSION) for key in "abc"
        }
        assert ledger.chunks.account(SOURCE).located_objects == 2

    def test_a_restored_chunk_with_a_fault_is_damaged(self, ledger):
        ledger.sources.register(SOURCE, "s3://src")
        facts = {"plan_sha256": b"h" * 32, "object_count": 5, "object_bytes": 50}
        restore(
            ledger,
            replace(restored(1, ["a"]), **facts),
            batches([location("a")]),
            [],
            fault="1 of 3 copies",
        )
        chunk = ledger.chunks.get("src-0a0b0c0d-00001")
        assert (chunk.state, chunk.reason) == (ChunkState.DAMAGED, "1 of 3 copies")
        assert (chunk.object_count, chunk.object_bytes, chunk.released_count) == (5, 50, 4)
        assert ledger.plans.find(b"h" * 32).name == "0a0b0c0d"

    def test_restored_chunks_share_a_plan_and_give_its_hash(self, ledger):
        ledger.sources.register(SOURCE, "s3://src")
        restore(ledger, restored(1, ["a"]), batches([location("a")]), [])
        assert ledger.plans.find(b"h" * 32) is None
        restore(
            ledger, replace(restored(2, ["b"]), plan_sha256=b"h" * 32), batches([location("b")]), []
        )
        restore(ledger, restored(3, ["c"]), batches([location("c")]), [])
        found = ledger.plans.find(b"h" * 32)
        assert (found.object_count, found.object_bytes) == (3, 30)
        with pytest.raises(IntegrityError):
            restore(
                ledger,
                replace(restored(4, ["d"]), plan_sha256=b"i" * 32),
                batches([location("d")]),
                [],
            )

    def test_a_restored_chunk_keeps_a_registered_plans_counts(self, ledger):
        (name,) = register(ledger, ["a", "b"])
        plan = name.split("-")[1]
        before = ledger.chunks.get(name)
        chunk = replace(restored(2, ["c"]), plan=plan, name=f"src-{plan}-00002")
        assert restore(ledger, chunk, batches([location("c")]), []) == 1
        assert ledger.chunks.get(name) == before
        assert ledger.chunks.get(chunk.name).plan == plan

    def test_a_chunk_that_the_ledger_has_is_not_restored(self, ledger):
        chunk = archive(ledger, ["a"])
        before = ledger.chunks.get(chunk)
        with pytest.raises(LedgerError, match="located"):
            restore(ledger, replace(restored(1, ["b"]), name=chunk), batches([location("b")]), [])
        assert ledger.chunks.get(chunk) == before
        assert ledger.lookup.locate(SOURCE, "b") is None

    @pytest.mark.parametrize("keys", [["a"], ["a", "b", "c"], ["a", "a"]])
    def test_rows_that_are_not_the_members_restore_nothing(self, ledger, keys):
        ledger.sources.register(SOURCE, "s3://src")
        with pytest.raises(LedgerError):
            restore(ledger, restored(1, ["a", "b"]), batches(map(location, keys)), [])
        assert ledger.chunks.list() == []
        assert not ledger.plans.is_name_taken(SOURCE, "0a0b0c0d")

    def test_an_error_in_the_rows_restores_nothing(self, ledger):
        ledger.sources.register(SOURCE, "s3://src")

        def rows():
            yield location("a")
            raise IntegrityError("other bytes")

        with pytest.raises(IntegrityError, match="other bytes"):
            restore(ledger, restored(1, ["a", "b"]), batches(rows()), [])
        assert ledger.chunks.list() == []
        assert ledger.lookup.locate(SOURCE, "a") is None

    def test_an_object_that_is_claimed_is_not_restored(self, ledger):
        register(ledger, ["a"])
        with pytest.raises(ClaimConflict, match="'a'"):
            restore(ledger, restored(1, ["a", "b"]), batches(map(location, ["a", "b"])), [])
        assert ledger.lookup.locate(SOURCE, "b") is None

    def test_a_superseded_chunk_is_not_restored(self, ledger):
        chunk = archive(ledger, ["a"])
        assert restore(ledger, restored(1, ["a", "b"]), batches(map(location, ["a", "b"])), []) == 1
        assert (
            ledger.lookup.locate(SOURCE, "a").chunk,
            ledger.lookup.locate(SOURCE, "b").chunk,
        ) == (chunk, "src-0a0b0c0d-00001")
        assert restore(ledger, restored(2, ["a"]), batches([location("a")]), []) == 0
        assert len(ledger.chunks.list()) == 2

    def test_a_location_in_a_lost_chunk_is_replaced(self, ledger):
        chunk = archive(ledger, ["a"])
        end(ledger, chunk, ChunkState.DAMAGED, ChunkState.WITHDRAWN)
        assert restore(ledger, restored(1, ["a"]), batches([location("a")]), []) == 1
        assert ledger.lookup.locate(SOURCE, "a").chunk == "src-0a0b0c0d-00001"

    def test_odd_keys_are_restored(self, ledger):
        ledger.sources.register(SOURCE, "s3://src")
        restore(ledger, restored(1, ODD_KEYS), batches(map(location, ODD_KEYS)), [])
        assert {key for key in ODD_KEYS if ledger.lookup.locate(SOURCE, key)} == set(ODD_KEYS)

    # --- leases ---

    def test_a_held_lease_names_its_run_to_others(self, ledger):
        with ledger.leases.hold("plan/src", holder("run-1")), pytest.raises(HeldByOther) as refused:
            ledger.leases.hold("plan/src", holder("run-2")).__enter__()
        assert refused.value.holder == "run-1"

    def test_each_holding_has_a_greater_epoch(self, ledger):
        (chunk,) = register(ledger, ["a"])
        epochs = []
        for run in ("r1", "r2", "r3"):
            with ledger.leases.hold(f"chunk/{chunk}", holder(run)) as lease:
                lease.check()
                epochs.append((lease.epoch, ledger.chunks.get(chunk).epoch))
        assert all(of_lease == of_chunk for of_lease, of_chunk in epochs)
        assert epochs[0] < epochs[1] < epochs[2]

    def test_a_lease_is_given_back_when_its_holder_fails(self, ledger):
        with pytest.raises(ConnectionError), ledger.leases.hold("plan/src", holder("r1")):
            raise ConnectionError("the cable")
        with ledger.leases.hold("plan/src", holder("r2")) as lease:
            lease.check()

    def test_an_unknown_chunk_cannot_be_held(self, ledger):
        with pytest.raises(NotLocated):
            ledger.leases.hold("chunk/src-none", holder()).__enter__()

    # --- care ---

    def test_held_leases_are_listed_with_their_holder(self, ledger):
        with (
            ledger.leases.hold("plan/src", holder("run-1")) as lease,
            ledger.leases.hold("account/x", holder("run-2")),
        ):
            first, second = ledger.leases.list()
            assert (first.name, first.holder, first.live) == ("account/x", holder("run-2"), True)
            assert (second.name, second.epoch) == ("plan/src", lease.epoch)
        assert ledger.leases.list() == []

    def test_a_lease_whose_holder_may_live_is_not_ended(self, ledger):
        far = replace(holder("far"), boot_id="another machine")
        with (
            ledger.leases.hold("plan/src", holder("run-1")) as here,
            ledger.leases.hold("plan/other", far) as there,
        ):
            assert not ledger.leases.end("plan/src", here.epoch)
            assert not ledger.leases.end("plan/other", there.epoch)
            assert len(ledger.leases.list()) == 2

    def test_a_dead_lease_ends_once_and_by_epoch(self, ledger):
        with ledger.leases.hold("plan/src", replace(holder("dead"), process_started=-1.0)) as lease:
            assert not ledger.leases.end("plan/src", lease.epoch + 1)
            assert ledger.leases.end("plan/src", lease.epoch)
            assert not ledger.leases.end("plan/src", lease.epoch)
            assert ledger.leases.list() == []
        with ledger.leases.hold("plan/src", holder("next")) as next_:
            assert next_.epoch > lease.epoch

    def test_reservations_are_listed_with_their_chunks_state(self, ledger):
        (chunk,) = register(ledger, ["a"])
        with ledger.leases.hold(f"chunk/{chunk}", holder()) as lease:
            ledger.staging.reserve(lease, chunk, "/staging", 1000, 0)
        assert ledger.staging.list() == [Reservation(chunk, ChunkState.PLANNED, "/staging", 1000)]
        ledger.staging.release(chunk)
        assert ledger.staging.list() == []

    def test_dropping_stray_rows_keeps_rows_that_a_chunk_needs(self, ledger):
        located = archive(ledger, ["a", "b"])
        (claiming,) = register(ledger, ["c"])
        counted = {rows.chunk: rows for rows in ledger.stray_rows.by_chunk(SOURCE)}
        assert (
            counted[located].locations,
            counted[located].claims,
            counted[located].member_count,
        ) == (2, 0, 2)
        assert (counted[claiming].locations, counted[claiming].claims, counted[claiming].state) == (
            0,
            1,
            ChunkState.PLANNED,
        )
        assert [ledger.stray_rows.drop(rows.caf_file_id) for rows in counted.values()] == [0, 0]
        assert settled(ledger, [(key, VERSION) for key in "abc"]) == {
            (key, VERSION) for key in "abc"
        }

    def test_an_unknown_source_and_an_unknown_chunk_have_no_rows(self, ledger):
        assert ledger.stray_rows.by_chunk("nobody") == []
        assert ledger.stray_rows.drop(999) == 0
