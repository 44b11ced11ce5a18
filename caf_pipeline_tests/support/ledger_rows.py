"""Functions that prepare a ledger for a test, and return what it holds."""

import hashlib
import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from caf_pipeline.caf.archive import Member
from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.ledger_rows import LOCATED_SCHEMA, STANDING_SCHEMA
from caf_pipeline.inventory.location_row import LocationRow
from caf_pipeline.inventory.manifest import LOCATION_SCHEMA
from caf_pipeline.inventory.objects import S3Object, SkipReason, is_rewritten
from caf_pipeline.inventory.plan import CLAIM_COLUMNS, PLAN_SCHEMA, ChunkPlan
from caf_pipeline.ledger.records import (
    CopyCheck,
    PlanRecord,
    RemoteChunk,
    SealRecord,
    Skip,
    plan_lease,
)
from caf_pipeline.records import Copy, PostedFile, PostRecord, Sample
from caf_pipeline.system.processes import Holder, this_process
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


def held(ledger: Any, chunk: str, run: str = "run-1") -> Any:
    """Hold the lease of a chunk."""
    return ledger.leases.hold(f"chunk/{chunk}", holder(run))


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
        excluded = {skip.key for skip in skips} | {key for key, _ in released}
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
    with held(ledger, chunk) as lease:
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


def chunk_in(ledger: Any, state: ChunkState, keys: Sequence[str] = ("a",)) -> str:
    """Plan a chunk of these keys and bring it to a state; return its name."""
    (chunk,) = register(ledger, keys)
    bring_to(ledger, chunk, state)
    return chunk


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


def end(ledger: Any, chunk: str, *states: ChunkState) -> None:
    with held(ledger, chunk) as lease:
        for state in states:
            ledger.moves.move(lease, chunk, ledger.chunks.get(chunk).state, state)


def look(
    ledger: Any, chunk: str, *checks: CopyCheck, again_in: float | None = None, enough: int = 0
) -> None:
    """Record a check of a chunk's copies."""
    with held(ledger, chunk) as lease:
        ledger.replicas.record_checks(lease, chunk, checks, again_in=again_in, enough=enough)


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
    with held(ledger, chunk) as lease:
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
