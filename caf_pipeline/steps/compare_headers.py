"""Compares rewritten objects with the archive, by one HEAD each.

ETag and size prove nothing: S3's checksum of the full object must equal an archived one. If the
headers are equal, too, an exception makes the located object current. Otherwise the object is
archived again.

Source: docs/decisions/0014-what-is-current.md.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import pyarrow as pa

from caf_pipeline.errors import ObjectReadFailed, ObjectUnavailable
from caf_pipeline.inventory.objects import CurrentException, S3Object, SkipReason
from caf_pipeline.inventory.snapshot import read_objects
from caf_pipeline.ledger.records import InventoryRecord, LocatedVersion, Skip
from caf_pipeline.records import Lease
from caf_pipeline.run_context import RunContext
from caf_pipeline.source.protocol import ObjectHead
from caf_pipeline.system.parquet import write_whole

OBJECTS_AT_ONCE: Final = 10_000
"""Objects in memory, with their headers: about 20 MB."""

HEADS: Final = 16
"""Concurrent HEADs, each with a thread."""

WITHOUT_CHECKSUM: Final = "S3 has no full-object checksum of an algorithm that the archive recorded"
OTHER_BYTES: Final = "S3's checksum of the full object differs from the archived one"

REWRITTEN_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("last_modified", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("detail", pa.string(), nullable=False),  # WITHOUT_CHECKSUM or OTHER_BYTES
    ]
)
"""Rewritten objects whose bytes are not proven to be archived, in key order."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Number of rewritten objects, by the result of the comparison.

    Attributes:
        other_headers: with the archived bytes.
        without_checksum: with bytes that could not be compared.
        not_compared: skipped for now.
    """

    requests: int = 0
    equal: int = 0
    other_headers: int = 0
    other_bytes: int = 0
    without_checksum: int = 0
    not_compared: int = 0


def compare_headers(
    context: RunContext,
    lease: Lease,
    inventory: InventoryRecord,
    to_compare: Path,
    *,
    rewritten: Path,
) -> Comparison:
    """Compare a file's objects; record equal ones as exceptions, unreadable ones as skips.

    `to_compare` has SNAPSHOT_SCHEMA, in key order. Objects with unproven bytes go to the new file
    `rewritten` (REWRITTEN_SCHEMA).
    """
    counts = Counter[str]()

    def read_headers(obj: S3Object) -> _Head:
        try:
            return context.objects.read_headers(obj)
        except (ObjectUnavailable, ObjectReadFailed) as error:
            return error

    def compared() -> Iterator[pa.RecordBatch]:
        objects = read_objects(to_compare)
        with ThreadPoolExecutor(min(HEADS, context.settings.packing.max_requests)) as pool:
            while some := list(islice(objects, OBJECTS_AT_ONCE)):
                context.wait_while_paused(lease.check)
                heads = list(pool.map(read_headers, some))
                yield from _compare(context, inventory, list(zip(some, heads, strict=True)), counts)

    write_whole(compared(), rewritten, REWRITTEN_SCHEMA)
    return Comparison(**counts)


_Head = ObjectHead | ObjectUnavailable | ObjectReadFailed


def _compare(
    context: RunContext,
    inventory: InventoryRecord,
    heads: Sequence[tuple[S3Object, _Head]],
    counts: Counter[str],
) -> Iterator[pa.RecordBatch]:
    versions = _located_versions(context, [obj for obj, _ in heads])
    equal, skips, rewritten = list[CurrentException](), list[Skip](), list[dict[str, object]]()
    for obj, head in heads:
        counts["requests"] += 1
        if not isinstance(head, ObjectHead):
            reason = SkipReason.NOT_COMPARED
            if isinstance(head, ObjectUnavailable):
                reason = SkipReason(head.reason)
            skips.append(Skip.of(obj, reason, str(head)))
        elif proven := [version for version in versions[obj] if _has_bytes_of(version, head)]:
            header_set = head.headers.id
            same = (
                version.object_version for version in proven if version.header_set == header_set
            )
            if (identity := next(same, None)) is not None:
                since = max(inventory.taken_at, obj.last_modified)
                key = obj.key.decode()
                equal.append(CurrentException(key, since, identity, obj.last_modified))
            else:
                counts["other_headers"] += 1
        else:
            comparable = any(
                head.checksums.keys() & version.checksums.keys() for version in versions[obj]
            )
            counts["other_bytes" if comparable else "without_checksum"] += 1
            detail = OTHER_BYTES if comparable else WITHOUT_CHECKSUM
            rewritten.append({"key": obj.key, "last_modified": obj.last_modified, "detail": detail})
    context.ledger.content.record_exceptions(inventory, equal)
    context.ledger.skips.record(context.source, skips)
    counts["equal"] += len(equal)
    counts["not_compared"] += len(skips)
    yield from pa.Table.from_pylist(rewritten, REWRITTEN_SCHEMA).to_batches()


# --- what the archive has -------------------------------------------------------------------------


def _located_versions(
    context: RunContext, objects: Sequence[S3Object]
) -> Mapping[S3Object, Sequence[LocatedVersion]]:
    """The newest identity is first."""
    by_key = defaultdict[str, list[LocatedVersion]](list)
    for version in context.ledger.content.located_versions(
        context.source, [obj.key.decode() for obj in objects]
    ):
        by_key[version.key].append(version)
    for versions in by_key.values():
        versions.sort(key=lambda version: version.object_version, reverse=True)
    return {
        obj: [
            version
            for version in by_key[obj.key.decode()]
            if (version.etag, version.size_bytes) == (obj.etag, obj.size_bytes)
        ]
        for obj in objects
    }


def _has_bytes_of(version: LocatedVersion, head: ObjectHead) -> bool:
    shared = head.checksums.keys() & version.checksums.keys()
    return bool(shared) and all(head.checksums[name] == version.checksums[name] for name in shared)
