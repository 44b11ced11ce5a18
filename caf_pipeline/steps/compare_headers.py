"""Compares objects whose bytes are located, and that were written again, with what the archive has
of them.

Each object costs a HEAD. ETag and size prove nothing: S3's checksum of the full object must equal
the archived one of the same algorithm: SHA-256, CRC-64/NVME, or the algorithm of the checksum that
S3 gave when the object was packed. Then its headers are compared with the archived ones. If they
are equal, too, an exception says that the located object is current. Else it is archived again.

Source: "Which objects are to be archived" in docs/explanation/design.md;
docs/decisions/0014-what-is-current.md.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

import pyarrow as pa

from caf_pipeline.errors import ObjectReadFailed, ObjectUnavailable
from caf_pipeline.inventory.objects import CurrentException, S3Object, SkipReason
from caf_pipeline.inventory.snapshot import read_objects
from caf_pipeline.ledger.records import InventoryRecord, LocatedVersion, Skip
from caf_pipeline.run_context import RunContext
from caf_pipeline.source.protocol import ObjectHead
from caf_pipeline.store.protocol import Lease
from caf_pipeline.system.parquet import write_whole

OBJECTS_AT_ONCE: Final = 10_000
"""Objects that stand in memory, with the headers of each: some 20 MB."""

WITHOUT_CHECKSUM: Final = "S3 has no full-object checksum of an algorithm that the archive recorded"
OTHER_BYTES: Final = "S3's checksum of the full object differs from the archived one"

REWRITTEN_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("last_modified", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("detail", pa.string(), nullable=False),  # WITHOUT_CHECKSUM or OTHER_BYTES
    ]
)
"""Objects that were written again, and whose bytes are not proven to be the archived ones; in the
order of keys.
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many objects were written again, and how they compare with the archive.

    Attributes:
        requests: HEADs, one for each object.
        equal: objects of the archived bytes and headers.
        other_headers: objects of the archived bytes with other headers.
        other_bytes: objects with a full-object checksum that differs from the archived one.
        without_checksum: objects without a full-object checksum that could be compared.
        not_compared: objects that are skipped for now.
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
    """Compare the objects of a file, and record the equal ones as exceptions, and those that could
    not be compared as skipped.

    Args: context: the source. lease: on its plan. inventory: that lists the objects. to_compare: of
        `inventory.SNAPSHOT_SCHEMA`, in the order of keys. rewritten: gets the objects whose bytes
        are not proven to be the archived ones (REWRITTEN_SCHEMA).

    Raises:
        SourceError: S3 is out of reach. LeaseLost. StagingError: no room.
    """
    counts = Counter[str]()

    def compared() -> Iterator[pa.RecordBatch]:
        objects = read_objects(to_compare)
        with ThreadPoolExecutor(context.settings.packing.fetch_threads, "compare") as pool:
            while some := list(islice(objects, OBJECTS_AT_ONCE)):
                context.wait_while_paused(lease.check)
                heads = list(pool.map(partial(_read_headers, context), some))
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
    """Record the results for some objects, count them, and yield those of other or unproven
    bytes.
    """
    versions = _located_versions(context, [obj for obj, _ in heads])
    proven = {
        obj: _of_same_bytes(versions[obj], head)
        for obj, head in heads
        if isinstance(head, ObjectHead)
    }
    equal, skips, rewritten = list[CurrentException](), list[Skip](), list[dict[str, object]]()
    for obj, head in heads:
        counts["requests"] += 1
        if not isinstance(head, ObjectHead):
            skips.append(_skip(obj, head))
        elif proven[obj]:
            header_set = head.headers.id
            identity = next(
                (
                    version.object_version
                    for version in proven[obj]
                    if version.header_set == header_set
                ),
                None,
            )
            if identity is not None:
                equal.append(_stands_for(inventory, obj, identity))
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


def _read_headers(context: RunContext, obj: S3Object) -> _Head:
    try:
        return context.objects.read_headers(obj)
    except (ObjectUnavailable, ObjectReadFailed) as error:
        return error


def _stands_for(inventory: InventoryRecord, obj: S3Object, identity: str) -> CurrentException:
    """Return the exception that makes a located identity current for the object as it was
    listed.
    """
    return CurrentException(
        obj.key.decode(), max(inventory.taken_at, obj.last_modified), identity, obj.last_modified
    )


def _skip(obj: S3Object, why: Exception) -> Skip:
    reason = (
        SkipReason(why.reason) if isinstance(why, ObjectUnavailable) else SkipReason.NOT_COMPARED
    )
    return Skip.of(obj, reason, str(why))


# --- what the archive has
# ------------------------------------------------------------------------------------------


def _located_versions(
    context: RunContext, objects: Sequence[S3Object]
) -> Mapping[S3Object, Sequence[LocatedVersion]]:
    """Return the located identities of each object's key with the same ETag and size, the newest
    first.
    """
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


def _of_same_bytes(
    versions: Sequence[LocatedVersion], head: ObjectHead
) -> Sequence[LocatedVersion]:
    """Return the located identities that share at least one algorithm with the HEAD, and have the
    digest of each shared one.
    """

    def agrees(version: LocatedVersion) -> bool:
        shared = head.checksums.keys() & version.checksums.keys()
        return bool(shared) and all(
            head.checksums[name] == version.checksums[name] for name in shared
        )

    return [version for version in versions if agrees(version)]
